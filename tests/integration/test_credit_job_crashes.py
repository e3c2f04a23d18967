"""Credit in ranges: complete or absent, whichever process is killed, and the same bits on every executor.

Ranges of one group each, so that a job has several commits. Local ranges die with the job; in processes and on Ray a
worker can die alone, before its commit or after it, when its answer is lost.
"""

import json
import random
import time
from importlib.util import find_spec
from pathlib import Path

import polars as pl
import pytest

from lake import Lake
from lake.execution.local import LocalExecutor
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.copies import copied, empty_lake
from testkit.credit_worker import TINY
from testkit.fault_model import rollouts
from testkit.processes import TIMEOUT, Forked, Worker, at_the_gate

RAY = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "trajlake[ray]"')
GROUPS = 4
KEYS = ["group_id", "episode_id", "step_index"]
VALUES = [*KEYS, "return_to_go", "a_episode", "a_step", "advantage", "anchor_key", "flags"]


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """A lake with a few groups, in several files."""

    def make(template: Path) -> None:
        lk = empty_lake(template)
        for number in range(GROUPS):
            with lk.job(kind="collect", run_id="run") as job:
                job.record(rollouts(random.Random(number), f"task {number}", 3))

    return copied("groups in files of their own", make, tmp_path / "lake")


def read_credit(lk: Lake) -> pl.DataFrame:
    """What readers see of credit, each step at most once."""
    rows = lk.scan("advantages").select(VALUES).collect().sort(KEYS)
    assert rows.select(KEYS).is_unique().all()
    return rows


def expected(lk: Lake) -> pl.DataFrame:
    """All advantages, computed at once."""
    facts = lk.scan("episodes").select("episode_id", "status", pl.col("env_return").alias("episode_score"))
    return GiGPO().advantages(lk.scan("steps").join(facts, on="episode_id")).select(VALUES).collect().sort(KEYS)


def status(lk: Lake) -> list[str]:
    return lk.sql("SELECT status FROM job_runs WHERE kind = 'credit' ORDER BY started_at")["status"].to_list()


def start(lk: Lake, executor: str, fate: str, folder: Path) -> Forked:
    folder.mkdir(exist_ok=True)
    return Forked("testkit.credit_worker", lk.uri, executor, fate, folder)


# ---------------------------------------------------------------- a worker dies


@pytest.mark.parametrize(
    ("executor", "fate"),
    [
        ("processes", "after"),
        pytest.param("processes", "before", marks=pytest.mark.slow),
        pytest.param("ray", "after", marks=[RAY, pytest.mark.slow]),
        pytest.param("ray", "before", marks=[RAY, pytest.mark.slow]),
    ],
)
def test_a_worker_that_is_killed_costs_nothing(lk: Lake, tmp_path: Path, executor: str, fate: str) -> None:
    report = json.loads(start(lk, executor, fate, tmp_path / "marks").finish().splitlines()[-1])
    assert report["groups_computed"] == GROUPS
    assert (tmp_path / "marks" / f"range-{GROUPS + 1}").exists(), "nobody was killed"
    assert read_credit(lk).equals(expected(lk), null_equal=True)
    if fate == "after":
        assert lk.snapshot().dead_write_ids, "a commit whose answer was lost stays dead"
    assert status(lk) == ["succeeded"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", pytest.param("ray", marks=RAY)])
def test_workers_that_always_die_leave_nothing(lk: Lake, tmp_path: Path, executor: str) -> None:
    process = start(lk, executor, "always", tmp_path / "marks")
    assert process.wait() != 0
    assert "WorkerLostError" in process.error
    assert read_credit(lk).is_empty()
    assert lk.scan("credit_groups").collect().is_empty()
    assert status(lk) == ["failed"]


# ---------------------------------------------------------------- the driver dies


@pytest.mark.parametrize(
    "executor",
    ["local", pytest.param("processes", marks=pytest.mark.slow), pytest.param("ray", marks=[RAY, pytest.mark.slow])],
)
def test_a_driver_that_is_killed_leaves_nothing_and_is_run_again(lk: Lake, tmp_path: Path, executor: str) -> None:
    marks = tmp_path / "marks"
    process = start(lk, executor, "wait", marks)
    until = time.monotonic() + TIMEOUT
    while not ((marks / "range-2").exists() and any(Path(lk.uri, "advantages").glob("*.parquet"))):
        assert process.running, process.error
        assert time.monotonic() < until, "no range was written"
        time.sleep(0.02)
    assert process.kill()
    (marks / "go").touch()
    assert read_credit(lk).is_empty()
    assert status(lk) == ["started"]
    report = run_credit(lk, GiGPO(), executor=LocalExecutor(1), memory_gb=TINY)
    assert report.groups_computed == GROUPS
    assert read_credit(lk).equals(expected(lk), null_equal=True)
    while process.hear() is not None:  # its pipe is closed when its workers have ended too
        pass


PLACES = [
    ("advantages 2 before", False),
    pytest.param(f"advantages {GROUPS} after", False, marks=pytest.mark.slow),
    pytest.param("credit_groups 1 before", False, marks=pytest.mark.slow),
    pytest.param("credit_groups 1 after", False, marks=pytest.mark.slow),
    ("jobs 2 after", True),
]


@pytest.mark.parametrize(("point", "stands"), PLACES)
def test_a_job_of_several_ranges_killed_beside_a_commit(lk: Lake, point: str, stands: bool) -> None:
    worker = Worker("credit_ranges", lk.uri, faults=f"commit:{point} kill")
    at_the_gate(worker)
    assert worker.wait() == -9, worker.error
    assert read_credit(lk).is_empty() != stands
    assert lk.scan("credit_groups").collect().is_empty() != stands
    again = run_credit(lk, GiGPO())
    assert again.skipped == stands
    assert read_credit(lk).equals(expected(lk), null_equal=True)


def test_an_update_that_is_killed_leaves_the_old_rows(lk: Lake) -> None:
    """An incremental job dies between its ranges: the series still shows what the job before it found."""
    run_credit(lk, GiGPO())
    groups = lk.scan("episodes").collect().partition_by("group_id", maintain_order=True)
    lk.retract([group["episode_id"][0] for group in groups[:2]])
    before = read_credit(lk)
    worker = Worker("credit_ranges", lk.uri, faults="commit:advantages 2 before kill")
    at_the_gate(worker)
    assert worker.wait() == -9, worker.error
    assert read_credit(lk).equals(before, null_equal=True)
    report = run_credit(lk, GiGPO())
    assert (report.groups_computed, report.groups_kept) == (2, GROUPS - 2)
    latest = lk.sql("SELECT * FROM latest_advantages").select(VALUES).sort(KEYS)
    assert latest.equals(expected(lk), null_equal=True)


def test_two_identical_jobs_at_once_show_every_step_once(lk: Lake) -> None:
    workers = [Worker("credit_ranges", lk.uri) for _ in range(2)]
    at_the_gate(*workers)
    reports = [json.loads(worker.finish()) for worker in workers]
    latest = lk.sql("SELECT * FROM latest_advantages").select(VALUES).sort(KEYS)
    assert latest.equals(expected(lk), null_equal=True)
    done = {report["job_id"] for report in reports}
    assert run_credit(lk, GiGPO()).job_id in done
