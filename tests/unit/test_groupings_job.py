"""Counterfactual groups on real lakes: what is written, who reads it, what is skipped, what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

import lake
from lake import Lake
from lake.cli.options import format_ids
from lake.errors import DataRefusedError, UsageError
from lake.judgements.selections import find_grouping_job, read_grouping
from pipelines.groupings import (
    DropFailed,
    Grouping,
    MergeRuns,
    StalenessCap,
    Subsample,
    run_grouping,
)
from testkit.command_line import Cli, runner
from testkit.lakes import build_lake, siblings


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """One episode; nothing here writes to it."""
    return build_lake(tmp_path_factory.mktemp("group") / "lake", siblings("t", [1.0]))


def grouping(*steps: Any, name: str = "g") -> Grouping:
    return Grouping(name=name, steps=steps)


def test_rows_name_the_new_group_and_the_one_it_was_collected_with(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    report = run_grouping(lk, grouping(DropFailed()))
    rows = lk.scan("groupings").collect()
    episodes = lk.scan("episodes").collect()
    remaining = episodes.filter(pl.col("status") != "failed")
    assert set(rows["episode_id"]) == set(remaining["episode_id"])
    joined = rows.join(remaining, on="episode_id", suffix="_collected")
    assert joined["collected_group_id"].equals(joined["group_id_collected"])
    assert joined["run_id"].equals(joined["run_id_collected"])
    assert not set(rows["group_id"]) & set(episodes["group_id"]), "another definition, other groups"
    assert rows["group_id"].n_unique() == episodes["group_id"].n_unique()
    assert report.notes == [("drop_failed", "status failed", 2)]
    assert report.table.rows() == [("g", 6, 22, 3, 4)]


def test_the_job_row_records_the_definition_and_the_counts(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    report = run_grouping(lk, grouping(StalenessCap(max_behind=0), DropFailed()), where="collection_round = 0")
    row = lk.sql("SELECT * FROM job_runs WHERE job_id = ?", [report.job_id]).row(0, named=True)
    parameters = msgspec.json.decode(row["parameters"])
    assert [step["kind"] for step in parameters["steps"]] == ["staleness_cap", "drop_failed"]
    assert parameters["where"] == "collection_round = 0"
    assert (row["kind"], row["rows_in"], row["rows_out"], row["rows_dropped"]) == ("group", 12, 11, 1)
    assert msgspec.json.decode(row["counts"]) == {"notes": {"drop_failed: status failed": 1}}


def test_every_draw_is_a_grouping_of_its_own(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    report = run_grouping(lk, grouping(Subsample(size=2, draws=3), name="pairs"))
    assert report.table.rows() == [(f"pairs/{draw}", 6, 12, 2, 2) for draw in range(3)]
    snapshot = lk.snapshot()
    drawn = [frozenset(read_grouping(snapshot, f"pairs/{draw}")["episode_id"]) for draw in range(3)]
    assert all(len(members) == 12 for members in drawn)
    assert len(set(drawn)) == 3
    assert frozenset.union(*drawn) > drawn[0], "an episode is in several draws, or in none"
    with pytest.raises(UsageError, match=r"no grouping 'pairs'; there are pairs/0, pairs/1, pairs/2\. Make one"):
        read_grouping(snapshot, "pairs")


MEMBERS = """
SELECT list(e.run_id || e.task_id || e.rollout_index ORDER BY e.run_id, e.task_id, e.rollout_index) AS members
FROM groupings AS g JOIN episodes AS e USING (episode_id) WHERE g.job_id = ? GROUP BY g.group_id ORDER BY members
"""


def test_runs_merge_where_they_start_alike(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 1.0]), run_id="one")
    changes: dict[str, dict[str, Any]] = {
        "two": {},
        "tools": {"tools": [{"type": "function", "function": {"name": "look"}}]},
        "words": {"initial_messages": [{"role": "user", "content": "Another start."}]},
        "seed": {"seed": 8},
        "unknown": {"initial_messages": None},
        "policy": {"policy": "other"},
    }
    for run_id, fields in changes.items():
        lk.append(siblings("t", [0.0, 0.0], **fields), run_id=run_id)
    report = run_grouping(lk, grouping(MergeRuns()))
    pair = {run_id: [f"{run_id}t0", f"{run_id}t1"] for run_id in ("one", *changes)}
    members = lk.sql(MEMBERS, [report.job_id])["members"].to_list()
    together = pair["one"] + pair["policy"] + pair["two"]
    assert members == sorted([together, *(pair[run_id] for run_id in ("tools", "words", "seed", "unknown"))])
    ((step, why, episodes),) = report.notes
    assert (step, episodes) == ("merge_runs", 2)
    assert "context not recorded" in why
    apart = run_grouping(lk, grouping(MergeRuns(also_equal=("policy",))))
    assert pair["one"] + pair["two"] in lk.sql(MEMBERS, [apart.job_id])["members"].to_list()
    loose = run_grouping(lk, grouping(MergeRuns(context="any")))
    assert loose.table.rows() == [("g", 2, 14, 2, 12)], "seed 8 is another start in any case"


def test_a_group_that_did_not_start_alike_is_left_as_it_was(tmp_path: Path) -> None:
    """A first step with another state, or another context: the collector's siblings are not siblings."""
    first, second, third = siblings("t", [1.0, 0.0, 1.0])
    second.steps[0].state = "You are at the back door."
    third.steps[0].context = [{"role": "user", "content": "Hurry."}]
    lk = build_lake(tmp_path, [first, second], run_id="one")
    lk.append([first, third], run_id="two")
    report = run_grouping(lk, grouping(MergeRuns()))
    assert report.table.rows() == [("g", 2, 4, 2, 2)]
    ((step, why, episodes),) = report.notes
    assert (step, episodes) == ("merge_runs", 4)
    assert "did not start alike" in why


