"""The commits of a lake, each with the job that made it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from lake import Lake
from lake.errors import UsageError
from lake.read.history import list_commits
from lake.read.snapshot import find_version_at, read_commit_time
from testkit.copies import empty_lake
from testkit.episodes import episode
from testkit.full_lake import scores
from testkit.moving_clock import MovingClock


@pytest.fixture
def clock() -> MovingClock:
    return MovingClock()


@pytest.fixture
def lk(tmp_path: Path, clock: MovingClock) -> Lake:
    lk = empty_lake(tmp_path / "lake", clock=clock)
    clock.forward(days=1)
    lk.append([episode("a"), episode("b")], run_id="run")
    return lk


def test_commits_name_what_was_done_when_and_by_which_job(lk: Lake, clock: MovingClock) -> None:
    with lk.job(kind="judge") as job:
        job.write("scores", scores(lk.scan("steps").collect()))
    clock.forward(days=1)
    lk.compact("steps", z_order=["step_index"])
    commits = list_commits(lk, None, 20)
    assert commits.select("at").to_series().is_sorted(descending=True)
    newest = commits.row(0, named=True)
    assert (newest["table"], newest["operation"], newest["files_removed"]) == ("steps", "z-order", 1)
    assert abs(newest["at"] - datetime.now(UTC) - timedelta(days=2)) < timedelta(hours=1), "by the lake's clock"
    of_scores = commits.filter(table="scores").row(0, named=True)
    assert (of_scores["operation"], of_scores["rows"]) == ("append", 4)
    assert (of_scores["job_id"], of_scores["kind"], of_scores["run_id"]) == (job.job_id, "judge", None)
    of_episodes = commits.filter(table="episodes").row(0, named=True)
    assert (of_episodes["rows"], of_episodes["kind"], of_episodes["run_id"]) == (2, "record", "run")
    created = commits.filter(pl.col("operation") == "create table")["table"]
    assert set(created) == {"episodes", "steps", "jobs", "scores"}, "each by the first write to it"


def test_a_table_and_a_limit(lk: Lake) -> None:
    assert list_commits(lk, "jobs", 2)["version"].to_list() == [2, 1]
    assert list_commits(lk, "steps", 20)["version"].to_list() == [1, 0]
    assert list_commits(lk, None, 1)["table"].sort().to_list() == ["episodes", "jobs", "steps"]


def test_a_version_is_there_from_the_very_moment_of_its_commit_on(lk: Lake, clock: MovingClock) -> None:
    clock.forward(days=1)
    lk.append([episode("c")], run_id="run")
    at = read_commit_time(lk._store, "episodes", 2)
    before = at - timedelta(microseconds=1)
    assert [find_version_at(lk._store, "episodes", moment) for moment in (before, at)] == [1, 2]
    assert [lk.at(moment).scan("episodes").collect().height for moment in (before, at)] == [2, 3]


def test_a_table_that_is_not_there_is_refused(lk: Lake) -> None:
    with pytest.raises(UsageError, match="there is no table `step`; the tables are episodes, steps"):
        list_commits(lk, "step", 20)


def test_commits_of_other_programs_are_listed_without_a_job(lk: Lake) -> None:
    from deltalake import DeltaTable

    DeltaTable(f"{lk.uri}/steps").alter.set_table_properties({"x": "y"}, raise_if_not_exists=False)
    newest = list_commits(lk, "steps", 1).row(0, named=True)
    assert newest["operation"] == "set tblproperties"
    assert (newest["job_id"], newest["kind"], newest["rows"]) == (None, None, None)


def test_what_forget_did_is_said(lk: Lake) -> None:
    lk.forget(lk.scan("episodes").filter(task_id="a").collect()["episode_id"].to_list())
    done = list_commits(lk, "steps", 1).row(0, named=True)
    assert (done["operation"], done["kind"], done["files_removed"], done["rows"]) == ("forget", "forget", 1, 2)
