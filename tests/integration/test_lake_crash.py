"""Ingest killed at any moment, raced and run again: the lake shows what an undisturbed run would have written.

1. Nothing half visible: every snapshot taken while processes write and die holds whole episodes only.
2. Nothing lost, nothing twice: after the same command ran to its end, the visible contents are those of an undisturbed
   run, whatever was killed before, with whatever batch size.
3. Everything accounted for: records in = new + already present + rejects, in every report.

The processes are real, and killed with SIGKILL.
"""

import random
import time
from pathlib import Path

import msgspec
import polars as pl
import pytest

import lake
from lake import EpisodeRecord
from lake.ingest import Report, ingest
from testkit.episodes import assert_same, assert_whole, contents, episode, line, write_lines
from testkit.processes import Worker, at_the_gate

SEED = 20260101
RECORDS = 80


def source(path: Path, tasks: range) -> Path:
    """A file of four siblings a task, with bad lines, repeats and conflicts among them, and a last line that is cut."""
    items: list[EpisodeRecord | bytes] = []
    for task in tasks:
        items += [episode(f"task {task}", index, steps=1 + task % 3, tokens=task % 2 == 0) for index in range(4)]
        if task % 5 == 0:
            items += [b'{"task_id": "no steps"}\n', b"not JSON\n", line(episode(f"task {task}", 0, steps=1 + task % 3))]
    items += [episode(f"task {tasks[1]}", 0, steps=7), episode(f"task {tasks[0]}", 9, steps=30), b'{"task_id": "cut']
    return write_lines(path, items)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("source") / "source.jsonl", range(RECORDS // 4))


@pytest.fixture(scope="module")
def undisturbed(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    lk = lake.open(tmp_path_factory.mktemp("undisturbed") / "lake", create=True)
    report = ingest(lk, file, run_id="run", batch_size=64)
    assert (report.records, report.new, report.present, report.rejected) == (RECORDS + 15, RECORDS + 1, 2, 12)
    return contents(lk.snapshot())


@pytest.fixture(scope="module")
def seconds(file: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long an undisturbed run takes from the gate to its end, here and now."""
    worker = Worker("ingest", tmp_path_factory.mktemp("timed") / "lake", file, "run", 8)
    at_the_gate(worker)
    began = time.monotonic()
    worker.finish()
    return time.monotonic() - began


def accounted(report: Report) -> None:
    assert report.records == report.new + report.present + report.rejected


def holds_part_of(lk: lake.Lake, whole: dict[str, pl.DataFrame]) -> int:
    """Everything visible is whole, and is in the undisturbed lake; the number of episodes."""
    snapshot = lk.snapshot()
    for name, frame in contents(snapshot).items():
        assert frame.join(whole[name], on=frame.columns[:2], how="anti", nulls_equal=True).is_empty()
    return assert_whole(snapshot)


def finished(lk: lake.Lake, file: Path, batch_size: int, undisturbed: dict[str, pl.DataFrame]) -> None:
    """The same file once more, to the end."""
    present = lk.scan("episodes").collect().height
    report = ingest(lk, file, run_id="run", batch_size=batch_size)
    accounted(report)
    assert report.new == undisturbed["episodes"].height - present
    assert_same(contents(lk.snapshot()), undisturbed)


def kill_at(moment: float, uri: Path, file: Path, undisturbed: dict[str, pl.DataFrame], batch_size: int) -> int:
    """Kill an ingest some seconds after its start, look, and run it to its end; episodes seen after the kill."""
    worker = Worker("ingest", uri, file, "run", 8)
    at_the_gate(worker)
    time.sleep(moment)
    worker.kill()
    # Nobody may have made the lake yet; whoever comes next does.
    lk = lake.open(uri, create=True)
    seen = holds_part_of(lk, undisturbed)
    finished(lk, file, batch_size, undisturbed)
    return seen


def moments(count: int) -> list[float]:
    """One random share of the run in each of `count` equal parts of it."""
    rng = random.Random(SEED)
    return [(part + rng.random()) / count for part in range(count)]


def test_killed_at_ten_moments_spread_over_the_run(
    tmp_path: Path, file: Path, undisturbed: dict[str, pl.DataFrame], seconds: float
) -> None:
    batch_sizes = [3, 50, 8, 16, 512, 64, 100, 20, 30, 8]
    seen = [
        kill_at(share * seconds, tmp_path / f"lake{n}", file, undisturbed, batch_sizes[n])
        for n, share in enumerate(moments(10))
    ]
    assert len(set(seen)) > 2, f"the kills did not hit different places: {seen}"


@pytest.mark.slow
def test_killed_at_forty_moments_spread_over_the_run(
    tmp_path: Path, file: Path, undisturbed: dict[str, pl.DataFrame], seconds: float
) -> None:
    rng = random.Random(SEED)
    for n, share in enumerate(moments(40)):
        kill_at(share * seconds, tmp_path / f"lake{n}", file, undisturbed, rng.randint(1, 60))


PLACES = [
    ("create", 1, "before"),
    ("append:jobs", 1, "after"),
    ("append:tokens", 1, "after"),
    ("append:steps", 3, "before"),
    ("append:rejects", 1, "after"),
    ("append_episodes", 1, "before"),
    ("append_episodes", 4, "before"),
    ("append_episodes", 4, "after"),
    ("append:jobs", 2, "before"),
    ("append:jobs", 2, "after"),
]
"""Between any two commits of an ingest: a method of the store, which of its calls, and on which side of it to die."""


@pytest.mark.parametrize(("place", "number", "when"), PLACES)
def test_killed_between_two_commits(
    tmp_path: Path, file: Path, undisturbed: dict[str, pl.DataFrame], place: str, number: int, when: str
) -> None:
    uri = tmp_path / "lake"
    worker = Worker("crash", uri, file, "run", 20, place, number, when)
    at_the_gate(worker)
    _, error = worker.process.communicate(timeout=60)
    assert worker.process.returncode == -9, error
    lk = lake.open(uri, create=True)
    seen = holds_part_of(lk, undisturbed)
    if place == "append_episodes":
        assert (seen > 0) == (number > 1 or when == "after")
        dead = lk.snapshot().dead_write_ids
        assert len(dead) == (when == "before"), "children without their episodes are dead, and nothing else is"
    finished(lk, file, 33, undisturbed)


def test_killed_again_and_again(tmp_path: Path, file: Path, undisturbed: dict[str, pl.DataFrame]) -> None:
    """Each attempt dies one batch later, with another batch size, between children and episodes."""
    lk = lake.open(tmp_path / "lake", create=True)
    seen = [0]
    for batch_size in (10, 25, 9):
        worker = Worker("crash", lk.uri, file, "run", batch_size, "append_episodes", 2, "before")
        at_the_gate(worker)
        worker.process.communicate(timeout=60)
        seen.append(holds_part_of(lk, undisturbed))
    assert seen == sorted(set(seen)), "every attempt got one batch further"
    assert len(lk.snapshot().dead_write_ids) == 3
    finished(lk, file, 13, undisturbed)
    finished(lk, file, 29, undisturbed)


def watched(lk: lake.Lake, workers: list[Worker]) -> int:
    """Take snapshots until all workers are done; how many were taken of an unfinished lake."""
    sizes = []
    while any(worker.running for worker in workers):
        snapshot = lk.snapshot()
        sizes.append(assert_whole(snapshot))
        assert_same({"steps": snapshot.scan("steps").collect()}, {"steps": snapshot.scan("steps").collect()})
    assert sizes == sorted(sizes), "what was visible stays visible"
    return len(set(sizes))


def race(tmp_path: Path, *, killed: bool) -> None:
    """Two overlapping files, three processes, three batch sizes; then what is missing, if some were killed."""
    one, two = source(tmp_path / "one.jsonl", range(24)), source(tmp_path / "two.jsonl", range(12, 36))
    alone = lake.open(tmp_path / "alone", create=True)
    for file in (one, two):
        ingest(alone, file, run_id="run")
    expected = contents(alone.snapshot())
    lk = lake.open(tmp_path / "lake", create=True)
    workers = [Worker("ingest", lk.uri, file, "run", size) for file, size in ((one, 6), (two, 9), (one, 11))]
    at_the_gate(*workers)
    if killed:
        time.sleep(0.2)
        workers[0].kill()
    watched(lk, workers)
    reports = [msgspec.json.decode(worker.finish(), type=Report) for worker in workers[killed:]]
    for report in reports:
        accounted(report)
    if killed:
        ingest(lk, one, run_id="run", batch_size=17)
    else:
        assert sum(report.new for report in reports) == expected["episodes"].height
        assert sum(report.steps for report in reports) == expected["steps"].height
    assert_same(contents(lk.snapshot()), expected)


def test_two_overlapping_files_raced_by_three_processes(tmp_path: Path) -> None:
    race(tmp_path, killed=False)


def test_the_race_with_one_process_killed(tmp_path: Path) -> None:
    race(tmp_path, killed=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_the_race_ten_times(tmp_path: Path, number: int) -> None:
    race(tmp_path, killed=number % 2 == 1)


def test_every_snapshot_during_an_ingest_is_whole(tmp_path: Path, file: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    worker = Worker("ingest", lk.uri, file, "run", 8)
    at_the_gate(worker)
    assert watched(lk, [worker]) > 3, "the ingest was over before anybody looked"
    worker.finish()
