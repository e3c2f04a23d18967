"""Rewards over a lake: versions, incremental runs, levels, lineage; and that credit takes a reward for a score."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake
from lake.errors import ContractError, DataRefusedError, UsageError
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from pipelines.score import rewards
from pipelines.score.rewards import Component, RewardDefinition, RewardReport, run_reward
from testkit.copies import copied
from testkit.lakes import build_lake, rollout, siblings

Keys = tuple[str, int]
"""Task and rollout index."""


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Six episodes of two tasks, three steps each."""

    def make(template: Path) -> None:
        build_lake(template, [*siblings("left", [1.0, 0.0, 0.0]), *siblings("right", [1.0, 1.0, 0.0])])

    return copied("left and right", make, tmp_path / "lake")


def episodes(lk: Lake) -> pl.DataFrame:
    return lk.sql("SELECT task_id, rollout_index, episode_id, group_id, run_id FROM episodes ORDER BY ALL")


def score(
    lk: Lake,
    scorer: str,
    values: dict[Keys, Any],
    version: str = "1",
    steps: dict[tuple[str, int, int], Any] | None = None,
) -> None:
    """A score job: values of episodes, and of steps; a text is the error of an unknown one."""
    rows = [(task, index, None, value) for (task, index), value in values.items()]
    rows += [(task, index, step, value) for (task, index, step), value in (steps or {}).items()]
    details = pl.DataFrame(
        [(t, i, s, None if isinstance(v, str) else v, v if isinstance(v, str) else None) for t, i, s, v in rows],
        schema={
            "task_id": pl.String,
            "rollout_index": pl.Int32,
            "step_index": pl.Int32,
            "value": pl.Float64,
            "error": pl.String,
        },
        orient="row",
    )
    frame = details.join(episodes(lk), on=["task_id", "rollout_index"], how="inner").drop("task_id", "rollout_index")
    with lk.job(kind="score", parameters={"scorer": scorer, "version": version}) as job:
        job.write("scores", frame.with_columns(scorer=pl.lit(scorer), scorer_version=pl.lit(version)))


def all_of(value: Any) -> dict[Keys, Any]:
    return {(task, index): value for task in ("left", "right") for index in range(3)}


def reward(*components: Any, **fields: Any) -> RewardDefinition:
    return RewardDefinition.model_validate({"name": "mine", "components": components} | fields)


def read_rewards(lk: Lake, version: str | None = None) -> dict[tuple[Any, ...], float | None]:
    """(task, rollout[, step]) -> value, of the newest job for each episode."""
    rows = lk.sql(
        "SELECT task_id, rollout_index, step_index, value FROM latest_scores JOIN episodes USING (episode_id)"
        " WHERE scorer = 'mine' AND ($1 IS NULL OR scorer_version = $1)",
        [version],
    ).rows()
    keys = [row[:2] if row[2] is None else row[:3] for row in rows]
    assert len(set(keys)) == len(keys)
    return {key: row[3] for key, row in zip(keys, rows, strict=True)}


def jobs_of(lk: Lake) -> int:
    count: int = lk.sql("SELECT count(*) FROM job_runs WHERE kind = 'reward' AND status = 'succeeded'").item()
    return count


# ---------------------------------------------------------------- values and rows


def test_a_weighted_reward_is_written_under_its_name(lk: Lake) -> None:
    score(lk, "one", all_of(1.0) | {("left", 1): 0.0})
    score(lk, "two", all_of(0.5) | {("right", 2): "no judge"})
    report = run_reward(lk, reward("one", {"scorer": "two", "weight": 2.0}))
    assert read_rewards(lk) == {**all_of(2.0), ("left", 1): 1.0, ("right", 2): None}
    assert (report.episodes, report.rows, report.with_reward, report.unknown, report.unchanged) == (6, 6, 5, 1, 0)
    assert report.components == {"one": "one@1", "two": "two@1"}
    rows = lk.sql("SELECT * FROM scores WHERE scorer = 'mine' ORDER BY value NULLS FIRST")
    assert set(rows["scorer_version"]) == {report.version}
    assert set(rows["job_id"]) == {report.job_id}
    assert set(rows["series_id"]) == {report.series_id}
    assert rows["reason"].to_list()[:2] == ["unknown: two (no judge)", None]
    assert rows["error"].null_count() == 6, "the component failed, the reward did not"
    assert report.reasons == {"unknown: two (no judge)": 1}
    assert json.loads(rows["metrics"][1]) == {"one": 0.0, "two": 0.5}
    assert lk.sql("SELECT count(*) FROM scores WHERE scorer IN ('one', 'two')").item() == 12
    job = lk.sql("SELECT * FROM job_runs WHERE kind = 'reward'").to_dicts()[0]
    assert json.loads(job["parameters"])["components"] == report.components
    assert json.loads(job["parameters"])["definition"]["components"][1]["weight"] == 2.0
    assert (job["rows_in"], job["rows_out"]) == (6, 6)


