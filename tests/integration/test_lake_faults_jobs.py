"""Jobs killed at any moment, and twins that run at once: a result is there completely, once, or not at all.

A job's rows exist for readers when its terminal row says so. A worker that dies after its commit and before that row
leaves rows no one sees; the job runs again and is listed once. A worker that dies after that row is done, and anyone
who asks again gets that answer.
"""

import random
import time
from pathlib import Path

import msgspec
import polars as pl
import pytest

import lake
from lake import Lake
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.clocks import open_with_clock, set_clock
from testkit.copies import copied
from testkit.fault_log import Faults, Harm, seeded
from testkit.fault_model import rollouts
from testkit.lake_worker import compact
from testkit.processes import Worker, at_the_gate

EPISODES = 12
PLACES = [
    ("commit:advantages 1 after", False),
    ("commit:jobs 2 after", True),
    pytest.param("commit:jobs 1 before", False, marks=pytest.mark.slow),
    pytest.param("commit:jobs 1 after", False, marks=pytest.mark.slow),
    pytest.param("commit:advantages 1 before", False, marks=pytest.mark.slow),
    pytest.param("commit:jobs 2 before", False, marks=pytest.mark.slow),
]
"""Where a credit job dies, and whether its result stands."""


def filled(folder: Path, seed: int) -> Lake:
    """A lake with episodes to credit."""

    def make(template: Path) -> None:
        with lake.open(template, create=True).job(kind="collect", run_id="run") as job:
            job.record(rollouts(random.Random(seed), "task", EPISODES))

    return copied(f"episodes to credit, {seed}", make, folder / "lake")


def credited(lk: Lake, faults: Faults) -> list[int]:
    """Jobs with visible advantages; each has all steps once, and `latest_advantages` has each step once."""
    snapshot = lk.snapshot()
    steps = snapshot.scan("steps").select("episode_id", "step_index").collect().sort("episode_id", "step_index")
    rows = snapshot.scan("advantages").select("job_id", "episode_id", "step_index").collect()
    per_job = rows.partition_by("job_id", include_key=False)
    equal = [part.sort("episode_id", "step_index").equals(steps) for part in per_job]
    latest = snapshot.sql("SELECT episode_id, step_index FROM latest_advantages")
    faults.found(
        Harm(
            lost=0 if not per_job else steps.height - latest.unique().height,
            duplicated=latest.height - latest.unique().height,
            half_visible=equal.count(False),
        )
    )
    succeeded = snapshot.sql("SELECT job_id FROM job_runs WHERE kind = 'credit' AND status = 'succeeded'")["job_id"]
    assert set(rows["job_id"]) == set(succeeded)
    return succeeded.to_list()


def events(lk: Lake) -> pl.DataFrame:
    """How many rows each job has in `jobs`, by event; never two of one kind, never two that end it."""
    rows = lk.sql(
        "SELECT job_id, count(*) FILTER (event = 'started') AS started, count(*) FILTER (event <> 'started') AS ended"
        " FROM jobs GROUP BY job_id"
    )
    assert rows["started"].to_list() == [1] * rows.height
    assert rows["ended"].max() == 1
    return rows


@pytest.mark.parametrize(("point", "stands"), PLACES)
def test_a_job_killed_beside_a_commit(tmp_path: Path, point: str, stands: bool) -> None:
    lk = filled(tmp_path, 0)
    worker = Worker("credit", lk.uri, faults=f"{point} kill")
    at_the_gate(worker)
    assert worker.wait() == -9, worker.error
    with Faults() as faults:
        faults.inject(f"job killed {'after' if stands else 'before'} its terminal row")
        assert len(credited(lk, faults)) == stands
        again = run_credit(lk, GiGPO())
        assert again.skipped == stands
        assert credited(lk, faults) == [again.job_id]
        assert run_credit(lk, GiGPO()).skipped
        assert events(lk)["ended"].sum() == 2, "the collect job and the one that ended"


