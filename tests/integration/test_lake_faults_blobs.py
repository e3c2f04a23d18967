"""Payloads that several episodes share, while some of those are forgotten and others arrive.

A blob goes with the last episode that refers to it, and no episode is ever left without one: neither in the process
that wrote it before, nor when it arrives while `forget` is at work.
"""

import random
from pathlib import Path

import pytest

import lake
from lake import EpisodeRecord, Lake
from testkit.copies import empty_lake
from testkit.episodes import episode, write_lines
from testkit.examples import mostly_slow
from testkit.fault_log import Faults, Harm, seeded
from testkit.processes import Worker, at_the_gate


def with_payload(task: str, number: int) -> EpisodeRecord:
    """An episode with a payload too big for a row, the same for the same number."""
    return episode(task, tools=[{"description": random.Random(number).randbytes(40_000).hex()}])


def payloads(lk: Lake, faults: Faults) -> set[int]:
    """Blobs that visible episodes refer to; each is there, once."""
    snapshot = lk.snapshot()
    blob_ids = snapshot.scan("episodes").select("blob_ids").collect()["blob_ids"].explode().drop_nulls().to_list()
    have = snapshot.scan("blobs").select("blob_id").collect()["blob_id"].to_list()
    faults.found(Harm(lost=len(set(blob_ids) - set(have)), duplicated=len(have) - len(set(have))))
    return set(blob_ids)


def id_of(lk: Lake, task: str) -> list[int]:
    """The id of a task's only episode."""
    return lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [task])["episode_id"].to_list()


def test_a_payload_comes_again_after_its_episode_was_forgotten(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    with Faults() as faults:
        lk.append([with_payload("one", 1)], run_id="run")
        (blob,) = payloads(lk, faults)
        lk.forget(id_of(lk, "one"))
        assert lk.scan("blobs").collect().is_empty()
        faults.inject("shared payload written again after its episode was forgotten")
        lk.append([with_payload("two", 1)], run_id="run")
        assert payloads(lk, faults) == {blob}


@pytest.mark.parametrize(
    "point",
    mostly_slow(
        ["write:episodes", "commit:episodes", "write:steps", "write:blobs", "commit:blobs"],
        "commit:episodes",
    ),
)
def test_a_payload_comes_again_while_its_episode_is_being_forgotten(tmp_path: Path, point: str) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([with_payload("one", 1)], run_id="run")
    lk.append([with_payload("other", 2)], run_id="run")
    worker = Worker("maintain", lk.uri, "forget", *id_of(lk, "one"), faults=f"{point} 1 before hold")
    at_the_gate(worker)
    report = worker.hear()
    with Faults() as faults:
        faults.inject("shared payload written while its episode is being forgotten")
        lake.open(lk.uri).append([with_payload("two", 1)], run_id="run")
        if report is not None:
            worker.go()
        worker.finish()
        assert len(payloads(lk, faults)) == 2


@pytest.mark.parametrize("point", mostly_slow(["commit:blobs", "commit:steps", "commit:episodes"], "commit:episodes"))
def test_a_writer_of_the_same_payload_is_held_while_it_is_forgotten(tmp_path: Path, point: str) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([with_payload("one", 1)], run_id="run")
    file = write_lines(tmp_path / "file.jsonl", [with_payload("two", 1)])
    worker = Worker("ingest", lk.uri, file, "run", 4, faults=f"{point} 1 before hold")
    at_the_gate(worker)
    assert worker.hear() == f"before {point}"
    with Faults() as faults:
        faults.inject("shared payload written while its episode is being forgotten")
        lk.forget(id_of(lk, "one"))
        worker.go()
        worker.finish()
        assert len(payloads(lk, faults)) == 1


def test_the_file_of_a_writer_who_came_later_is_left_alone(tmp_path: Path) -> None:
    """It is committed next: a reader would find it named and missing until the writer repairs it."""
    lk = empty_lake(tmp_path / "lake")
    lk.append([with_payload("one", 1)], run_id="run")
    forget = Worker("maintain", lk.uri, "forget", *id_of(lk, "one"), faults="commit:blobs 1 after hold")
    at_the_gate(forget)
    assert forget.hear() == "after commit:blobs"
    before = set((tmp_path / "lake/blobs").glob("*.parquet"))
    file = write_lines(tmp_path / "file.jsonl", [with_payload("two", 2)])
    writer = Worker("ingest", lk.uri, file, "run", 4, faults="commit:blobs 1 before hold")
    at_the_gate(writer)
    assert writer.hear() == "before commit:blobs"
    (waiting,) = set((tmp_path / "lake/blobs").glob("*.parquet")) - before
    with Faults() as faults:
        faults.inject("payload written between the steps of a forget")
        forget.go()
        forget.finish()
        assert waiting.exists()
        writer.go()
        writer.finish()
        assert len(payloads(lk, faults)) == 1


@seeded(5)
def test_shared_payloads_beside_writers_and_forget(tmp_path: Path, seed: int) -> None:
    """Writers share four payloads while episodes that have them are forgotten, one after the other."""
    rng = random.Random(seed)
    lk = empty_lake(tmp_path / "lake")
    lk.append([with_payload(f"before {n}", n) for n in range(4)], run_id="run")
    workers = []
    writers, forgotten = (3, 4) if seed else (2, 2)
    for writer in range(writers):
        records = [with_payload(f"writer {writer}.{n}", rng.randrange(4)) for n in range(4)]
        file = write_lines(tmp_path / f"{writer}.jsonl", records)
        workers.append(Worker("ingest", lk.uri, file, "run", 2))
    with Faults() as faults:
        at_the_gate(*workers)
        for number in range(forgotten):
            lk.forget(id_of(lk, f"before {number}"))
            faults.inject("forget next to writers that share its payloads")
            payloads(lk, faults)
        for worker in workers:
            worker.finish()
        payloads(lk, faults)
        assert lk.scan("episodes").collect().height == 4 * writers + 4 - forgotten
