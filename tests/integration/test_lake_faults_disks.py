"""A disk that fills up, or a limit on the size of a file, in the middle of a write: room is made, and it is run again.

What the write had committed is whole, the rest is not visible, the error says what to do, and the same command
finishes once there is room, in the process that failed as well as in another.
"""

import os
import random
from functools import partial
from pathlib import Path

from lake import Lake
from lake.errors import LakeAccessError
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.disks import disk, grow
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Key, Truth, accounted, harm, key, rollouts, view, write_file
from testkit.lake_worker import compact
from testkit.processes import Worker, at_the_gate

ROOM = "64m"
PER_ROUND = 12


def used(path: Path) -> int:
    """Bytes in use on a file system."""
    usage = os.statvfs(path)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def fill_up(lk: Lake, file: Path, rng: random.Random) -> bool:
    """Ingest on a disk that is too small, here or in another process; whether it failed, as it should say."""
    batch_size = rng.randint(1, 8)
    message = ""
    if rng.random() < 0.5:
        try:
            ingest(lk, file, run_id="run", batch_size=batch_size)
        except LakeAccessError as error:
            message = str(error)
    else:
        worker = Worker("ingest", lk.uri, file, "run", batch_size)
        at_the_gate(worker)
        if worker.wait() != 0:
            message = worker.error
    assert not message or "the disk is full" in message
    return bool(message)


@seeded()
def test_the_disk_fills_up_in_the_middle_of_an_ingest(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    failures = 0
    with disk(tmp_path / "disk", ROOM) as folder, Faults() as faults:
        lk, truth = empty_lake(folder / "lake"), Truth()
        for number in range(3):
            records = rollouts(rng, f"round {number}", PER_ROUND)
            file, _ = write_file(tmp_path / f"{number}.jsonl", records, rng)
            truth.offer(records)
            grow(folder, str(used(folder) + rng.randrange(4096, 250_000)))
            if fill_up(lk, file, rng):
                failures += 1
                faults.inject("disk full in the middle of an ingest")
            state = view(lk.snapshot())
            faults.found(harm(state, truth))
            truth.saw(state)
            grow(folder, ROOM)
            report = ingest(lk, file, run_id="run", batch_size=rng.randint(1, PER_ROUND))
            assert report.new + report.present == PER_ROUND
            truth.took(records)
            faults.found(harm(view(lk.snapshot()), truth))
        accounted(lk)
    assert failures, "the disk was never too small"


@seeded()
def test_a_file_becomes_too_large_in_the_middle_of_an_ingest(tmp_path: Path, seed: int) -> None:
    """As under a quota: small batches fit, then one does not."""
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    records = rollouts(rng, "small", 6)
    large = rollouts(rng, "large", 2)
    for record in large:
        record.steps[0].state += rng.randbytes(60_000).hex()
    records += large
    file, _ = write_file(tmp_path / "file.jsonl", records, rng)
    truth.offer(records)
    worker = Worker("ingest", lk.uri, file, "run", rng.randint(1, 3), faults="fsize 30000")
    at_the_gate(worker)
    with Faults() as faults:
        assert worker.wait() == 1
        assert "the disk is full" in worker.error
        faults.inject("file larger than the limit in the middle of an ingest")
        state = view(lk.snapshot())
        faults.found(harm(state, truth))
        assert 0 < len(state.episodes) < len(records)
        truth.saw(state)
        ingest(lk, file, run_id="run")
        truth.took(records)
        faults.found(harm(view(lk.snapshot()), truth))
        accounted(lk)


def number_of(lk: Lake, name: Key) -> int:
    """The id of an episode that the model knows by name."""
    rows = lk.scan("episodes").select("task_id", "rollout_index", "attempt", "episode_id").collect().rows()
    (row_number,) = (number for *columns, number in rows if tuple(columns) == name)
    return int(row_number)


@seeded()
def test_the_disk_fills_up_in_the_middle_of_maintenance(tmp_path: Path, seed: int) -> None:
    """What was to be compacted is still there as it was; what was to be erased is not seen any more, or still is."""
    rng = random.Random(seed)
    failures = 0
    with disk(tmp_path / "disk", ROOM) as folder, Faults() as faults:
        lk, truth = empty_lake(folder / "lake"), Truth()
        erased: set[Key] = set()
        for number in range(2):
            records = rollouts(rng, f"round {number}", PER_ROUND)
            file, _ = write_file(tmp_path / f"{number}.jsonl", records, rng)
            ingest(lk, file, run_id="run", batch_size=8)
            truth.took(records)
            victim = key(rng.choice(records))
            forget = partial(Lake.forget, episode_ids=[number_of(lk, victim)])
            operation = rng.choice([compact, Lake.vacuum, forget])
            grow(folder, str(used(folder) + rng.randrange(4096, 60_000)))
            expected = Truth(truth.offered, {name: text for name, text in truth.stands.items() if name != victim})
            try:
                operation(lk)
            except LakeAccessError as error:
                failures += "the disk is full" in str(error)
                faults.inject("disk full in the middle of maintenance")
            faults.found(harm(view(lk.snapshot()), expected, erased))
            grow(folder, ROOM)
            operation(lk)
            erased |= {victim} if operation is forget else set()
            faults.found(harm(view(lk.snapshot()), truth, erased))
    assert failures == faults.injected.count("disk full in the middle of maintenance")
