"""Ingest killed next to each of its commits and run again: the lake shows what an undisturbed run would have written.

1. Nothing half visible: every snapshot taken in the meantime holds whole episodes only.
2. Nothing lost, nothing twice: after the same command ran to its end, the visible contents are those of an undisturbed
   run, no matter what was killed before, with any batch size.
3. Everything accounted for: records in = new + already present + rejects, in every report.

The processes are real, and killed with SIGKILL. Kills at random moments, followed by other content, are in
test_lake_faults_kills; races in test_lake_faults_writers.
"""

import json
from pathlib import Path

import polars as pl
import pytest

import lake
from lake import EpisodeRecord
from lake.write.ingest import ingest
from testkit.episodes import assert_same, assert_whole, contents, episode, line, write_lines
from testkit.fault_log import Faults
from testkit.processes import Worker, at_the_gate

RECORDS = 40


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
    assert (report.records, report.new, report.present, report.rejected) == (RECORDS + 9, RECORDS + 1, 1, 7)
    return contents(lk.snapshot())


def holds_part_of(lk: lake.Lake, frames: dict[str, pl.DataFrame]) -> int:
    """Everything visible is whole, and is in the undisturbed lake; the number of episodes."""
    snapshot = lk.snapshot()
    for name, frame in contents(snapshot).items():
        assert frame.join(frames[name], on=frame.columns[:2], how="anti", nulls_equal=True).is_empty()
    return assert_whole(snapshot)


def finished(lk: lake.Lake, file: Path, batch_size: int, undisturbed: dict[str, pl.DataFrame]) -> None:
    """The same file again, to the end."""
    present = lk.scan("episodes").collect().height
    report = ingest(lk, file, run_id="run", batch_size=batch_size)
    assert report.records == report.new + report.present + report.rejected
    assert report.new == undisturbed["episodes"].height - present
    assert_same(contents(lk.snapshot()), undisturbed)


PLACES = [
    ("create:jobs", 1, "before"),
    ("commit:steps", 3, "before"),
    ("commit:episodes", 4, "before"),
    ("commit:episodes", 4, "after"),
    ("commit:jobs", 2, "before"),
    pytest.param("create:episodes", 1, "before", marks=pytest.mark.slow),
    pytest.param("create:steps", 1, "after", marks=pytest.mark.slow),
    pytest.param("commit:jobs", 1, "after", marks=pytest.mark.slow),
    pytest.param("commit:tokens", 1, "after", marks=pytest.mark.slow),
    pytest.param("write:steps", 2, "after", marks=pytest.mark.slow),
    pytest.param("commit:rejects", 1, "after", marks=pytest.mark.slow),
    pytest.param("commit:episodes", 1, "before", marks=pytest.mark.slow),
    pytest.param("commit:jobs", 2, "after", marks=pytest.mark.slow),
]
"""Between any two steps of an ingest: the place, which of its calls, and on which side of it to die."""


@pytest.mark.parametrize(("point", "number", "when"), PLACES)
def test_killed_between_two_commits(
    tmp_path: Path, file: Path, undisturbed: dict[str, pl.DataFrame], point: str, number: int, when: str
) -> None:
    uri = tmp_path / "lake"
    worker = Worker("ingest", uri, file, "run", 12, faults=f"{point} {number} {when} kill")
    at_the_gate(worker)
    assert worker.wait() == -9, worker.error
    with Faults() as faults:
        faults.inject("kill -9 next to a commit")
        lk = lake.open(uri, create=True)
        fraction = holds_part_of(lk, undisturbed)
        if point == "commit:episodes":
            assert (fraction > 0) == (number > 1 or when == "after")
            dead = lk.snapshot().dead_write_ids
            assert len(dead) == (when == "before"), "children without their episodes are dead, and nothing else is"
        finished(lk, file, 33, undisturbed)


@pytest.mark.slow("An ingest that dies again and again, one batch later each time, is finished by the next one.")
def test_killed_again_and_again(tmp_path: Path, file: Path, undisturbed: dict[str, pl.DataFrame]) -> None:
    """Each attempt dies one batch later, with another batch size, between children and episodes."""
    lk = lake.open(tmp_path / "lake", create=True)
    fractions = [0]
    with Faults() as faults:
        for batch_size in (10, 20, 9):
            worker = Worker("ingest", lk.uri, file, "run", batch_size, faults="commit:episodes 2 before kill")
            at_the_gate(worker)
            assert worker.wait() == -9, worker.error
            faults.inject("kill -9 between the children's commits and the episodes' commit")
            fractions.append(holds_part_of(lk, undisturbed))
        assert fractions == sorted(set(fractions)), "every attempt got one batch further"
        assert len(lk.snapshot().dead_write_ids) == 3
        finished(lk, file, 13, undisturbed)
        finished(lk, file, 29, undisturbed)


@pytest.mark.parametrize("when", ["before", "after"])
def test_siblings_that_share_an_id_are_taken_once_after_a_kill_by_two_at_a_time(tmp_path: Path, when: str) -> None:
    source, agent = tmp_path / "siblings", {"name": "a", "version": "1"}
    source.mkdir()
    for number in range(5):
        steps = [{"step_id": 1, "source": "agent", "message": f"answer {number}"}]
        document = {"schema_version": "ATIF-v1.6", "session_id": "run", "agent": agent, "steps": steps}
        (source / f"{number}.json").write_text(json.dumps(document))
    killed = Worker("ingest", tmp_path / "lake", source, "run", 1, faults=f"commit:episodes 3 {when} kill")
    at_the_gate(killed)
    assert killed.wait() == -9, killed.error
    others = [Worker("ingest", tmp_path / "lake", source, "run", size) for size in (1, 2)]
    at_the_gate(*others)
    assert [worker.wait() for worker in others] == [0, 0], [worker.error for worker in others]
    lk = lake.open(tmp_path / "lake")
    for _ in range(2):
        report = ingest(lk, source, run_id="run")
        assert (report.new, report.present, report.rejected) == (0, 5, 0)
    assert assert_whole(lk.snapshot()) == 5
    assert lk.sql("SELECT count(DISTINCT action) FROM steps").item() == 5
