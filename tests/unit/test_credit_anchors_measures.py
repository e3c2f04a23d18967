"""What definitions would give: each figure against a slow count, and the command that prints them."""

import json
import shlex
import statistics
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import lake
from examples.text_game import ERRORS
from lake import EpisodeRecord, Lake, StepRecord
from lake.errors import DataRefusedError, UsageError
from pipelines.credit import GiGPO, summarise
from pipelines.credit.anchors import Anchors, ChosenColumns, ExactText, LastStates, NoErrors, SimilarText
from pipelines.credit.anchors.measures import (
    CANDIDATES,
    Walks,
    collect_columns,
    find_largest_anchors,
    measure,
    scan_steps,
)
from pipelines.credit.commands import anchors
from testkit.command_line import Cli, runner
from testkit.copies import copied
from testkit.examples import examples
from testkit.lakes import build_lake
from testkit.text_games import SCHEMA as GAME
from testkit.text_games import Row as Step
from testkit.text_games import game_rows, walk_rows, walks_of
from testkit.wording import Wording


def measure_anchors(steps: pl.LazyFrame, definitions: dict[str, Anchors]) -> pl.DataFrame:
    columns = collect_columns(definitions.values(), steps.collect_schema().names())
    return measure(Walks.of(steps, columns), definitions)


Row = dict[str, Any]
SCHEMA = {
    "group_id": pl.Int64,
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "state": pl.String,
    "state_is_error": pl.Boolean,
    "action": pl.String,
    "tool_calls": pl.String,
    "status": pl.String,
    "episode_score": pl.Float64,
}
FIGURES = ("known", "shared", "singleton", "states", "episodes", "one_action", "ways_in", "errors")


@st.composite
def step_rows(draw: st.DrawFn) -> list[Row]:
    """Sorted rows of some groups; the last episode of a group may have failed without a score."""
    rows = []
    for group in range(draw(st.integers(1, 2))):
        for sibling in range(draw(st.integers(1, 3))):
            status = draw(st.sampled_from(["completed", "completed", "failed"]))
            for step in range(draw(st.integers(1, 4))):
                rows.append(
                    {
                        "group_id": group,
                        "episode_id": 10 * group + sibling,
                        "step_index": step,
                        "state": draw(st.sampled_from(["a", "b", "err", None])),
                        "state_is_error": draw(st.sampled_from([True, False, None])),
                        "action": draw(st.sampled_from(["x", "y"])),
                        "tool_calls": None,
                        "status": status,
                        "episode_score": None if status == "failed" else 1.0,
                    }
                )
    return rows


def mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def slowly(rows: list[Row], labels: list[Any]) -> Row:
    """The figures, counted."""
    visits = defaultdict(list)
    taking_part = [n for n, row in enumerate(rows) if row["status"] != "failed"]
    for n in taking_part:
        if labels[n] is not None:
            visits[rows[n]["group_id"], labels[n]].append(n)
    shared = [v for v in visits.values() if len({rows[n]["episode_id"] for n in v}) > 1]

    def led_here(n: int) -> str | None:
        return rows[n - 1]["action"] if n and rows[n - 1]["episode_id"] == rows[n]["episode_id"] else None

    total, in_shared = len(taking_part), sum(map(len, shared))
    marked = any(rows[n]["state_is_error"] is not None for v in shared for n in v)
    wrong = sum(rows[n]["state_is_error"] is True for v in shared for n in v)
    return {
        "known": sum(map(len, visits.values())) / total,
        "shared": in_shared / total,
        "singleton": sum(len(v) == 1 for v in visits.values()) / total,
        "states": len(visits),
        "episodes": mean([len({rows[n]["episode_id"] for n in v}) for v in shared]),
        "one_action": mean([len({rows[n]["action"] for n in v}) == 1 for v in shared]),
        "ways_in": mean([len({led_here(n) for n in v} - {None}) for v in shared]),
        "errors": wrong / in_shared if marked else None,
    }


