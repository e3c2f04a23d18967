"""The credit job over every estimator and source: one result, to the bit, however it is cut and no matter where it
runs.

1. Ranges and executors.
2. Scores, rewards, groupings.
3. What a job leaves alone, and what it takes back.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from lake import EpisodeRecord, Lake, StepRecord, ids
from lake.errors import DataRefusedError, UsageError
from lake.execution.local import LocalExecutor
from lake.judgements.credit import find_credit, find_jobs, read_advantages
from pipelines.credit import GiGPO
from pipelines.credit.estimators import ESTIMATORS, find_estimator
from pipelines.credit.health import IntegrityConfig
from pipelines.credit.job import CreditReport, run_credit
from testkit.copies import copied, empty_lake
from testkit.examples import mostly_slow
from testkit.lakes import build_lake

KEYS = ["group_id", "episode_id", "step_index"]
STAMPS = ["job_id", "series_id", "write_id"]
RUNS = ("a", "b", "c")
OPTIONS: dict[str, dict[str, Any]] = {
    "batch_std": {"batch_key": "run_id"},
    "gdpo": {"batch_key": "run_id", "components": {"judge": 1.0, "style": 0.5}},
    "gigpo": {"default_step_reward": 0.0, "revisits": "first"},
    "hgpo": {"default_step_reward": 0.0},
    "reinforce_pp": {"batch_key": "policy_version"},
    "reinforce_pp_baseline": {"batch_key": "run_id"},
}
TINY: dict[str, Any] = {"executor": LocalExecutor(1), "memory_gb": 1e-6}


def rollout(rng: random.Random, run: str, task: str, index: int) -> EpisodeRecord:
    """A rollout with everything that some estimator reads."""
    steps = [
        StepRecord(
            state=rng.choice(["hall", "kitchen", "[]"]),
            action="go",
            reward=rng.choice([0.0, 1.0, -0.5]),
            value_estimate=rng.random(),
            is_action_valid=rng.random() < 0.8,
            is_active=number == 0 or rng.random() < 0.9,
        )
        for number in range(rng.randint(1, 5))
    ]
    return EpisodeRecord(
        run_id=run,
        task_id=task,
        rollout_index=index,
        status=rng.choice(["completed", "completed", "truncated"]),
        env_return=rng.random() if rng.random() < 0.9 else None,
        final_value_estimate=rng.random(),
        completion_tokens=rng.randint(5, 50),
        policy_version=rng.randint(0, 1),
        steps=steps,
    )


def scored(lk: Lake, scorer: str, version: str, values: dict[int, float | None], step: int | None = None) -> None:
    """A job that scores episodes, or one step of each."""
    episodes = lk.scan("episodes").select("episode_id", "group_id", "run_id").collect()
    rows = episodes.filter(pl.col("episode_id").is_in(list(values))).with_columns(
        value=pl.Series([values[e] for e in episodes["episode_id"] if e in values], dtype=pl.Float64),
        step_index=pl.lit(step, pl.Int32),
        scorer=pl.lit(scorer),
        scorer_version=pl.lit(version),
    )
    with lk.job(kind="score") as job:
        job.write("scores", rows)


def episode_ids(lk: Lake) -> list[int]:
    return lk.scan("episodes").select("episode_id").collect()["episode_id"].sort().to_list()


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Three runs in several files, some of them compacted together, with scores of two judges."""

    def make(template: Path) -> None:
        rng = random.Random(7)
        lk = empty_lake(template)
        for number, run in enumerate(RUNS):
            lk.append([rollout(rng, run, f"t{n % 3}", n // 3) for n in range(9)])
            if number == 1:
                for table in ("episodes", "steps"):
                    lk.compact(table)
        lk.append([rollout(rng, "a", "t0", 3)])
        for scorer in ("judge", "style"):
            scored(lk, scorer, "1", {e: rng.random() for e in episode_ids(lk)})

    return copied("three runs, two judges", make, tmp_path / "lake")


def rows_of(lk: Lake, report: CreditReport) -> pl.DataFrame:
    """The rows that a job wrote, in canonical order."""
    return lk.scan("advantages").filter(pl.col("job_id") == report.job_id).drop(STAMPS).collect().sort(KEYS)


def groups_of(lk: Lake, report: CreditReport) -> pl.DataFrame:
    return lk.scan("credit_groups").filter(pl.col("job_id") == report.job_id).drop(STAMPS).collect().sort("group_id")


def test_episodes_with_rewards_for_gdpo_are_scored_without_a_return(lk: Lake) -> None:
    """Their returns are unknown, and nothing says that they have no siblings with a score."""
    estimator = find_estimator("gdpo")(**OPTIONS["gdpo"])
    other = empty_lake(Path(lk.uri).with_name("no-returns"))
    rng = random.Random(1)
    other.append([msgspec.structs.replace(rollout(rng, "a", f"t{n % 2}", n // 2), env_return=None) for n in range(6)])
    ids_of_episodes = episode_ids(other)
    for scorer in ("judge", "style"):
        scored(other, scorer, "1", {e: rng.random() for e in ids_of_episodes})
    report = run_credit(other, estimator, executor=LocalExecutor(1))
    assert (report.summary.live_groups, report.other_scores) == (2, ())
    assert not [line for line in report.findings if line.startswith("singleton")]


# ---------------------------------------------------------------- 1. ranges and executors


@pytest.mark.parametrize("name", mostly_slow(ESTIMATORS, "gdpo"))
def test_ranges_do_not_show_in_the_numbers(lk: Lake, name: str) -> None:
    estimator = find_estimator(name)(**OPTIONS.get(name, {}))
    in_parts = run_credit(lk, estimator, executor=LocalExecutor(1))
    cut = run_credit(lk, estimator, force=True, executor=LocalExecutor(3), memory_gb=2e-6)
    assert cut.series_id == in_parts.series_id
    assert rows_of(lk, in_parts).equals(rows_of(lk, cut), null_equal=True)
    # Figures of groups are for people: their last digits may differ.
    assert_frame_equal(groups_of(lk, in_parts), groups_of(lk, cut), rel_tol=1e-12, abs_tol=1e-12)
    assert in_parts.summary == cut.summary
    files = lk.scan("advantages").filter(pl.col("job_id") == cut.job_id).select(pl.col("write_id").n_unique())
    # What is normalised over a batch is cut where the batches are: three runs; versions that share groups are one.
    expected = {"run_id": len(RUNS), "policy_version": 1}.get(OPTIONS.get(name, {}).get("batch_key"))
    assert files.collect().item() == expected if expected else files.collect().item() > 1


@pytest.mark.slow
def test_processes_give_the_same_bits(lk: Lake) -> None:
    estimator = GiGPO(default_step_reward=0.0)
    in_memory = run_credit(lk, estimator)
    in_processes = run_credit(lk, estimator, force=True, executor=LocalExecutor(2, processes=True), memory_gb=2e-6)
    assert rows_of(lk, in_memory).equals(rows_of(lk, in_processes), null_equal=True)
    assert (
        groups_of(lk, in_memory)["empty_steps"].sum()
        == in_memory.summary.empty_steps
        == in_processes.summary.empty_steps
        != 0
    )


def test_a_budget_of_nothing_is_refused(lk: Lake) -> None:
    with pytest.raises(UsageError, match=r"budget of 0.* GB is not positive"):
        run_credit(lk, GiGPO(), memory_gb=0.0)


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("grpo", {}, "group"),
        pytest.param("batch_std", {"batch_key": "run_id"}, "batch", marks=pytest.mark.slow),
        pytest.param("batch_std", {"batch_key": "all"}, "batch", marks=pytest.mark.slow),
    ],
)
def test_what_is_larger_than_the_budget_is_said_and_computed(
    lk: Lake, name: str, options: dict[str, str], part: str
) -> None:
    lines: list[str] = []
    estimator = find_estimator(name)(**options)
    report = run_credit(lk, estimator, notice=lines.append, **TINY)
    assert report.steps_computed > 0
    assert len(lines) == 1
    assert lines[0].startswith(f"the largest {part} has ")
    run_credit(lk, estimator, force=True, notice=lines.append)
    assert len(lines) == 1, "under the usual budget there is nothing to say"


def test_first_messages_are_compared_although_no_text_is_kept(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "starts")
    lk.append(
        [
            EpisodeRecord(
                run_id="r",
                task_id=task,
                rollout_index=index,
                env_return=float(index),
                initial_messages=[{"role": "user", "content": text}],
                steps=[StepRecord(state="s", action="go")],
            )
            for task, texts in (("same", ("hello", "hello")), ("other", ("hello", "good day")))
            for index, text in enumerate(texts)
        ]
    )
    report = run_credit(lk, find_estimator("grpo")())
    groups = lk.sql(
        "SELECT task_id, any_value(g.findings) AS found FROM credit_groups AS g "
        "JOIN episodes AS e USING (group_id) GROUP BY task_id ORDER BY task_id"
    )
    assert groups.rows() == [("other", "several_starts"), ("same", "")]
    assert any("begin" in line or "start" in line for line in report.findings)


# ---------------------------------------------------------------- 2. scores, rewards, groupings


def test_step_scores_are_rewards(lk: Lake) -> None:
    everyone = episode_ids(lk)
    scored(lk, "progress", "1", {e: float(n) for n, e in enumerate(everyone)}, step=0)
    report = run_credit(lk, GiGPO(gamma=1.0), rewards="progress", **TINY)
    rows = rows_of(lk, report)
    first = dict(rows.filter(pl.col("step_index") == 0).select("episode_id", "return_to_go").iter_rows())
    lengths = dict(rows.group_by("episode_id").len().iter_rows())
    for number, episode in enumerate(everyone):
        expected = float(number) if lengths[episode] == 1 else None  # later steps were not scored
        assert first[episode] == expected
    only_scored = run_credit(lk, GiGPO(gamma=1.0, default_step_reward=0.0), rewards="progress")
    returns = rows_of(lk, only_scored).filter(pl.col("step_index") == 0).sort("episode_id")["return_to_go"]
    assert returns.to_list() == [float(number) for number in range(len(everyone))]
    assert run_credit(lk, GiGPO(gamma=1.0, default_step_reward=0.0), rewards="progress").skipped
    scored(lk, "progress", "1", {everyone[0]: 9.0}, step=0)
    assert run_credit(lk, GiGPO(gamma=1.0, default_step_reward=0.0), rewards="progress").groups_computed == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewards": "nobody"}, r"no scores of 'nobody' for steps; valid: env_reward$"),
        ({"score": "nobody"}, r"no scores of 'nobody' for episodes; valid: env_return, judge, style"),
        ({"grouping": "nobody"}, "no grouping 'nobody'"),
        ({"where": "true) UNION (SELECT 1"}, "predicate"),
    ],
)
def test_a_source_that_is_not_there_is_refused(lk: Lake, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_credit(lk, GiGPO(), **options)


def regrouped(lk: Lake, groups: dict[int, int]) -> None:
    episodes = lk.scan("episodes").select("episode_id", "run_id", collected_group_id="group_id").collect()
    rows = episodes.filter(pl.col("episode_id").is_in(list(groups)))
    new = pl.Series([groups[e] for e in rows["episode_id"]], dtype=pl.Int64)
    with lk.job(kind="group") as job:
        job.write("groupings", rows.with_columns(group_id=new, grouping=pl.lit("mine")))


def test_a_grouping_that_is_defined_anew_takes_its_old_groups_back(lk: Lake) -> None:
    warned = IntegrityConfig(one_task="warn")
    everyone = episode_ids(lk)
    regrouped(lk, {e: 1 + n % 2 for n, e in enumerate(everyone)})
    first = run_credit(lk, GiGPO(), grouping="mine", integrity=warned)
    assert set(rows_of(lk, first)["group_id"]) == {1, 2}
    assert groups_of(lk, first)["run_id"].to_list() == [None, None], "they span runs"
    regrouped(lk, {e: 1 if n % 2 == 0 else 3 for n, e in enumerate(everyone[:-1])})
    second = run_credit(lk, GiGPO(), grouping="mine", integrity=warned)
    changed = 2 if len(everyone) % 2 else 1
    assert (second.groups_computed, second.groups_ended) == (changed, 1)
    latest = lk.sql("SELECT * FROM latest_advantages")
    assert set(latest["group_id"]) == {1, 3}
    assert latest.select("episode_id", "step_index").is_unique().all()
    assert set(latest["episode_id"]) == set(everyone[:-1])
    assert run_credit(lk, GiGPO(), grouping="mine", integrity=warned).skipped
    with pytest.raises(DataRefusedError, match="in the grouping 'mine'"):
        run_credit(lk, GiGPO(), grouping="mine", where=f"episode_id = {everyone[-1]}")


# ---------------------------------------------------------------- 3. what stands, what ends


def test_only_changed_groups_are_computed_and_written(lk: Lake) -> None:
    first = run_credit(lk, GiGPO())
    lk.append([rollout(random.Random(1), "b", "t1", 7)])
    second = run_credit(lk, GiGPO())
    assert (second.groups_computed, second.groups_kept) == (1, first.groups_computed - 1)
    rows = rows_of(lk, second)
    (group,) = rows["group_id"].unique()
    members = lk.scan("episodes").filter(pl.col("group_id") == group).collect()
    assert set(rows["episode_id"]) == set(members["episode_id"])
    assert second.steps_computed == rows.height
    counts = lk.sql("SELECT counts FROM job_runs WHERE job_id = ?", [second.job_id])["counts"][0]
    assert '"groups_computed":1' in counts
    again = run_credit(lk, GiGPO())
    assert again.skipped
    assert again.job_id == second.job_id
    assert again.summary == second.summary


def test_a_filter_is_a_series_of_its_own_and_takes_nothing_from_another(lk: Lake) -> None:
    total = run_credit(lk, GiGPO())
    before = rows_of(lk, total)
    half = run_credit(lk, GiGPO(), where="rollout_index < 2")
    assert half.series_id != total.series_id
    assert 0 < half.summary.episodes < total.summary.episodes
    snapshot = lk.snapshot()
    for credit, report in ((find_credit(snapshot, ids.to_text(total.series_id)), total), (find_credit(snapshot), half)):
        assert credit.series_id == report.series_id
        assert read_advantages(snapshot, credit).height == report.summary.steps
    assert find_credit(snapshot).title.startswith("gigpo (where rollout_index < 2), series ")
    back = run_credit(lk, GiGPO())
    assert (back.skipped, back.made_current) == (True, True)
    assert find_credit(lk.snapshot()).series_id == total.series_id
    after = read_advantages(lk.snapshot(), find_credit(lk.snapshot()), columns=before.columns[3:])
    assert after.height == before.height
    assert not run_credit(lk, GiGPO()).made_current, "it is current already: nothing is written"


def test_only_brings_whole_groups_up_to_date_and_leaves_the_others(lk: Lake) -> None:
    first = run_credit(lk, GiGPO(), only="run_id = 'a' AND rollout_index = 0")
    totals = lk.sql("SELECT count(DISTINCT group_id) AS groups, count(*) AS episodes FROM episodes WHERE run_id = 'a'")
    assert (first.summary.groups, first.summary.episodes) == totals.row(0)
    second = run_credit(lk, GiGPO(), only="run_id = 'b'")
    assert second.series_id == first.series_id
    assert (second.groups_ended, second.groups_kept) == (0, 0)
    lk.retract(lk.scan("episodes").filter(pl.col("run_id") == "a").collect()["episode_id"].to_list())
    assert run_credit(lk, GiGPO(), only="run_id = 'b'").skipped
    ended = run_credit(lk, GiGPO())
    assert (ended.groups_ended, ended.groups_kept) == (3, 3)
    rows = lk.scan("credit_groups").filter(pl.col("job_id") == ended.job_id).collect()
    assert rows.filter(pl.col("episodes") == 0)["run_id"].to_list() == ["a"] * 3
    assert run_credit(lk, GiGPO()).skipped


def test_a_job_without_one_advantage_is_refused_and_leaves_the_current_credit(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake")
    good = run_credit(lk, GiGPO())
    with pytest.raises(DataRefusedError, match=r"gae defines none of 72 advantages in 6 groups.* no value estimate is"):
        run_credit(lk, find_estimator("gae")())
    snapshot = lk.snapshot()
    assert find_credit(snapshot).series_id == good.series_id
    assert snapshot.sql("SELECT DISTINCT series_id FROM current_advantages").item() == good.series_id


def test_a_batch_is_computed_whole_or_not_at_all(lk: Lake) -> None:
    estimator = find_estimator("batch_std").model_validate({"batch_key": "run_id"})
    first = run_credit(lk, estimator)
    assert run_credit(lk, estimator).skipped
    lk.append([rollout(random.Random(1), "b", "t1", 7)])
    second = run_credit(lk, estimator)
    assert (second.groups_computed, second.groups_kept) == (first.groups_computed, 0)
    lk.retract([lk.scan("episodes").filter(pl.col("rollout_index") == 7).collect()["episode_id"][0]])
    third = run_credit(lk, estimator)
    assert rows_of(lk, third).equals(rows_of(lk, first), null_equal=True)


def test_an_episode_without_active_steps_is_no_reason_to_compute_again(lk: Lake) -> None:
    idle = [StepRecord(state="hall", action="wait", is_active=False)]
    lk.append(
        [EpisodeRecord(run_id="idle", task_id="t", rollout_index=n, env_return=1.0, steps=idle) for n in range(2)]
    )
    report = run_credit(lk, GiGPO(), where="run_id = 'idle'")
    assert report.steps_computed == 0
    assert report.summary.groups == 0
    assert run_credit(lk, GiGPO(), where="run_id = 'idle'").skipped


def test_integrity_findings_are_told_stored_and_refused(lk: Lake) -> None:
    report = run_credit(lk, GiGPO())
    assert any("mixed_policies" in line for line in report.findings)
    stored = lk.scan("credit_groups").collect()
    assert stored["findings"].str.contains("mixed_policies").any()
    with pytest.raises(DataRefusedError, match="mixed_policies"):
        run_credit(lk, GiGPO(), force=True, integrity=IntegrityConfig(mixed_policies="refuse"))
    ended = lk.sql("SELECT status FROM job_runs WHERE kind = 'credit' ORDER BY started_at")["status"]
    assert ended.to_list() == ["succeeded", "failed"]
    assert lk.sql("SELECT DISTINCT job_id FROM latest_advantages")["job_id"].to_list() == [report.job_id]


@pytest.mark.slow("the newest credit of a job that wrote some groups is that of its whole series")
def test_the_trainers_default_is_the_whole_series(lk: Lake) -> None:
    run_credit(lk, GiGPO())
    lk.append([rollout(random.Random(1), "b", "t1", 7)])
    newest = run_credit(lk, GiGPO())
    snapshot = lk.snapshot()
    source = find_credit(snapshot, None)
    assert (source.series_id, source.job_id, len(find_jobs(snapshot, source))) == (newest.series_id, None, 2)
    assert read_advantages(snapshot, source).height == newest.summary.steps
    then = read_advantages(snapshot, find_credit(snapshot, ids.to_text(newest.job_id)))
    assert then.height == newest.summary.steps > newest.steps_computed