def test_merged_groups_keep_their_ids_when_they_grow(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0]), run_id="one")
    run_grouping(lk, grouping(MergeRuns()))
    before = set(read_grouping(lk.snapshot(), "g")["group_id"])
    lk.append(siblings("t", [0.0]), run_id="two")
    report = run_grouping(lk, grouping(MergeRuns()))
    assert (report.skipped, report.table.rows()) == (False, [("g", 1, 3, 3, 3)])
    assert set(read_grouping(lk.snapshot(), "g")["group_id"]) == before


def test_readers_take_the_newest_job_of_a_name_whatever_its_definition(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    pair, three = grouping(Subsample(size=2)), grouping(Subsample(size=3, draws=2))
    first = run_grouping(lk, pair)
    assert run_grouping(lk, pair).job_id == first.job_id
    assert run_grouping(lk, pair).skipped
    assert not run_grouping(lk, pair, force=True).skipped
    second = run_grouping(lk, three)
    assert find_grouping_job(lk.snapshot(), "g") == find_grouping_job(lk.snapshot(), "g/1") == second.job_id
    with pytest.raises(UsageError, match="there are g/0, g/1"):
        read_grouping(lk.snapshot(), "g")
    third = run_grouping(lk, pair)
    assert not third.skipped, "an older job has this definition, but readers would take the newest"
    assert read_grouping(lk.snapshot(), "g").height == 12


def test_a_retracted_episode_leaves_its_groups(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    run_grouping(lk, grouping(DropFailed()))
    removed = read_grouping(lk.snapshot(), "g")["episode_id"][0]
    lk.retract([removed])
    assert removed not in set(read_grouping(lk.snapshot(), "g")["episode_id"])
    assert not run_grouping(lk, grouping(DropFailed())).skipped


def test_what_cannot_be_grouped_is_refused_with_the_counts(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    with pytest.raises(UsageError, match="no groupings yet"):
        read_grouping(lk.snapshot(), "g")
    with pytest.raises(DataRefusedError, match=r"none of 24 .*subsample: 24 .*fewer than 9"):
        run_grouping(lk, grouping(Subsample(size=9)))
    with pytest.raises(DataRefusedError, match="no episode satisfies"):
        run_grouping(lk, grouping(DropFailed()), where="run_id = 'no such run'")
    with pytest.raises(UsageError, match="one SQL expression"):
        run_grouping(lk, grouping(DropFailed()), where="true) UNION SELECT 1, 2, 'r', 3, 'failed' WHERE (true")
    assert lk.scan("groupings").collect().is_empty()


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the command table, no matter what else is in it."""
    from pipelines import COMMANDS

    monkeypatch.setitem(COMMANDS, "group", ("pipelines.groupings.commands:group", "Form other groups."))


@pytest.mark.usefixtures("command")
def test_the_command_prints_a_row_per_grouping_and_talks_to_stderr(tmp_path: Path, cli: Cli) -> None:
    lk = build_lake(tmp_path / "lake")
    steps = ["--step", "drop_failed", "--step", "subsample:size=3,draws=2"]
    done = cli("group", "three", "--lake", lk.uri, *steps, "--format", "csv")
    assert done.code == 0
    header, *lines = done.out.splitlines()
    assert header.startswith("grouping,groups,episodes,")
    assert lines == [
        "three/0,6,18,3,3",
        "three/1,6,18,3,3",
    ]
    assert done.err.splitlines()[0] == "drop_failed: 2 status failed"
    assert done.err.splitlines()[1].startswith("written by job ")
    again = cli("group", "three", "--lake", lk.uri, *steps)
    assert again.err.splitlines()[-1].startswith("nothing to do: ")


@pytest.mark.usefixtures("command")
def test_a_definition_may_stand_in_a_file(tmp_path: Path, cli: Cli) -> None:
    lk = build_lake(tmp_path / "lake")
    config = tmp_path / "group.toml"
    config.write_text('[group]\nname = "recent"\n[[group.steps]]\nkind = "staleness_cap"\nmax_behind = 1\n')
    done = cli("group", "--lake", lk.uri, "--config", config, "--format", "json")
    assert msgspec.json.decode(done.out)[0]["grouping"] == "recent"
    assert cli("group", "other", "--lake", lk.uri, "--config", config).code == 0
    assert set(lake.open(lk.uri).scan("groupings").collect()["grouping"]) == {"recent", "other"}


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "group: `name` is missing; `steps` is missing"),
        (("g", "--step", "halve"), "unknown step 'halve'"),
        (("g", "--step", "subsample:size=0"), "`steps.0.subsample.size` is 0; valid: 1 or more"),
        (("g", "--step", "drop_failed", "--where", "true) OR (true); SELECT (1"), "--where"),
        (("g", "--config", "missing.toml"), "missing.toml"),
    ],
)
def test_a_users_fault_is_one_line(shared: Lake, cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("group", "--lake", shared.uri, *arguments).fault


def test_ids_of_collected_groups_are_shown_as_people_see_them(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0]))
    run_grouping(lk, grouping(DropFailed()))
    table = format_ids(read_grouping(lk.snapshot(), "g"))
    assert all(len(text) == 13 for text in table["collected_group_id"])
