"""What definitions would give: each figure against a slow count, and the command that prints them."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import Lake
from lake.errors import DataRefusedError, UsageError
from pipelines.credit import GiGPO, summarise
from pipelines.credit.anchor_measures import CANDIDATES, measure_anchors, steps_to_measure
from pipelines.credit.anchors import Anchors, ChosenColumns, ExactText, LastStates, NoErrors, SimilarText
from pipelines.credit.commands_anchors import anchors
from testkit.lakes import build_lake

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
        "ways_in": mean([len({led_here(n) for n in v}) for v in shared]),
        "errors": wrong / in_shared if marked else None,
    }


@settings(deadline=None, max_examples=80)
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
    found = measure_anchors(pl.LazyFrame(rows, schema=SCHEMA), definitions)
    assert found["anchors"].to_list() == list(definitions)
    for row in found.iter_rows(named=True):
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
    found = measure_anchors(steps, {"exact": ExactText()}).row(0, named=True)
    assert (found["shared"], found["one_action"], found["ways_in"], found["errors"]) == (1.0, None, None, None)


def test_nothing_to_measure_is_refused() -> None:
    empty = pl.LazyFrame(schema=SCHEMA)
    with pytest.raises(DataRefusedError, match="no active steps"):
        measure_anchors(empty, {"exact": ExactText()})


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build_lake(tmp_path_factory.mktemp("measures") / "lake")


def test_steps_of_a_lake(lk: Lake) -> None:
    definitions: list[Anchors] = [ChosenColumns(names=("state", "task_id", "model")), SimilarText()]
    snapshot = lk.snapshot()
    steps = steps_to_measure(snapshot, definitions).collect()
    assert steps.height == snapshot.scan("steps").collect().height
    assert {"state", "state_hash", "task_id", "model", "action", "episode_score", "status"} <= set(steps.columns)
    some = steps_to_measure(snapshot, definitions, groups=2).collect()
    all_groups = sorted(steps["group_id"].unique())
    assert sorted(some["group_id"].unique()) == all_groups[:2]
    chosen = steps_to_measure(snapshot, definitions, where="task_id = 'dead'").collect()
    assert set(chosen["task_id"]) == {"dead"}
    with pytest.raises(UsageError):
        steps_to_measure(snapshot, definitions, where="no such thing")
    with pytest.raises(DataRefusedError):
        steps_to_measure(snapshot, definitions, where="task_id = 'none'")


def run(lk: Lake, *options: str) -> Any:
    return CliRunner().invoke(anchors, ["--lake", str(Path(lk.uri)), *options])


def test_the_command_prints_rows_and_writes_nothing(lk: Lake) -> None:
    before = lk.snapshot().versions
    result = run(lk, "--format", "json")
    assert result.exit_code == 0, result.output
    assert [row["anchors"] for row in json.loads(result.stdout)] == list(CANDIDATES)
    assert lk.snapshot().versions == before


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
    ("given", "fault"),
    [
        ('{"kind": "nearest"}', "it has the kind 'nearest'; valid: 'chain', 'json'"),
        ('{"kind": "exact"', "it is no JSON: EOF while parsing"),
        ("missing.json", "neither a JSON object nor a file"),
        ('{"kind": "substitutions", "substitutions": [{"pattern": "("}]}', "unclosed group"),
    ],
)
def test_definitions_that_are_none_are_misuse(lk: Lake, given: str, fault: str) -> None:
    result = run(lk, "--anchors", given)
    assert isinstance(result.exception, UsageError)
    assert fault in str(result.exception)
    assert result.exception.exit_code == 2
