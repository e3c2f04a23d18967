"""A writer stopped with SIGSTOP while others compact and vacuum, for a moment or past every retention, then continued.

It wakes up in a lake that has moved on: files it had written and not yet committed may have been taken for orphans,
rows it had committed and not yet accepted for those of a dead writer. It must notice, and write them again. No one
else may see anything of it in the meantime.
"""

import random
import time
from pathlib import Path

import polars as pl
import pytest

from lake import EpisodeRecord, Lake
from lake.write.ingest import ingest
from testkit.clocks import open_with_clock, set_clock
from testkit.copies import empty_lake
from testkit.examples import mostly_slow
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Truth, accounted, harm, rollouts, view, write_file
from testkit.lake_worker import compact
from testkit.processes import Worker, at_the_gate

PLACES = ["commit:tokens", "commit:steps", "write:episodes", "commit:episodes", "commit:rejects"]


def some_files(lk: Lake, rng: random.Random, truth: Truth) -> None:
    """Data to compact: small commits."""
    for number in range(2):
        records = rollouts(rng, f"before {number}", 2)
        lk.append(records, run_id="run")
        truth.took(records)


def stopped(lk: Lake, folder: Path, rng: random.Random, truth: Truth, point: str) -> tuple[Worker, list[EpisodeRecord]]:
    """A writer that stands still just before the first or second time it comes to a place; and what it writes."""
    records = rollouts(rng, "stopped", 12)
    file, _ = write_file(folder / "stopped.jsonl", [*records, b"not JSON\n"], rng)
    truth.offer(records)
    number = 1 if point == "commit:rejects" else rng.randint(1, 2)
    worker = Worker("ingest", lk.uri, file, "run", rng.randint(3, 6), faults=f"{point} {number} before hold")
    at_the_gate(worker)
    assert worker.hear() == f"before {point}", worker.error
    worker.stop()
    return worker, records


def continued(worker: Worker) -> None:
    """Let it run on, to its end."""
    worker.resume()
    worker.go()
    worker.finish()


def looked_at(lk: Lake, truth: Truth, faults: Faults) -> None:
    """What a reader sees now is right, and stays."""
    state = view(lk.snapshot())
    faults.found(harm(state, truth))
    truth.saw(state)


@pytest.mark.parametrize(
    ("point", "seed"),
    [
        ("commit:episodes", 0),
        pytest.param("commit:steps", 0, marks=pytest.mark.slow),
        *(pytest.param(point, n, marks=pytest.mark.slow) for n in range(1, 6) for point in PLACES),
    ],
)
def test_stopped_while_compaction_and_vacuum_run(tmp_path: Path, seed: int, point: str) -> None:
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    some_files(lk, rng, truth)
    worker, records = stopped(lk, tmp_path, rng, truth, point)
    with Faults() as faults:
        faults.inject("SIGSTOP of a writer while compaction and vacuum run")
        compact(lk)
        lk.vacuum()
        looked_at(lk, truth, faults)
        continued(worker)
        truth.took(records)
        looked_at(lk, truth, faults)
        accounted(lk)


