"""Compaction, vacuum, retraction and erasure next to four writers, each killed at random moments and run again.

The writers must not notice. A named snapshot taken before shows to the end what it showed (erased episodes aside); what
was retracted is gone for readers, what was forgotten is gone from every table; everything else stands once.
"""

import itertools
import random
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import polars as pl
import pytest

from lake import EpisodeRecord, Lake, ids
from lake.errors import LakeAccessError
from lake.tables import TABLES
from lake.write.ingest import ingest
from lake.write.sources import Report
from testkit.copies import empty_lake
from testkit.episodes import write_lines
from testkit.examples import mostly_slow
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Key, Truth, View, accounted, harm, key, rollouts, view, write_file
from testkit.lake_worker import compact
from testkit.processes import Worker, at_the_gate

BEFORE = 8
OPERATIONS = ["compact", "vacuum", "retract", "forget"]


def filled(lk: Lake, folder: Path, rng: random.Random, truth: Truth) -> list[EpisodeRecord]:
    """Episodes that are there before the writers come, in small commits, and twice as leftovers of killed writers."""
    records = rollouts(rng, "before", BEFORE)
    file, _ = write_file(folder / "before.jsonl", records, rng)
    for point in ("commit:steps", "commit:episodes"):
        worker = Worker("ingest", lk.uri, file, "run", BEFORE, faults=f"{point} 1 before kill")
        at_the_gate(worker)
        assert worker.wait() == -9
    ingest(lk, file, run_id="run", batch_size=3)
    truth.took(records)
    return records


def targets(lk: Lake, rng: random.Random) -> dict[Key, int]:
    """Some of the episodes that are there: key -> id."""
    rows = lk.scan("episodes").select("task_id", "rollout_index", "attempt", "episode_id").collect().sort("task_id")
    return {(task, rollout, attempt): number for task, rollout, attempt, number in rng.sample(rows.rows(), 4)}


def writers(lk: Lake, folder: Path, rng: random.Random, truth: Truth, shared: list[EpisodeRecord]) -> list[Worker]:
    """Four processes; their files hold what is new, and some rows of the lake."""
    started = []
    for number in range(4):
        records = rollouts(rng, f"writer {number}", 5) + rng.sample(shared, 3)
        rng.shuffle(records)
        truth.offer(records)
        file, _ = write_file(folder / f"writer{number}.jsonl", records, rng)
        started.append(Worker("ingest", lk.uri, file, "run", rng.randint(2, 5)))
    return started


def looked_at(lk: Lake, truth: Truth, maybe_gone: dict[Key, int], faults: Faults) -> View:
    """Nothing half visible; what was visible stays, unless it is being taken away."""
    try:
        state = view(lk.snapshot())
    except (FileNotFoundError, LakeAccessError):
        # `forget` deletes files at once, from under anyone who reads an older version: the newest is whole.
        state = view(lk.snapshot())
    expected = Truth(truth.offered, {name: text for name, text in truth.stands.items() if name not in maybe_gone})
    faults.found(harm(state, expected))
    truth.saw(state)
    return state


def killed_again_and_again(
    lk: Lake, operation: str, episode_ids: list[int], busy: list[Worker], rng: random.Random, faults: Faults
) -> None:
    """Run an operation next to the writers until they are done, and kill it each time, somewhere."""
    while any(worker.running for worker in busy):
        forced = f"commit {rng.randint(1, 6)} {rng.choice(['before', 'after'])} kill" if rng.random() < 0.5 else ""
        worker = Worker("maintain", lk.uri, operation, *episode_ids, faults=forced)
        at_the_gate(worker)
        time.sleep(rng.random() * 0.5)
        if worker.kill():
            faults.inject(f"{operation} killed next to 4 writers")


def holding(lk: Lake, episode_ids: list[int]) -> list[str]:
    """Data files of the lake, live or not, with rows of some episodes; torn ones cannot be read by anybody."""
    texts = []
    for name, table in TABLES.items():
        # Who was forgotten is remembered in `retractions`; what they were is not.
        if "episode_id" in table.names and name != "retractions":
            for file in Path(lk.uri, name).rglob("*.parquet"):
                with suppress(pl.exceptions.ComputeError):
                    rows = pl.read_parquet(file)
                    # That a forgotten episode came again is remembered, too, without its text.
                    rows = rows.filter(pl.col("reason") != "forgotten") if name == "rejects" else rows
                    if rows["episode_id"].is_in(episode_ids).any():
                        texts.append(f"{name}/{file.name}")
    return texts