@settings(deadline=None, max_examples=examples(40))
@given(step_rows())
def test_figures_equal_a_slow_count(rows: list[Row]) -> None:
    if all(row["status"] == "failed" for row in rows):
        rows[0] |= {"status": "completed", "episode_score": 1.0}
        rows = [row | {k: rows[0][k] for k in ("status", "episode_score")} for row in rows if row["episode_id"] == 0]
    labels = {
        "exact": [row["state"] for row in rows],
        "no errors": [None if row["state_is_error"] else row["state"] for row in rows],
        "step": [row["step_index"] for row in rows],
    }
    definitions: dict[str, Anchors] = {
        "exact": ExactText(),
        "no errors": NoErrors(),
        "step": ChosenColumns(names=("step_index",)),
    }
    measures = measure_anchors(pl.LazyFrame(rows, schema=SCHEMA), definitions)
    assert measures["anchors"].to_list() == list(definitions)
    for row in measures.iter_rows(named=True):
        expected = slowly(rows, labels[row["anchors"]])
        assert {name: row[name] for name in FIGURES} == {
            name: value if value is None else pytest.approx(value) for name, value in expected.items()
        }
        assert row["seconds"] >= 0.0


def test_the_shares_are_those_of_the_credit_job() -> None:
    rows = [
        {"group_id": 0, "episode_id": e, "step_index": n, "state": state, "episode_score": float(e)}
        for e, walk in enumerate(["abca", "abd", "ax"])
        for n, state in enumerate(walk)
    ]
    steps = pl.LazyFrame(rows)
    for definition in (ExactText(), LastStates(k=2)):
        advantages = GiGPO(step_source="terminal_score", anchors=definition).advantages(steps)
        summary = summarise(advantages)
        figures = measure_anchors(steps, {"it": definition}).row(0, named=True)
        assert figures["shared"] == pytest.approx(summary.shared_fraction)
        assert figures["singleton"] == pytest.approx(summary.singleton_steps / summary.steps)


def test_what_there_is_no_column_for_is_null() -> None:
    steps = pl.LazyFrame({"group_id": [0, 0], "episode_id": [0, 1], "step_index": [0, 0], "state": ["a", "a"]})
    row = measure_anchors(steps, {"exact": ExactText()}).row(0, named=True)
    assert (row["shared"], row["one_action"], row["ways_in"], row["errors"]) == (1.0, None, None, None)


def test_nothing_to_measure_is_refused() -> None:
    empty = pl.LazyFrame(schema=SCHEMA)
    with pytest.raises(DataRefusedError, match="no active steps"):
        measure_anchors(empty, {"exact": ExactText()})


def test_episodes_that_all_failed_without_a_score_are_refused() -> None:
    row = {"group_id": 0, "episode_id": 0, "step_index": 0, "state": "a", "action": "x", "status": "failed"}
    steps = pl.LazyFrame([row, row | {"episode_id": 1}], schema=SCHEMA)
    with pytest.raises(DataRefusedError, match="nothing to compare: 2 episodes failed"):
        measure_anchors(steps, {"exact": ExactText()})
    scored = steps.with_columns(episode_score=pl.when(pl.col("episode_id") == 0).then(0.0))
    assert measure_anchors(scored, {"exact": ExactText()})["steps"].item() == 1


def slow_largest(rows: list[Step]) -> list[Row]:
    """Shared texts by their steps, counted; the first ones may tie."""
    visits: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, row in enumerate(rows):
        visits[row["state"]][row["group_id"]].append(n)
    counts = []
    for state, groups in visits.items():
        shared = {g: v for g, v in groups.items() if len({rows[n]["episode_id"] for n in v}) > 1}
        mine = [n for v in shared.values() for n in v]
        came = [n - 1 for n in mine if n and rows[n - 1]["episode_id"] == rows[n]["episode_id"]]
        stds = [(statistics.stdev([rows[n]["episode_score"] for n in v]), len(v)) for v in shared.values()]
        counts.append(
            {
                "state": state,
                "steps": len(mine),
                "groups": len(shared),
                "states_before": len({rows[n]["state"] for n in came}),
                "actions_before": len({rows[n]["action"] for n in came}),
                "actions": len({rows[n]["action"] for n in mine}),
                "score_std": sum(std * n for std, n in stds) / len(mine) if mine else None,
            }
        )
    return [row for row in counts if row["groups"]]


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_anchors_equal_a_slow_count(seed: int) -> None:
    world = {"a": {"x": "b", "y": "c"}, "b": {"x": "a", "z": "b"}, "c": {"x": "a", "y": "a"}, "d": {"x": "d"}}
    rows = walk_rows(world, seed, groups=3, siblings=3, steps=4)
    largest = find_largest_anchors(walks_of(rows), ExactText(), 10)
    assert largest["steps"].is_sorted(descending=True)
    assert largest.sort("state").to_dicts() == [
        {name: pytest.approx(value) if name == "score_std" else value for name, value in row.items()}
        for row in sorted(slow_largest(rows), key=lambda row: row["state"])
    ]
    assert find_largest_anchors(walks_of(rows), ExactText(), 2).equals(largest.head(2))


