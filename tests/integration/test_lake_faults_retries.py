"""Retries: of the attempts at one rollout the highest is seen, alone, at every moment, in any order.

The retraction of a predecessor is a child of the write that brings its successor: both are seen, or neither.
"""

import random
import time
from pathlib import Path

from lake import EpisodeRecord, Lake
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.episodes import write_lines
from testkit.fault_log import Faults, Harm, seeded
from testkit.fault_model import content, resampled, rollouts, view
from testkit.processes import Worker, at_the_gate

Slot = tuple[str, int]


def attempts(rng: random.Random, first: list[EpisodeRecord], count: int) -> list[list[EpisodeRecord]]:
    """The first attempts, and for some rollouts later ones."""
    attempts = [first]
    for attempt in range(1, count):
        again = [resampled(record, rng) for record in first if rng.random() < 0.7]
        for record in again:
            record.attempt = attempt
        attempts.append(again)
    return attempts


def seen_attempts(lk: Lake, faults: Faults, before: dict[Slot, int] | None = None) -> dict[Slot, int]:
    """The attempt that is seen of each rollout: one, whole, and none that is lower than what was seen before."""
    state = view(lk.snapshot())
    attempt_by_slot: dict[Slot, int] = {}
    for task, rollout, attempt in state.episodes:
        attempt_by_slot[task, rollout] = max(attempt, attempt_by_slot.get((task, rollout), -1))
    lost = sum(attempt_by_slot.get(slot, -1) < attempt for slot, attempt in (before or {}).items())
    faults.found(Harm(lost, state.duplicated + len(state.episodes) - len(attempt_by_slot), state.broken))
    return attempt_by_slot


def highest(batches: list[list[EpisodeRecord]]) -> dict[Slot, EpisodeRecord]:
    """The record of the highest attempt at each rollout."""
    return {(record.task_id, record.rollout_index): record for batch in batches for record in batch}


def settled(lk: Lake, batches: list[list[EpisodeRecord]], faults: Faults) -> None:
    """In the end the highest attempts are seen, with what they hold."""
    episodes = view(lk.snapshot()).episodes
    expected = {(*slot, record.attempt): content(record) for slot, record in highest(batches).items()}
    faults.found(Harm(lost=sum(episodes.get(name) != text for name, text in expected.items())))
    assert episodes == expected


@seeded()
def test_attempts_at_the_same_rollouts_raced_by_three_processes(tmp_path: Path, seed: int) -> None:
    """Each process brings one attempt at all of them; one process is killed and run again."""
    rng = random.Random(seed)
    lk = empty_lake(tmp_path / "lake")
    batches = attempts(rng, rollouts(rng, "task", 12), 3)
    files = [write_lines(tmp_path / f"{n}.jsonl", rng.sample(batch, len(batch))) for n, batch in enumerate(batches)]
    workers = [Worker("ingest", lk.uri, file, "run", rng.randint(1, 4)) for file in files]
    with Faults() as faults:
        faults.inject("attempts at the same rollouts raced by three processes")
        at_the_gate(*workers)
        attempts_seen = seen_attempts(lk, faults)
        time.sleep(rng.random() * 0.3)
        if workers[seed % 3].kill():
            faults.inject("kill -9 of one of three that race with retries")
        while any(worker.running for worker in workers):
            attempts_seen = seen_attempts(lk, faults, attempts_seen)
            time.sleep(0.05)
        ingest(lk, files[seed % 3], run_id="run", batch_size=5)
        settled(lk, batches, faults)


@seeded(5)
def test_between_every_two_commits_of_a_retry_one_attempt_is_seen(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lk = empty_lake(tmp_path / "lake")
    batches = attempts(rng, rollouts(rng, "task", 8), 2)
    lk.append(batches[0], run_id="run")
    file = write_lines(tmp_path / "retries.jsonl", batches[1])
    worker = Worker("ingest", lk.uri, file, "run", rng.randint(1, 4), faults="commit 0 before hold")
    at_the_gate(worker)
    with Faults() as faults:
        attempts_seen = seen_attempts(lk, faults)
        assert len(attempts_seen) == 8
        while (where := worker.hear()) is not None and not where.startswith("{"):
            attempts_seen = seen_attempts(lk, faults, attempts_seen)
            faults.inject("snapshot between two commits of a retry")
            worker.go()
        assert worker.wait() == 0, worker.error
        settled(lk, batches, faults)