def test_an_episode_that_a_component_never_scored_is_unknown(lk: Lake) -> None:
    score(lk, "one", {("left", 0): 1.0})
    run_reward(lk, reward("one"))
    assert read_rewards(lk) == {**all_of(None), ("left", 0): 1.0}
    why = lk.sql("SELECT DISTINCT reason FROM scores WHERE scorer = 'mine' AND value IS NULL")
    assert why["reason"].to_list() == ["unknown: one (no score of one@1)"]


def test_sql_and_renormalised_rewards(lk: Lake) -> None:
    score(lk, "one", all_of(0.75))
    score(lk, "two", all_of(0.25) | {("left", 0): None})
    run_reward(lk, reward("one", "two", sql="-power(one - two, 2)"))
    assert read_rewards(lk) == {**all_of(-0.25), ("left", 0): None}
    run_reward(lk, reward("one", "two", on_null="renormalise", name="other"))
    rows = lk.sql("SELECT value, reason FROM scores WHERE scorer = 'other' ORDER BY value")
    assert rows["value"].to_list() == [1.0] * 5 + [1.5]
    assert rows["reason"].to_list()[5] == "renormalised without two (no score of two@1)"


STEPS = {("left", 0, n): float(n) for n in range(3)} | {("right", 1, 1): None}


@pytest.mark.parametrize("level", ["episode", "both"])
def test_levels(lk: Lake, level: Any) -> None:
    score(lk, "one", all_of(10.0))
    score(lk, "two", all_of(1.0), steps=STEPS)
    report = run_reward(lk, reward({"scorer": "one", "of": "episode"}, "two", level=level))
    of_steps = {("left", 0, 0): 10.0, ("left", 0, 1): 11.0, ("left", 0, 2): 12.0, ("right", 1, 1): None}
    expected = all_of(11.0) | (of_steps if level == "both" else {})
    assert read_rewards(lk) == expected
    assert report.rows == len(expected)
    assert (report.with_reward, report.unknown) == (6, 0), "of episodes, whatever their steps have"
    assert (report.known_steps, report.unknown_steps) == ((3, 1) if level == "both" else (0, 0))


def test_a_component_without_a_score_of_the_step_makes_it_unknown(lk: Lake) -> None:
    score(lk, "one", all_of(10.0), steps={("left", 0, 0): 1.0, ("left", 1, 0): 1.0})
    score(lk, "two", all_of(1.0), steps=STEPS)
    run_reward(lk, reward("one", "two", level="both"))
    of_steps = {key: value for key, value in read_rewards(lk).items() if len(key) == 3}
    assert of_steps == {**dict.fromkeys(STEPS), ("left", 0, 0): 1.0, ("left", 1, 0): None}


def test_steps_that_are_scored_no_more_lose_their_reward(lk: Lake) -> None:
    score(lk, "one", all_of(1.0), steps=STEPS)
    run_reward(lk, reward("one", level="both"))
    score(lk, "one", {("left", 0): 2.0})
    assert run_reward(lk, reward("one", level="both")).rows == 1
    assert read_rewards(lk) == all_of(1.0) | {("left", 0): 2.0, ("right", 1, 1): None}
    assert run_reward(lk, reward("one", level="both")).skipped