def test_an_unknown_state_is_shared_with_nothing() -> None:
    """NULL is not NULL: such steps are in no anchor, follow nothing and lead to nothing; nothing is added to A_E."""
    rows = [row | {"state": None if row["state"] == "hub" else row["state"]} for row in walk_rows(HUB, 0, groups=2)]
    unknown = sum(row["state"] is None for row in rows)
    walks = walks_of(rows)
    figures = measure_anchors(pl.LazyFrame(rows, schema=GAME), {"exact": ExactText()}).row(0, named=True)
    assert figures["known"] == pytest.approx(1 - unknown / len(rows))
    assert set(find_largest_anchors(walks, ExactText(), 10)["state"]) == {"left", "right"}
    assert find_largest_anchors(walks, ExactText(), 10)["states_before"].to_list() == [0, 0]
    credit = GiGPO(step_source="terminal_score").advantages(pl.LazyFrame(rows, schema=GAME)).collect()
    lonely = credit.filter(pl.col("flags").str.contains("unknown_state"))
    assert lonely.height == unknown
    assert lonely["anchor_key"].null_count() == unknown
    assert set(lonely["a_step"]) == {0.0}
    assert lonely["anchor_size"].sum() == 0


HUB = {"hub": {"l": "left", "r": "right"}, "left": {"back": "hub"}, "right": {"back": "hub"}}


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build_lake(tmp_path_factory.mktemp("measures") / "lake")


def test_steps_of_a_lake(lk: Lake) -> None:
    definitions: list[Anchors] = [ChosenColumns(names=("state", "task_id", "model")), SimilarText()]
    snapshot = lk.snapshot()
    steps = scan_steps(snapshot, definitions).collect()
    assert steps.height == snapshot.scan("steps").collect().height
    assert {"state", "state_hash", "task_id", "model", "action", "episode_score", "status"} <= set(steps.columns)
    some = scan_steps(snapshot, definitions, groups=2).collect()
    all_groups = sorted(steps["group_id"].unique())
    assert sorted(some["group_id"].unique()) == all_groups[:2]
    chosen_steps = scan_steps(snapshot, definitions, where="task_id = 'dead'").collect()
    assert set(chosen_steps["task_id"]) == {"dead"}
    with pytest.raises(UsageError):
        scan_steps(snapshot, definitions, where="no such thing")
    with pytest.raises(DataRefusedError):
        scan_steps(snapshot, definitions, where="task_id = 'none'")


def run(lk: Lake, *options: str) -> Any:
    return CliRunner().invoke(anchors, ["--lake", str(Path(lk.uri)), *options])


def test_the_command_prints_rows_and_writes_nothing(lk: Lake) -> None:
    before = lk.snapshot().versions
    result = run(lk, "--format", "json")
    assert result.exit_code == 0, result.output
    assert [row["anchors"] for row in json.loads(result.stdout)] == list(CANDIDATES)
    assert lk.snapshot().versions == before


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line in this process."""
    return runner(monkeypatch, capsys)


def game_lake(folder: Path) -> Lake:
    """The example's game, ten worlds of eight rollouts, the first of them three times."""
    lk = lake.open(folder, create=True)
    rows = game_rows(10, 3, counter=True, errors=True)
    episodes = [list(steps) for _, steps in groupby(rows, key=lambda row: row["episode_id"])]
    lk.append(
        EpisodeRecord(
            run_id="game",
            task_id=f"house {steps[0]['group_id']}",
            rollout_index=number % 8,
            env_return=steps[0]["episode_score"],
            steps=[StepRecord(state=step["state"], action=step["action"]) for step in steps],
        )
        for number, steps in enumerate([episodes[0], episodes[0], episodes[0], *episodes[3:]])
    )
    return lk


@pytest.fixture
def game(tmp_path: Path) -> Lake:
    return copied("game with copies", game_lake, tmp_path / "game")