@seeded()
def test_jobs_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lk = filled(tmp_path, seed)
    began = time.monotonic()
    worker = Worker("credit", lk.uri)
    at_the_gate(worker)
    worker.finish()
    seconds = time.monotonic() - began
    with Faults() as faults:
        for number in range(2 if seed else 1):
            with lk.job(kind="collect", run_id="run") as job:
                job.record(rollouts(rng, f"more {number}", 4))
            worker = Worker("credit", lk.uri)
            at_the_gate(worker)
            time.sleep(rng.random() * seconds)
            if worker.kill():
                faults.inject("job killed at a random moment")
            before = lk.sql("SELECT count(*) AS n FROM job_runs WHERE kind = 'credit' AND status = 'succeeded'")["n"][0]
            report = run_credit(lk, GiGPO())
            assert before == number + 1 + report.skipped
            events(lk)
            steps = lk.scan("steps").select("episode_id", "step_index").collect()
            latest = lk.sql("SELECT episode_id, step_index FROM latest_advantages")
            missing = steps.join(latest, on=steps.columns, how="anti").height
            faults.found(Harm(lost=missing, duplicated=latest.height - latest.unique().height))


@seeded()
def test_identical_jobs_at_once(tmp_path: Path, seed: int) -> None:
    """Two or more start together: each has a whole result or finds another's, and the newest is shown, once."""
    lk = filled(tmp_path, seed)
    workers = [Worker("credit", lk.uri) for _ in range(random.Random(seed).randint(2, 4))]
    with Faults() as faults:
        faults.inject("identical jobs at once")
        at_the_gate(*workers)
        while any(worker.running for worker in workers):
            credited(lk, faults)
            time.sleep(0.2)  # the workers need the machine, too
        reports = [msgspec.json.decode(worker.finish()) for worker in workers]
        done = credited(lk, faults)
        assert {report["job_id"] for report in reports} == set(done)
        assert len(done) == sum(not report["skipped"] for report in reports)
        assert run_credit(lk, GiGPO()).skipped


@pytest.mark.parametrize(
    ("days", "point"),
    [
        (40, "commit:jobs 2"),
        pytest.param(8, "commit:jobs 2", marks=pytest.mark.slow),
        pytest.param(8, "commit:advantages 1", marks=pytest.mark.slow),
    ],
)
def test_a_job_stopped_while_days_pass(tmp_path: Path, days: int, point: str) -> None:
    """Rows of a running job are its own for 30 days; after that they are vacuumed, and it must notice."""
    lk = open_with_clock(filled(tmp_path, 0).uri)
    worker = Worker("credit", lk.uri, faults=f"{point} before hold")
    at_the_gate(worker)
    assert worker.hear() == f"before {point.split(maxsplit=1)[0]}"
    worker.stop()
    with Faults() as faults:
        faults.inject("SIGSTOP of a job past the retention")
        set_clock(lk.uri, 24 * days)
        compact(lk)
        lk.vacuum()
        worker.resume()
        worker.go()
        ended = worker.wait()
        if ended == 1:
            assert "run it again" in worker.error
            assert days > 30
        assert len(credited(lk, faults)) == (ended == 0)
        assert run_credit(lk, GiGPO()).skipped == (ended == 0)
        credited(lk, faults)
        events(lk)


def test_skipping_survives_compaction(tmp_path: Path) -> None:
    """The same question has the same answer: a result is found by what went into it, not by files or versions."""
    lk = filled(tmp_path, 0)
    first = run_credit(lk, GiGPO())
    again = open_with_clock(lk.uri, 24 * 40)
    compact(again)
    again.vacuum()
    worker = Worker("credit", lk.uri)
    at_the_gate(worker)
    assert msgspec.json.decode(worker.finish()) == {"job_id": first.job_id, "skipped": True}
    with lk.job(kind="collect", run_id="run") as job:
        job.record(rollouts(random.Random(1), "more", 4))
    assert not run_credit(lk, GiGPO()).skipped


def test_a_job_that_does_not_know_that_its_episodes_were_forgotten(tmp_path: Path) -> None:
    """It read them before; what it writes of them afterwards is not seen, and not on the disk for long."""
    lk = filled(tmp_path, 0)
    worker = Worker("credit", lk.uri, faults="write:advantages 1 before hold")
    at_the_gate(worker)
    assert worker.hear() == "before write:advantages"
    with Faults() as faults:
        faults.inject("episodes forgotten under a running job")
        (victim,) = lk.scan("episodes").collect()["episode_id"].sample(1, seed=0).to_list()
        lk.forget([victim])
        worker.go()
        worker.wait()
        run_credit(lk, GiGPO())
        credited(lk, faults)
        for days in (40, 50):  # out of the table first, and off the disk when no reader can need it
            open_with_clock(lk.uri, 24 * days).vacuum()
        files = [pl.read_parquet(file) for file in Path(lk.uri, "advantages").rglob("*.parquet")]
        assert sum(rows["episode_id"].is_in([victim]).sum() for rows in files) == 0