def test_rewards_of_rewards(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    run_reward(lk, reward("one", name="inner"))
    run_reward(lk, reward({"scorer": "inner", "weight": 3.0}))
    assert read_rewards(lk) == all_of(3.0)


# ---------------------------------------------------------------- versions


def test_without_a_version_the_one_written_last_counts_and_is_recorded(lk: Lake) -> None:
    score(lk, "one", all_of(1.0), "new")
    score(lk, "one", all_of(2.0) | {("left", 2): None}, "old")
    assert run_reward(lk, reward("one")).components == {"one": "one@old"}
    assert read_rewards(lk) == all_of(2.0) | {("left", 2): None}
    pinned = run_reward(lk, reward("one@new"))
    assert pinned.components == {"one": "one@new"}
    assert read_rewards(lk, pinned.version) == all_of(1.0)


def test_one_version_for_all_episodes_however_few_it_scored(lk: Lake) -> None:
    score(lk, "one", all_of(1.0), "a")
    score(lk, "one", {("left", 0): 5.0}, "b")
    run_reward(lk, reward("one"))
    assert read_rewards(lk) == all_of(None) | {("left", 0): 5.0}


def test_two_versions_of_one_scorer_side_by_side(lk: Lake) -> None:
    score(lk, "judge", all_of(0.75), "true")
    score(lk, "judge", all_of(0.5), "written")
    components = ({"scorer": "judge@written", "name": "g"}, {"scorer": "judge@true", "name": "t"})
    run_reward(lk, reward(*components, sql="-abs(g - t)"))
    assert read_rewards(lk) == all_of(-0.25)


def test_a_new_version_of_a_component_is_a_new_version_of_the_reward(lk: Lake) -> None:
    score(lk, "one", all_of(1.0), "a")
    first = run_reward(lk, reward("one"))
    score(lk, "one", all_of(2.0), "b")
    second = run_reward(lk, reward("one"))
    assert first.version != second.version
    assert (second.unchanged, second.rows) == (0, 6)
    assert read_rewards(lk, first.version) == all_of(1.0)
    assert read_rewards(lk, second.version) == all_of(2.0)


# ---------------------------------------------------------------- incremental


def test_nothing_is_done_twice(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    first = run_reward(lk, reward("one"))
    again = run_reward(lk, reward("one"))
    assert again == RewardReport(
        **first.model_dump() | {"job_id": None, "skipped": True, "unchanged": 6, "rows": 0, "with_reward": 0}
    )
    assert jobs_of(lk) == 1
    forced = run_reward(lk, reward("one"), force=True)
    assert (forced.skipped, forced.rows, forced.unchanged) == (False, 6, 0)
    assert read_rewards(lk) == all_of(1.0)


def test_only_episodes_whose_components_changed_are_computed(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    score(lk, "two", all_of(1.0))
    run_reward(lk, reward("one", "two"))
    score(lk, "two", {("left", 0): 3.0, ("right", 2): "gone"})
    report = run_reward(lk, reward("one", "two"))
    assert (report.rows, report.unchanged, report.with_reward) == (2, 4, 1)
    assert read_rewards(lk) == all_of(2.0) | {("left", 0): 4.0, ("right", 2): None}
    assert run_reward(lk, reward("one", "two")).skipped
    score(lk, "three", all_of(9.0))
    score(lk, "two", {("left", 1): 7.0}, "another version")
    assert run_reward(lk, reward("one", "two@1")).rows == 6  # another definition
    assert run_reward(lk, reward("one", "two@1")).skipped


def test_new_episodes_and_a_predicate(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    part = run_reward(lk, reward("one"), where="task_id = 'left'")
    assert (part.episodes, part.rows) == (3, 3)
    report = run_reward(lk, reward("one"))
    assert (report.episodes, report.rows, report.unchanged) == (6, 3, 3)
    lk.append([rollout("left", 3, 1.0, collection_round=0)], run_id="demo")
    late = run_reward(lk, reward("one"))
    assert (late.rows, late.with_reward, late.unchanged) == (1, 0, 6)
    score(lk, "one", {("left", 3): 4.0})
    assert run_reward(lk, reward("one")).rows == 1
    assert read_rewards(lk) == all_of(1.0) | {("left", 3): 4.0}


def test_scores_that_end_while_a_reward_runs_are_not_missed(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward's terminal row is younger than the score's, but its snapshot was older: the next run takes it."""
    score(lk, "one", all_of(1.0))
    real = rewards.read_component_rows

    def slow(*arguments: Any) -> pl.DataFrame:
        rows = real(*arguments)
        score(lk, "one", {("left", 0): 5.0})
        return rows

    monkeypatch.setattr(rewards, "read_component_rows", slow)
    run_reward(lk, reward("one"))
    assert read_rewards(lk) == all_of(1.0)
    monkeypatch.setattr(rewards, "read_component_rows", real)
    assert run_reward(lk, reward("one")).rows == 1
    assert read_rewards(lk) == all_of(1.0) | {("left", 0): 5.0}


def test_scores_that_end_right_after_the_snapshot_are_not_missed(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closest race: the score's terminal row is the very next commit after the version that the reward read."""
    score(lk, "one", all_of(1.0))
    keys = episodes(lk)[:1].select("episode_id", "group_id", "run_id")
    row = keys.with_columns(
        step_index=pl.lit(None, pl.Int32), scorer=pl.lit("one"), scorer_version=pl.lit("1"), value=pl.lit(5.0)
    )
    job = lk.job(kind="score", parameters={})
    job.__enter__()
    real = rewards.select_where

    def late(*arguments: Any) -> pl.DataFrame:
        job.write("scores", row)
        job.__exit__(None, None, None)
        return real(*arguments)

    monkeypatch.setattr(rewards, "select_where", late)
    run_reward(lk, reward("one"))
    assert read_rewards(lk) == all_of(1.0)
    monkeypatch.setattr(rewards, "select_where", real)
    assert run_reward(lk, reward("one")).rows == 1
    assert read_rewards(lk)["left", 0] == 5.0


def test_a_reward_that_failed_left_nothing_and_runs_again(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    score(lk, "one", all_of(1.0))
    real, calls = rewards.read_component_rows, []

    def broken(*arguments: Any) -> pl.DataFrame:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(rewards, "EPISODES_A_PART", 4)
    monkeypatch.setattr(rewards, "read_component_rows", broken)
    with pytest.raises(MemoryError):
        run_reward(lk, reward("one"))
    assert read_rewards(lk) == {}
    report = run_reward(lk, reward("one"))
    assert (report.rows, report.unchanged) == (6, 0)
    assert read_rewards(lk) == all_of(1.0)


def test_parts_do_not_change_the_result(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    score(lk, "one", {key: float(n) for n, key in enumerate(all_of(0))}, steps=STEPS)
    report = run_reward(lk, reward("one", level="both"))
    expected = read_rewards(lk)
    monkeypatch.setattr(rewards, "EPISODES_A_PART", 1)
    assert run_reward(lk, reward("one", level="both"), force=True).rows == report.rows
    assert read_rewards(lk) == expected


def test_retracted_episodes_get_nothing(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    lk.retract([episodes(lk)["episode_id"][0]], "a test")
    assert run_reward(lk, reward("one")).rows == 5


# ---------------------------------------------------------------- faults


def test_components_that_are_not_there(lk: Lake) -> None:
    with pytest.raises(
        UsageError, match=r"no scores of 'one'; this lake has no scores at all. Score first: `trajlake score one`"
    ):
        run_reward(lk, reward("one"))
    score(lk, "one", all_of(1.0))
    with pytest.raises(UsageError, match="no scores of 'two'; this lake has one"):
        run_reward(lk, reward("one", "two"))
    with pytest.raises(UsageError, match=r"no scores of 'one@7'; .*: 1$"):
        run_reward(lk, reward("one@7"))
    assert jobs_of(lk) == 0


def test_a_score_that_was_written_twice_is_named(lk: Lake) -> None:
    row = episodes(lk)[:1].select("episode_id", "group_id", "run_id")
    twice = pl.concat([row, row]).with_columns(
        step_index=pl.lit(None, pl.Int32), scorer=pl.lit("one"), scorer_version=pl.lit("1"), value=pl.lit(1.0)
    )
    with lk.job(kind="score", parameters={}) as job:
        job.write("scores", twice)
    with pytest.raises(ContractError, match=r"one job wrote one@1 of episode \w{13}, step None, more than once"):
        run_reward(lk, reward("one"))
    assert read_rewards(lk) == {}


def test_a_name_that_a_scorer_has_is_refused(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    score(lk, "mine", all_of(1.0))
    with pytest.raises(UsageError, match="`scores` holds rows of 'mine' from jobs of kind score"):
        run_reward(lk, reward("one"))


@pytest.mark.parametrize("where", ["nothing = 1", "true; SELECT 1", "true) UNION SELECT 1, 2, 3, 4 --", ""])
def test_a_predicate_that_is_none_is_refused(lk: Lake, where: str) -> None:
    score(lk, "one", all_of(1.0))
    with pytest.raises(UsageError):
        run_reward(lk, reward("one"), where=where)


def test_no_episodes_are_refused(lk: Lake) -> None:
    score(lk, "one", all_of(1.0))
    with pytest.raises(DataRefusedError):
        run_reward(lk, reward("one"), where="task_id = 'none'")


# ---------------------------------------------------------------- what it is for


def test_credit_takes_a_reward_for_the_episode_score(lk: Lake) -> None:
    score(lk, "one", {(task, index): float(index) for task, index in all_of(0)})
    run_reward(lk, RewardDefinition(name="mine", components=(Component(scorer="one", weight=2.0),)))
    report = run_credit(lk, GiGPO(step_source="terminal_score", gamma=1.0), score="mine")
    rows = lk.sql("SELECT DISTINCT return_to_go FROM advantages WHERE job_id = ?", [report.job_id])
    assert sorted(rows["return_to_go"].to_list()) == [0.0, 2.0, 4.0]
