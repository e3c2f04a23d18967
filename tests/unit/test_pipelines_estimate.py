"""`estimate`: sums of what was measured, the arithmetic on top of them, and the first limit."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import lake
from lake import EpisodeRecord, StepRecord
from lake.errors import UsageError
from lake.records import TokensRecord
from pipelines.estimate import Cluster, Workload, estimate, measure_stored_bytes, measure_workload
from pipelines.estimate.command import estimate as command
from pipelines.estimate.model import JOBS, TABLE_DRIVERS, Fits, predict_amount

workloads = st.builds(
    Workload,
    episodes=st.floats(1e3, 1e8),
    episode_steps=st.floats(1, 100),
    step_tokens=st.floats(1, 4000),
    group_size=st.integers(1, 64),
)


def test_every_figure_has_a_fit_by_its_own_drivers() -> None:
    fits = Fits.load()
    assert set(fits.jobs) == set(JOBS)
    assert set(fits.tables) == set(TABLE_DRIVERS)
    for name, job in JOBS.items():
        assert set(fits.jobs[name]["cpu"]) <= set(job.drivers)
        assert set(fits.jobs[name]["memory"]) <= set(job.memory)
    for name, drivers in TABLE_DRIVERS.items():
        assert set(fits.tables[name]) <= set(drivers)
    factors = [*fits.tables.values(), *(fit for kinds in fits.jobs.values() for fit in kinds.values())]
    assert all(factors_of_job and all(factor > 0 for factor in factors_of_job.values()) for factors_of_job in factors)


def test_a_sum_is_its_parts() -> None:
    work = Workload(episodes=3, episode_steps=5, step_tokens=7)
    assert predict_amount({"run": 1000, "episodes": 100, "steps": 10, "tokens": 1}, work) == 1000 + 300 + 150 + 105


@given(workloads, st.integers(2, 64))
def test_nodes_shorten_what_is_cut_into_parts_and_nothing_else(work: Workload, nodes: int) -> None:
    single, many = (estimate(work, Cluster(nodes=n, price=2.0)) for n in (1, nodes))
    for before, after in zip(single.jobs, many.jobs, strict=True):
        assert after.core_hours == before.core_hours
        # What a driver does alone is paid for on every node, so more nodes never cost less.
        assert after.cost >= before.cost * 0.999
        if after.runs_on != "all nodes":
            assert after.hours == before.hours
        else:
            assert before.hours / nodes <= after.hours * 1.001
            assert after.hours <= before.hours


@given(workloads)
def test_a_limit_is_where_it_says(work: Workload) -> None:
    cluster = Cluster()
    limits = estimate(work, cluster).limits
    assert all(a.reached_at_steps <= b.reached_at_steps for a, b in pairwise(limits))
    for limit in limits:
        if 0 < limit.reached_at_steps < float("inf"):
            at_limit = estimate(work.times(limit.reached_at_steps / work.steps), cluster)
            (same,) = (other_limit for other_limit in at_limit.limits if other_limit.limit == limit.limit)
            assert same.needed == pytest.approx(same.available, rel=1e-6)


@given(workloads)
def test_a_faster_core_takes_less_and_as_much_memory(work: Workload) -> None:
    slow, fast = (estimate(work, Cluster(speed=speed)).jobs for speed in (1.0, 2.0))
    for before, after in zip(slow, fast, strict=True):
        assert after.hours == pytest.approx(before.hours / 2)
        assert after.memory_gb == before.memory_gb


def test_the_time_of_a_reward_function_comes_on_top() -> None:
    work, cluster = Workload(1e6, 10, 100), Cluster(nodes=2, cores=5)
    (without,), (with_it,) = (
        [job for job in estimate(work, cluster_used).jobs if job.job == "score"]
        for cluster_used in (cluster, replace(cluster, function_seconds=0.036))
    )
    assert with_it.core_hours - without.core_hours == pytest.approx(10)
    assert with_it.hours - without.hours == pytest.approx(1)


def rollout(task: int, index: int, *, tokens: bool) -> EpisodeRecord:
    ids = TokensRecord(context_ids=[1] * 6, action_ids=[2] * 3)
    steps = [StepRecord(state="x" * 30, action="y" * 10, tokens=ids if tokens else None)] * 4
    return EpisodeRecord(run_id="r", task_id=str(task), rollout_index=index, steps=steps)


def test_the_shape_of_a_lake(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "L", create=True)
    with pytest.raises(UsageError, match="no steps to"):
        measure_workload(lk.snapshot())
    lk.append([rollout(task, index, tokens=False) for task in range(3) for index in range(4)])
    assert measure_workload(lk.snapshot()) == Workload(12, 4, 10, 4)
    lk.append([rollout(9, index, tokens=True) for index in range(8)])
    lk.retract([row[0] for row in lk.sql("SELECT episode_id FROM episodes WHERE task_id = '9' LIMIT 4").rows()])
    # Rows of tokens are what is trained on, where there are any.
    assert measure_workload(lk.snapshot()) == Workload(16, 4, 9, 4)
    stored = measure_stored_bytes(lk.snapshot())
    assert set(stored) == {"episodes", "steps", "tokens"}
    work = Workload(1e6, 4, 9, 4)
    sizes = {table.table: table.gb for table in estimate(work, Cluster(), stored=stored).tables}
    assert sizes["steps"] == pytest.approx(stored["steps"] * 1e6 / 1e9)


def test_the_command(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(command, words)
        assert done.exit_code == 0, done.output
        return done.output

    text = run("--steps", "1B", "--nodes", "4", "--price", "3")
    assert text.startswith("1,000,000,000 steps in 100,000,000")
    for fact in ("episodes of 10 steps", "200 tokens a step", "groups of 8"):
        assert fact in text.partition("\n")[0]
    document = json.loads(run("--steps", "1e9", "--nodes", "4", "--price", "3", "--format", "json"))
    assert [job["job"] for job in document["jobs"]] == list(JOBS)
    assert document["limits"][0]["limit"] in text.splitlines()[-1]
    lk = lake.open(tmp_path / "L", create=True)
    lk.append([rollout(1, index, tokens=True) for index in range(4)])
    like = json.loads(run("--like", str(tmp_path / "L"), "--steps", "4000", "--format", "json"))
    assert like["workload"] == {"episodes": 1000, "episode_steps": 4, "step_tokens": 9, "group_size": 4}
    for words, reason in [
        ((), "how many steps?"),
        (("--steps", "many"), "'many' is not a count; write 250000, 1e9, 10M or 1B"),
        (("--steps", "-1"), "is not a count"),
        (("--steps", "nan"), "is not a count"),
        (("--steps", "5kb"), "'5kb' is not a count"),
        (("--steps", "1B", "--step-tokens", "inf"), "'inf' is not a finite number"),
        (("--steps", "1B", "--days", "nan"), "'nan' is not a finite number"),
    ]:
        done = CliRunner().invoke(command, words)
        assert done.exit_code == 2
        assert reason in done.output
