"""What changed between two snapshots: episodes that came and went, scores, advantages whose sign flipped."""

from pathlib import Path

import polars as pl
import pytest

from lake import Lake, Snapshot
from lake.read.history import Difference
from testkit.copies import copied, empty_lake
from testkit.episodes import episode
from testkit.full_lake import advantages, scores


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Two episodes of two steps."""

    def make(template: Path) -> None:
        empty_lake(template).append([episode("a", env_return=1.0), episode("b")], run_id="run")

    return copied("two episodes of two steps", make, tmp_path / "lake")


def steps(lk: Lake) -> pl.DataFrame:
    order = lk.scan("episodes").select("episode_id", "task_id")
    return lk.scan("steps").join(order, on="episode_id").sort("task_id", "step_index").collect()


def judge(lk: Lake, name: str, values: list[float | None], series: str = "same", head: int = 4) -> None:
    """Scores or advantages of the steps in order (a0, a1, b0, b1), in one job."""
    rows = steps(lk).head(head)
    column = pl.Series(values[:head], dtype=pl.Float64)
    with lk.job(kind=name, series={"series": series}) as job:
        if name == "scores":
            job.write(name, scores(rows).with_columns(value=column))
        else:
            job.write(name, advantages(rows).with_columns(advantage=column, defined=column.is_not_null()))


def counts(change: Difference) -> dict[str, int]:
    return dict(change.summary().iter_rows())


NOTHING = {"episodes added": 0, "episodes removed": 0, "scores changed": 0, "advantages whose sign flipped": 0}


def changed(lk: Lake, before: Snapshot) -> Difference:
    return lk.diff(before, lk.snapshot())


def test_a_snapshot_does_not_differ_from_itself(lk: Lake) -> None:
    judge(lk, "scores", [1.0, None, 0.0, -1.0])
    judge(lk, "advantages", [1.0, None, 0.0, -1.0])
    before = lk.snapshot()
    for name in ("episodes", "steps", "scores", "advantages"):
        lk.compact(name)
    assert counts(changed(lk, before)) == NOTHING
    assert counts(lk.diff(before, before)) == NOTHING


def test_episodes_that_came_and_went(lk: Lake) -> None:
    before = lk.snapshot()
    lk.append([episode("c"), episode("b", steps=1, attempt=1)], run_id="other")
    lk.append([episode("b", steps=1, attempt=1)], run_id="run")
    change = changed(lk, before)
    added = change.added.sort("run_id", "task_id")
    assert added.select("run_id", "task_id", "status").rows() == [
        ("other", "b", "completed"),
        ("other", "c", "completed"),
        ("run", "b", "completed"),
    ]
    assert change.removed["task_id"].to_list() == ["b"], "its retry replaced it"
    assert counts(change) == NOTHING | {"episodes added": 3, "episodes removed": 1}
    back = lk.diff(lk.snapshot(), before)
    assert (back.added.equals(change.removed), back.removed.equals(change.added)) == (True, True)


def test_scores_that_are_new_other_or_gone(lk: Lake) -> None:
    judge(lk, "scores", [1.0, None, 0.0, 5.0])
    before = lk.snapshot()
    judge(lk, "scores", [1.0, 0.0, None, 6.0])
    change = changed(lk, before)
    keys = steps(lk).select("episode_id", "step_index", "task_id")
    scores_shown = change.scores.join(keys, on=["episode_id", "step_index"]).sort("series_id", "task_id", "step_index")
    pairs = {
        (row["task_id"], row["step_index"], row["before"], row["after"]) for row in scores_shown.iter_rows(named=True)
    }
    assert pairs == {("a", 1, None, 0.0), ("b", 0, 0.0, None), ("b", 1, 5.0, 6.0)}
    lk.retract(steps(lk).filter(task_id="b")["episode_id"].unique().to_list())
    missing_scores = changed(lk, before).scores
    assert missing_scores.filter(pl.col("before") == 5.0)["after"].to_list() == [None]


def test_a_score_of_a_whole_episode_is_compared_too(lk: Lake) -> None:
    first_row = steps(lk).head(1)

    def score(value: float) -> None:
        with lk.job(kind="score") as job:
            rows = scores(first_row, value).with_columns(step_index=pl.lit(None, pl.Int32))
            job.write("scores", rows)

    score(0.5)
    before = lk.snapshot()
    score(0.5)
    assert counts(changed(lk, before)) == NOTHING
    score(0.75)
    assert changed(lk, before).scores.select("step_index", "before", "after").rows() == [(None, 0.5, 0.75)]


def test_advantages_whose_sign_flipped(lk: Lake) -> None:
    judge(lk, "advantages", [1.0, -1.0, 0.0, None])
    before = lk.snapshot()
    judge(lk, "advantages", [0.5, 2.0, -3.0, 4.0])
    change = changed(lk, before)
    flips = change.flips.join(steps(lk).select("episode_id", "step_index", "task_id"), on=["episode_id", "step_index"])
    pairs = {(row["task_id"], row["step_index"], row["before"], row["after"]) for row in flips.iter_rows(named=True)}
    assert pairs == {("a", 1, -1.0, 2.0), ("b", 0, 0.0, -3.0)}, "from unknown is no flip"
    assert counts(change) == NOTHING | {"advantages whose sign flipped": 2}


def test_advantages_are_compared_within_a_series(lk: Lake) -> None:
    judge(lk, "advantages", [1.0, 1.0, 1.0, 1.0])
    before = lk.snapshot()
    judge(lk, "advantages", [-1.0, -1.0, -1.0, -1.0], series="another")
    assert counts(changed(lk, before)) == NOTHING


def test_empty_lakes_do_not_differ(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    change = lk.diff(lk.snapshot(), lk.snapshot())
    assert counts(change) == NOTHING
    assert change.added.columns == ["episode_id", "group_id", "run_id", "task_id", "rollout_index", "status"]
    assert change.scores.columns[-2:] == ["before", "after"]