@seeded()
def test_stopped_at_random_moments_while_compaction_and_vacuum_run(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    some_files(lk, rng, truth)
    records = rollouts(rng, "stopped", 12)
    file, _ = write_file(tmp_path / "stopped.jsonl", records, rng)
    truth.offer(records)
    worker = Worker("ingest", lk.uri, file, "run", 2)
    at_the_gate(worker)
    with Faults() as faults:
        for _ in range(3):
            time.sleep(rng.random() * 0.1)
            if not worker.running:
                break
            worker.stop()
            faults.inject("SIGSTOP of a writer while compaction and vacuum run")
            compact(lk)
            lk.vacuum()
            looked_at(lk, truth, faults)
            worker.resume()
        worker.finish()
        truth.took(records)
        looked_at(lk, truth, faults)
        accounted(lk)


@pytest.mark.parametrize("point", mostly_slow(PLACES, "commit:episodes"))
@seeded(5)
def test_stopped_past_the_retention(tmp_path: Path, seed: int, point: str) -> None:
    """Days pass for everybody; what it left uncommitted or unaccepted is vacuumed while it stands."""
    rng = random.Random(seed)
    lk, truth = open_with_clock(tmp_path / "lake"), Truth()
    some_files(lk, rng, truth)
    worker, records = stopped(lk, tmp_path, rng, truth, point)
    with Faults() as faults:
        faults.inject("SIGSTOP of a writer past the retention")
        days = rng.choice([2, 8, 40])
        set_clock(lk.uri, 24 * days)
        compact(lk)
        lk.vacuum()
        looked_at(lk, truth, faults)
        continued(worker)
        truth.took(records)
        looked_at(lk, truth, faults)
        accounted(lk)
        set_clock(lk.uri, 48 * days)
        compact(lk)
        lk.vacuum()
        looked_at(lk, truth, faults)


@pytest.mark.slow("A writer that wakes past the retention and dies leaves a lake that can be read.")
@pytest.mark.parametrize("point", ["commit:tokens", "commit:steps", "commit:episodes"])
def test_stopped_past_the_retention_and_killed_when_it_wakes(tmp_path: Path, point: str) -> None:
    """The file it was about to commit is gone; no matter what it does before it dies, the lake can be read."""
    rng = random.Random(0)
    lk, truth = open_with_clock(tmp_path / "lake"), Truth()
    some_files(lk, rng, truth)
    records = rollouts(rng, "stopped", 12)
    file, _ = write_file(tmp_path / "stopped.jsonl", records, rng)
    truth.offer(records)
    worker = Worker("ingest", lk.uri, file, "run", 4, faults=f"{point} 1 before hold;{point} 0 after kill")
    at_the_gate(worker)
    assert worker.hear() == f"before {point}"
    worker.stop()
    with Faults() as faults:
        faults.inject("SIGSTOP of a writer past the retention, kill -9 after its next commit")
        set_clock(lk.uri, 24 * 8)
        lk.vacuum()
        worker.resume()
        worker.go()
        assert worker.wait() == -9, worker.error
        looked_at(lk, truth, faults)
        ingest(lk, file, run_id="run")
        truth.took(records)
        looked_at(lk, truth, faults)
        compact(lk)
        (name,) = rng.sample(sorted(truth.stands), 1)
        of_name = (pl.col("task_id") == name[0]) & (pl.col("rollout_index") == name[1])
        lk.forget(lk.scan("episodes").filter(of_name).collect()["episode_id"].to_list())
        set_clock(lk.uri, 24 * 16)
        lk.vacuum()
        faults.found(harm(view(lk.snapshot()), truth, erased=[name]))


def test_accepted_while_vacuum_is_about_to_drop_it(tmp_path: Path) -> None:
    """Vacuum saw that no one accepts a stopped writer's rows; the writer wakes and accepts them; then vacuum acts."""
    rng = random.Random(0)
    lk, truth = open_with_clock(tmp_path / "lake"), Truth()
    worker, records = stopped(lk, tmp_path, rng, truth, "commit:episodes")
    set_clock(lk.uri, 24 * 8)
    with Faults() as faults:
        faults.inject("SIGSTOP of a writer past the retention, continued in the middle of vacuum")
        vacuum = Worker("maintain", lk.uri, "vacuum", faults="commit:steps 1 before hold")
        at_the_gate(vacuum)
        assert vacuum.hear() == "before commit:steps", vacuum.error
        continued(worker)
        truth.took(records)
        looked_at(lk, truth, faults)
        vacuum.go()
        vacuum.finish()
        looked_at(lk, truth, faults)
        accounted(lk)


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("commit:episodes", 2),
        ("commit:jobs", 2),
        pytest.param("commit:steps", 1, marks=pytest.mark.slow),
        pytest.param("commit:steps", 2, marks=pytest.mark.slow),
        pytest.param("commit:episodes", 1, marks=pytest.mark.slow),
        pytest.param("commit:jobs", 1, marks=pytest.mark.slow),
    ],
)
def test_a_commit_whose_acknowledgement_is_lost(tmp_path: Path, point: str, number: int) -> None:
    """The storage took it, the answer did not come, the client sent it again: it stands once."""
    rng = random.Random(0)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    records = rollouts(rng, "task", 12)
    file, _ = write_file(tmp_path / "file.jsonl", records, rng)
    worker = Worker("ingest", lk.uri, file, "run", 4, faults=f"{point} {number} after repeat")
    at_the_gate(worker)
    worker.finish()
    with Faults() as faults:
        faults.inject("acknowledgement of a commit lost")
        truth.took(records)
        looked_at(lk, truth, faults)
        assert lk.sql("FROM jobs")["event"].to_list().count("succeeded") == 1
        accounted(lk)


@pytest.mark.parametrize("table", mostly_slow(["episodes", "steps", "tokens", "jobs"], "episodes"))
def test_a_rewrite_whose_acknowledgement_is_lost(tmp_path: Path, table: str) -> None:
    rng = random.Random(0)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    some_files(lk, rng, truth)
    worker = Worker("maintain", lk.uri, "compact", faults=f"commit:{table} 1 after repeat")
    at_the_gate(worker)
    worker.wait()
    with Faults() as faults:
        faults.inject("acknowledgement of a compaction lost")
        looked_at(lk, truth, faults)
        compact(lk)
        looked_at(lk, truth, faults)