def test_the_command_that_is_printed_gives_what_is_said(cli: Cli, game: Lake) -> None:
    before = game.snapshot().versions
    lines = cli("anchors", "--lake", game.uri).out.splitlines()
    assert game.snapshot().versions == before, "nothing is written"
    assert [line.split(":")[0] for line in lines if ': "' in line] == ["counter", *["error text"] * 3]
    printed = shlex.split(lines[-1])
    assert printed[:5] == ["trajlake", "credit", "gigpo", "--lake", game.uri]
    (sentence,) = (line for line in lines if line.startswith("Without them "))
    assert cli(*printed[1:]).code == 0
    (counted,) = game.sql(
        """
        SELECT count(*) FILTER (anchor_episodes >= 2) / count(*) AS shared,
               count(*) FILTER (contains(flags, 'singleton_anchor')) / count(*) AS alone,
               count(*) FILTER (contains(flags, 'left_out')) / count(*) AS left_out
        FROM latest_advantages
        """
    ).to_dicts()
    assert sentence.startswith(f"Without them {counted['shared']:.1%} of the steps ")
    assert f" {counted['alone']:.1%} are alone " in sentence
    assert f" {counted['left_out']:.1%} are compared with nothing " in sentence
    (suggested,) = (
        row
        for row in json.loads(cli("anchors", "--lake", game.uri, "--format", "json").out)
        if row["anchors"] == "suggested"
    )
    assert suggested["shared"] == pytest.approx(counted["shared"])
    largest = json.loads(cli("anchors", "--lake", game.uri, "--format", "json", "--rows", "largest").out)
    assert largest[0]["state"] in ERRORS
    again = cli("anchors", "--lake", game.uri, "--anchors", printed[-1].removeprefix("anchors=")).out
    assert "error text" not in again, "asked for one definition, that one is measured"


def test_copied_siblings_are_told_and_dedup_drops_exactly_these(cli: Cli, game: Lake, wording: Wording) -> None:
    printed = cli("anchors", "--lake", game.uri).out
    assert "2 of 80 episodes are exact copies" in printed
    assert "in 1 of 10 groups" in printed
    credited = cli("credit", "gigpo", "--lake", game.uri).err
    (line,) = (line for line in credited.splitlines() if line.startswith("copied_siblings: "))
    assert wording(line, URI=game.uri).startswith("copied_siblings: 2 of 80 episodes ")
    assert "in 1 group (task house 0: 2 of 8)" in line
    command = shlex.split(line.rpartition("`trajlake ")[2].rstrip("`"))
    assert command[-2:] == ["--lake", game.uri]
    (counts,) = game.sql("SELECT counts FROM job_runs WHERE kind = 'credit'")["counts"]
    assert json.loads(counts)["copies"] == 2
    assert json.loads(counts)["copied_siblings"] == 1
    assert game.sql("SELECT count(*) AS n FROM credit_groups WHERE findings = 'copied_siblings'")["n"].item() == 1
    assert cli(*command).code == 0
    dropped = game.sql(
        """
        SELECT e.task_id, e.rollout_index FROM selections JOIN episodes AS e USING (episode_id)
        WHERE selection = 'distinct' AND NOT kept
        """
    )
    assert set(dropped["task_id"]) == {"house 0"}
    assert dropped.height == 2
    assert set(dropped["rollout_index"]) < {0, 1, 2}


def test_the_command_takes_definitions_as_json_and_from_files(lk: Lake, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"kind": "last_states", "k": 2}')
    result = run(lk, "--anchors", '{"kind": "exact"}', "--anchors", str(file), "--format", "json", "--groups", "0")
    rows = json.loads(result.stdout)
    assert [row["anchors"] for row in rows] == ['{"kind": "exact"}', str(file)]
    (scored,) = lk.sql("SELECT sum(num_steps) FROM episodes WHERE env_return IS NOT NULL").row(0)
    assert rows[0]["steps"] == rows[1]["steps"] == scored, "a failed episode without a score takes no part"
    fewer = run(lk, "--anchors", '{"kind": "exact"}', "--groups", "1", "--format", "json", "--where", "true")
    assert json.loads(fewer.stdout)[0]["steps"] < rows[0]["steps"]


@pytest.mark.parametrize(
    ("definition", "fault"),
    [
        ('{"kind": "nearest"}', "it has the kind 'nearest'; valid: 'chain', 'json'"),
        ('{"kind": "exact"', "it is not JSON: EOF while parsing"),
        ("missing.json", "neither a JSON object nor a file"),
        ('{"kind": "substitutions", "substitutions": [{"pattern": "("}]}', "unclosed group"),
    ],
)
def test_definitions_that_are_none_are_misuse(lk: Lake, definition: str, fault: str) -> None:
    result = run(lk, "--anchors", definition)
    assert isinstance(result.exception, UsageError)
    assert fault in str(result.exception)
    assert result.exception.exit_code == 2
