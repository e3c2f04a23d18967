"""Ingest killed with SIGKILL, at random moments and between chosen commits, then replayed otherwise than before.

After every kill: nothing half visible, nothing twice, what was visible still is. Then the batch comes again, in another
batch size and partly resampled (the same keys, other content). What had become visible stands and its resampled twin
becomes a reject `conflict`; what had not takes what came. In the end every key stands once and every record is
accounted for.
"""

import random
import time
from pathlib import Path

import pytest

from lake import EpisodeRecord, Lake
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Truth, accounted, conflicts, content, harm, key, resampled, rollouts, view, write_file
from testkit.processes import Worker, at_the_gate

PER_ROUND = 16
ROUNDS_PER_LAKE = 10
BETWEEN = "kill -9 between the children's commits and the episodes' commit"
BESIDE = "kill -9 next to a commit"
RANDOM = "kill -9 at a random moment"
PLACES = [
    "commit:jobs 1 after",
    "commit:tokens {n} after",
    "commit:steps {n} before",
    "commit:rejects 1 after",
    "commit:episodes {n} after",
    "commit:jobs 2 before",
]


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long an undisturbed round takes from the gate to its end, here and now."""
    folder = tmp_path_factory.mktemp("timed")
    rng = random.Random(0)
    file, _ = write_file(folder / "file.jsonl", rollouts(rng, "timed", PER_ROUND), rng)
    lk = empty_lake(folder / "lake")
    worker = Worker("ingest", lk.uri, file, "run", 4)
    at_the_gate(worker)
    began = time.monotonic()
    worker.finish()
    return time.monotonic() - began


def kill_one(lk: Lake, file: Path, batch_size: int, rng: random.Random, seconds: float) -> str:
    """Start an ingest and kill it somewhere; what was done to it, nothing if it was quicker."""
    kind = rng.choice([RANDOM, RANDOM, BETWEEN, BESIDE])
    commit = rng.randint(1, max(1, PER_ROUND // batch_size))
    points = {RANDOM: "", BETWEEN: f"commit:episodes {commit} before", BESIDE: rng.choice(PLACES).format(n=commit)}[
        kind
    ]
    worker = Worker("ingest", lk.uri, file, "run", batch_size, faults=f"{points} kill" if points else "")
    at_the_gate(worker)
    if kind == RANDOM:
        time.sleep(rng.random() * seconds)
        return kind if worker.kill() else ""
    # Without a bad line there is no commit of `rejects` to die after.
    assert worker.wait() == -9 or "rejects" in points, worker.error
    return kind if worker.wait() == -9 else ""


def replay(lk: Lake, records: list[EpisodeRecord], folder: Path, truth: Truth, rng: random.Random) -> None:
    """The round again: half of it resampled, then as it was, each in its own batch size."""
    twins = [resampled(record, rng) if rng.random() < 0.5 else record for record in records]
    for number, again in enumerate((twins, records)):
        standing = dict(truth.stands)
        standing_texts = [standing.get(key(record)) for record in again]
        file, bad = write_file(folder / f"again{number}.jsonl", again, rng)
        report = ingest(lk, file, run_id="run", batch_size=rng.randint(1, PER_ROUND))
        assert report.records == len(again) + bad
        assert report.new == standing_texts.count(None)
        assert report.present == sum(
            text == content(record) for text, record in zip(standing_texts, again, strict=True)
        )
        assert report.rejected == report.records - report.new - report.present
        turned_away = {
            (key(record), content(record))
            for text, record in zip(standing_texts, again, strict=True)
            if text not in (None, content(record))
        }
        assert turned_away <= conflicts(lk)
        truth.took(again)


def kill_and_replay(folder: Path, seed: int, kills: int, seconds: float) -> None:
    rng = random.Random(seed)
    with Faults() as faults:
        for number in range(kills):
            if number % ROUNDS_PER_LAKE == 0:
                lk, truth = empty_lake(folder / f"lake{number}"), Truth()
            records = rollouts(rng, f"round {number}", PER_ROUND)
            file, _ = write_file(folder / f"round{number}.jsonl", records, rng)
            truth.offer(records)
            if kind := kill_one(lk, file, rng.randint(1, 8), rng, seconds):
                faults.inject(kind)
            state = view(lk.snapshot())
            faults.found(harm(state, truth))
            truth.saw(state)
            replay(lk, records, folder, truth, rng)
            faults.inject("resampled content under a key that is present")
            faults.found(harm(view(lk.snapshot()), truth))
            accounted(lk)


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 2), *(pytest.param(seed, 30, marks=pytest.mark.slow) for seed in range(1, 21))]
)
def test_killed_again_and_again_and_replayed(tmp_path: Path, seed: int, kills: int, seconds: float) -> None:
    kill_and_replay(tmp_path, seed, kills, seconds)


@seeded()
def test_killed_while_the_lake_is_made(tmp_path: Path, seed: int) -> None:
    """Anyone who comes next makes what is missing."""
    rng = random.Random(seed)
    with Faults() as faults:
        for number in range(2):
            uri, truth = tmp_path / f"lake{number}", Truth()
            records = rollouts(rng, "task", 4)
            file, _ = write_file(tmp_path / "file.jsonl", records, rng)
            workers = [Worker("ingest", uri, file, "run", 2) for _ in range(2)]
            at_the_gate(*workers)
            time.sleep(rng.random() * 0.25)
            killed = [worker.kill() for worker in workers].count(True)
            faults.inject("kill -9 of two that make a lake and write to it", killed)
            truth.offer(records)
            lk = empty_lake(uri)
            faults.found(harm(view(lk.snapshot()), truth))
            ingest(lk, file, run_id="run")
            truth.took(records)
            faults.found(harm(view(lk.snapshot()), truth))