@pytest.mark.parametrize("operation", mostly_slow(OPERATIONS, "compact"))
@seeded()
def test_maintenance_killed_beside_four_writers(tmp_path: Path, seed: int, operation: str) -> None:
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    before = filled(lk, tmp_path, rng, truth)
    lk.name_snapshot("before")
    state = view(lk.at("before"))
    victims = targets(lk, rng) if operation in ("retract", "forget") else {}
    busy = writers(lk, tmp_path, rng, truth, before)
    with Faults() as faults:
        at_the_gate(*busy)
        killed_again_and_again(lk, operation, list(victims.values()), busy, rng, faults)
        for worker in busy:
            worker.finish()
        looked_at(lk, truth, victims, faults)
        last = Worker("maintain", lk.uri, operation, *victims.values())
        at_the_gate(last)
        last.finish()
        current_state = view(lk.snapshot())
        faults.found(harm(current_state, truth, erased=victims))
        assert set(current_state.episodes) == set(truth.offered) - set(victims)
        accounted(lk)
        if operation == "forget":
            assert holding(lk, list(victims.values())) == []
        else:
            assert view(lk.at("before")) == state
        assert {key(record) for record in before} - set(victims) <= set(current_state.episodes)


@pytest.mark.parametrize("step", [1, -1], ids=["ids that grow", "ids that fall"])
def test_forgotten_episodes_do_not_come_back(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken back first, then forgotten, then compacted: of the two rows that say so, the tombstone must stay.

    No matter what the order of the write_ids, which are random.
    """
    numbers = itertools.count(2**40, step)
    monkeypatch.setattr(ids, "fresh_id", lambda: next(numbers))
    lk = empty_lake(tmp_path / "lake")
    records = rollouts(random.Random(0), "before", 4)
    lk.append(records, run_id="run")
    episode_ids = lk.scan("episodes").collect()["episode_id"].to_list()
    lk.retract(episode_ids)
    lk.forget(episode_ids)
    compact(lk)
    worker = Worker("ingest", lk.uri, write_lines(tmp_path / "again.jsonl", records), "run", 4)
    at_the_gate(worker)
    report = msgspec.json.decode(worker.finish(), type=Report)
    assert (report.new, report.rejected) == (0, 4)
    assert view(lk.snapshot()).episodes == {}


@pytest.mark.slow("Writers lose nothing beside compaction, vacuum, retraction and erasure at once.")
@pytest.mark.parametrize("seed", range(6))
def test_all_of_it_at_once(tmp_path: Path, seed: int) -> None:
    """Every operation in turn next to the writers, none of them killed: anyone who loses a race runs again."""
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    before = filled(lk, tmp_path, rng, truth)
    victims = targets(lk, rng)
    retracted, forgotten = dict(list(victims.items())[:2]), dict(list(victims.items())[2:])
    busy = writers(lk, tmp_path, rng, truth, before)
    with Faults() as faults:
        at_the_gate(*busy)
        faults.inject("compact, vacuum, retract and forget at once next to 4 writers")
        at_work = [
            Worker("maintain", lk.uri, "compact"),
            Worker("maintain", lk.uri, "vacuum"),
            Worker("maintain", lk.uri, "retract", *retracted.values()),
            Worker("maintain", lk.uri, "forget", *forgotten.values()),
        ]
        at_the_gate(*at_work)
        while any(worker.running for worker in (*busy, *at_work)):
            looked_at(lk, truth, victims, faults)
            time.sleep(0.2)  # they need the machine, too
        for worker in (*busy, *at_work):
            worker.finish()
        faults.found(harm(view(lk.snapshot()), truth, erased=victims))
        assert holding(lk, list(forgotten.values())) == []
        accounted(lk)


@seeded()
def test_writers_that_compact_by_themselves_killed_and_run_again(tmp_path: Path, seed: int) -> None:
    """Several at once; anyone who ends a job merges what has become many small files, and some are killed at it."""
    rng = random.Random(seed)
    lk, truth = empty_lake(tmp_path / "lake"), Truth()
    with Faults() as faults:
        for number in range(2 if seed else 1):
            files, busy = [], []
            for writer in range(4 if seed else 3):
                records = rollouts(rng, f"round {number}, writer {writer}", 4)
                files.append(write_file(tmp_path / f"{number}-{writer}.jsonl", records, rng)[0])
                truth.offer(records)
                dies = rng.choice(["", "", "commit {} before kill;", "commit {} after kill;"]).format(
                    rng.randint(1, 14)
                )
                busy.append(Worker("ingest", lk.uri, files[-1], "run", 3, faults=f"{dies}auto 4"))
            at_the_gate(*busy)
            time.sleep(rng.random())
            busy[0].kill()
            killed = [worker.wait() for worker in busy].count(-9)
            faults.inject("writer that compacts killed next to others", killed)
            looked_at(lk, truth, {}, faults)
            for file in files:
                again = Worker("ingest", lk.uri, file, "run", 5, faults="auto 4")
                at_the_gate(again)
                again.finish()
        state = looked_at(lk, truth, {}, faults)
        assert set(state.episodes) == set(truth.offered)
        assert any(entry.clean_since for entry in lk.snapshot().entries("steps")), "nobody compacted anything"
        accounted(lk)
