"""Four and eight writers at once, and three processes that race over overlapping files.

While they write, snapshots are taken and looked through; what one showed, every later one shows. Afterwards each
record stands once, in whichever batch of whichever process it won, and each process accounts for all it was given.
"""

import random
import time
from pathlib import Path

import msgspec
import pytest

from lake import EpisodeRecord, Lake
from lake.write.ingest import ingest
from lake.write.sources import Report
from testkit.copies import empty_lake
from testkit.examples import mostly_slow
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Truth, accounted, conflicts, content, harm, key, resampled, rollouts, view, write_file
from testkit.processes import Worker, at_the_gate

OWN = 5
SHARED = 6
"""Episodes of a writer's own, and those that all of them have."""


def watched(lk: Lake, workers: list[Worker], truth: Truth, faults: Faults) -> int:
    """Take snapshots until all workers are done; how many different ones were seen."""
    sizes = set()
    while any(worker.running for worker in workers):
        state = view(lk.snapshot())
        faults.found(harm(state, truth))
        truth.saw(state)
        sizes.add(len(state.episodes))
        time.sleep(0.1)  # the workers need the machine, too
    return len(sizes)


def reports(workers: list[Worker]) -> list[Report]:
    """What each worker accounts for."""
    reports = [msgspec.json.decode(worker.finish(), type=Report) for worker in workers]
    for report in reports:
        assert report.records == report.new + report.present + report.rejected
    return reports


def settled(lk: Lake, sent: list[list[EpisodeRecord]], truth: Truth, faults: Faults) -> None:
    """Of each key one of the offered contents stands, and every other one was turned away."""
    state = view(lk.snapshot())
    truth.saw(state)
    faults.found(harm(state, truth))
    assert set(state.episodes) == {key(record) for records in sent for record in records}
    lost_races = {
        (key(record), content(record))
        for records in sent
        for record in records
        if state.episodes[key(record)] != content(record)
    }
    assert conflicts(lk) == lost_races
    accounted(lk)


@pytest.mark.parametrize("writers", mostly_slow([4, 8], 4))
@seeded()
def test_writers_at_once(tmp_path: Path, seed: int, writers: int) -> None:
    """Each has its own file and one that all share, so that some batches are disjoint and some collide."""
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    shared = rollouts(rng, "shared", SHARED)
    workers, sent, bad_lines = [], [], 0
    for number in range(writers):
        records = rollouts(rng, f"own {number}", OWN) + shared
        rng.shuffle(records)
        file, bad = write_file(tmp_path / f"{number}.jsonl", records, rng)
        truth.offer(records)
        sent.append(records)
        bad_lines += bad
        workers.append(Worker("ingest", lk.uri, file, "run", rng.randint(2, 5)))
    with Faults() as faults:
        faults.inject(f"{writers} writers at once")
        at_the_gate(*workers)
        assert watched(lk, workers, truth, faults) > 1, "all was over before anybody looked"
        actual = reports(workers)
        assert sum(report.new for report in actual) == writers * OWN + SHARED
        assert sum(report.present for report in actual) == (writers - 1) * SHARED
        assert sum(report.rejected for report in actual) == bad_lines
        settled(lk, sent, truth, faults)


def race(folder: Path, seed: int, *, killed: bool) -> None:
    """Three processes, three batch sizes, two files that overlap; of the overlap some is resampled in one of them."""
    rng = random.Random(seed)
    lk, truth = empty_lake(folder / "lake"), Truth()
    common = rollouts(rng, "common", 16)
    first = rollouts(rng, "one", 12) + common
    two = [resampled(record, rng) if rng.random() < 0.3 else record for record in common] + rollouts(rng, "two", 12)
    sent = [first, two, first]
    files = [write_file(folder / f"{n}.jsonl", records, rng)[0] for n, records in enumerate(sent)]
    truth.offer(first + two)
    workers = [Worker("ingest", lk.uri, file, "run", rng.randint(2, 9)) for file in files]
    with Faults() as faults:
        faults.inject("overlapping files raced by three processes")
        at_the_gate(*workers)
        if killed:
            watched_once = view(lk.snapshot())
            faults.found(harm(watched_once, truth))
            if workers[0].kill():
                faults.inject("kill -9 of one of three racing processes")
        watched(lk, workers, truth, faults)
        actual = reports(workers[killed:])
        if killed:
            actual.append(ingest(lk, files[0], run_id="run", batch_size=17))
        else:
            assert sum(report.new for report in actual) == len(truth.offered)
        settled(lk, sent, truth, faults)


@pytest.mark.parametrize(
    "killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all finish", "one killed"]
)
@seeded()
def test_overlapping_files_raced_by_three_processes(tmp_path: Path, seed: int, killed: bool) -> None:
    race(tmp_path, seed, killed=killed)
