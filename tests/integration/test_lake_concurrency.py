"""Many writers on one lake: processes and threads, creators and readers, each without knowledge of the others.

Races over the same records are in test_lake_faults_writers.

1. Nothing is lost and nothing is written twice.
2. A lake may be created by several processes at the same moment.
3. A snapshot is consistent: all that a row in it refers to is in it too, however the tables move while it is taken.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

import lake
from lake.tables import RESOLUTION_ORDER
from testkit.copies import copied
from testkit.episodes import assert_same, assert_whole, contents, episode
from testkit.examples import mostly_slow
from testkit.full_lake import add_round
from testkit.processes import Worker, at_the_gate


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    workers = [Worker("record", lk.uri, f"worker {n}", 3, 3) for n in range(3)]
    at_the_gate(*workers)
    episodes = []
    while any(worker.running for worker in workers):
        episodes.append(assert_whole(lk.snapshot()))
        time.sleep(0.1)  # the workers need the machine, too
    for worker in workers:
        worker.finish()
    assert episodes == sorted(episodes)
    assert assert_whole(lk.snapshot()) == 3 * 3 * 3
    batches = 3 * 3
    assert len(lk.snapshot().dead_write_ids) <= batches, "a batch that lost three races goes to the committer, once"
    new = lk.sql("SELECT job_id, count(*) AS n, sum(value) AS new FROM metrics GROUP BY job_id")
    assert (new["n"].to_list(), new["new"].to_list()) == ([3] * 3, [9.0] * 3)
    assert lk.sql("SELECT status FROM job_runs")["status"].to_list() == ["succeeded"] * 3


def test_creators_of_one_lake_all_find_it_whole(tmp_path: Path) -> None:
    uris = [str(tmp_path / f"lake{n}") for n in range(3)]
    workers = [Worker("create", *uris) for _ in range(3)]
    for _ in uris:
        at_the_gate(*workers)
    for worker in workers:
        worker.finish()
    for uri in uris:
        lk = lake.open(uri)
        assert assert_whole(lk.snapshot()) == 3
        written = {name for name, version in lk.snapshot().versions.items() if version != -1}
        assert written == {"episodes", "steps", "jobs"}
        assert {path.name for path in Path(uri).iterdir()} == written | {"_trajlake"}


@pytest.mark.parametrize("name", mostly_slow(["episodes", "steps"], "steps"))
def test_writers_that_both_find_a_table_missing_both_write(tmp_path: Path, name: str) -> None:
    """Each is held when it has looked and is about to make the table; `episodes` is made with the lake."""
    uri = tmp_path / "lake"
    workers = [Worker("record", uri, f"worker {n}", 2, 2, faults=f"create:{name} 1 before hold") for n in range(2)]
    if name != "episodes":
        at_the_gate(*workers)
    for worker in workers:
        assert worker.hear() == f"before create:{name}"
    for worker in workers:
        worker.go()
    if name == "episodes":
        at_the_gate(*workers)
    for worker in workers:
        worker.finish()
    lk = lake.open(uri)
    assert assert_whole(lk.snapshot()) == 8
    assert lk.sql("SELECT count(*), sum(value) FROM metrics").row(0) == (4, 8.0)
    assert lk.sql("SELECT status FROM job_runs")["status"].to_list() == ["succeeded"] * 2
    assert lk.snapshot().dead_write_ids == frozenset()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run a function in threads that start together; what one raises is raised here."""
    gate = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("shared", [True, False], ids=["one Lake", "a Lake each"])
def test_threads_that_record_overlapping_episodes_write_them_once(tmp_path: Path, shared: bool) -> None:
    first = lake.open(tmp_path / "lake", create=True)

    def work(number: int) -> None:
        lk = first if shared else lake.open(first.uri)
        with lk.job(kind="collect", run_id="run") as job:
            for start in range(0, 12, 3):
                job.record([episode("task", start + number + index) for index in range(4)])
                assert_whole(lk.snapshot())

    in_threads(4, work)
    assert assert_whole(first.snapshot()) == 16
    again = lake.open(first.uri)
    with again.job(kind="collect", run_id="run") as job:
        assert job.record([episode("task", index) for index in range(16)]).present == 16


def test_what_one_thread_learns_of_the_lake_another_does_not_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads share an index of what is present. One is held while it brings it up to date; the other writes.

    Had the other been let in, the first would continue with an index that does not hold what the other wrote.
    """
    lk, second = lake.open(tmp_path / "lake", create=True), lake.open(tmp_path / "lake")
    with second.job(kind="collect", run_id="run") as job:
        job.record([episode("before")])
    entered, written = threading.Event(), threading.Event()
    concat = pl.concat

    def wait_and_concat(items: list[pl.DataFrame], **options: object) -> pl.DataFrame:
        entered.set()
        # Let in, the second thread is done long before this; locked out, it waits for us.
        written.wait(timeout=0.5)
        return concat(items, **options)

    def work(number: int) -> None:
        with lk.job(kind="collect", run_id="run") as job:
            if number == 0:
                monkeypatch.setattr(pl, "concat", wait_and_concat)
                job.record([episode("first")])
            else:
                entered.wait()
                monkeypatch.undo()
                job.record([episode("second")])
                job.record([episode("second", 1)])
                written.set()

    in_threads(2, work)
    with lk.job(kind="collect", run_id="run") as job:
        counts = job.record([episode("before"), episode("first"), episode("second"), episode("second", 1)])
    assert (counts.new, counts.present) == (0, 4)
    assert assert_whole(lk.snapshot()) == 4


def test_a_thread_that_reads_never_disturbs_one_that_writes(tmp_path: Path) -> None:
    """They share handles: a snapshot moves the writer's handle on between its check and its commit."""
    lk = lake.open(tmp_path / "lake", create=True)
    second = lake.open(tmp_path / "lake")
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            while not done.wait(0.01):
                lk.snapshot()
            return
        with (lk if number == 1 else second).job(kind="collect", run_id="run") as job:
            for index in range(3):
                assert job.record([episode(f"task {number}", index)]).new == 1
        if number == 1:
            done.set()

    in_threads(3, work)
    assert assert_whole(lk.snapshot()) == 6


DANGLING = {
    "advantages without their step": "SELECT 1 FROM advantages ANTI JOIN steps USING (episode_id, step_index)",
    "scores without their step": "SELECT 1 FROM scores ANTI JOIN steps USING (episode_id, step_index)",
    "rows without their job": (
        "SELECT 1 FROM (SELECT job_id FROM advantages UNION ALL SELECT job_id FROM scores UNION ALL SELECT job_id"
        " FROM batches UNION ALL SELECT job_id FROM metrics UNION ALL SELECT job_id FROM checkpoints)"
        " ANTI JOIN jobs USING (job_id)"
    ),
    "batches without their episode": "SELECT 1 FROM batches ANTI JOIN episodes USING (episode_id)",
    "credit jobs with a part of their rows": (
        "SELECT 1 FROM job_runs LEFT JOIN (SELECT job_id, count(*) AS n FROM advantages GROUP BY 1) USING (job_id)"
        " WHERE kind = 'credit' AND coalesce(n, 0) <> CASE status WHEN 'succeeded' THEN 4 ELSE 0 END"
    ),
}


def assert_consistent(snapshot: lake.Snapshot) -> None:
    """Nothing in the snapshot points outside of it."""
    assert_whole(snapshot)
    with snapshot.session() as session:
        for fault, query in DANGLING.items():
            assert session.query(query).is_empty(), fault


@pytest.mark.parametrize("moving", mostly_slow(RESOLUTION_ORDER, "episodes"))
def test_a_snapshot_is_consistent_when_a_round_is_written_between_two_tables(
    tmp_path: Path, moving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole round commits in the middle of `snapshot()`, just before one table is resolved."""
    lk = copied("one round", lambda template: add_round(lake.open(template, create=True), 0), tmp_path / "lake")
    writer = lake.open(tmp_path / "lake")
    per_round = lk.scan("episodes").collect().height
    resolve = lk._store.read_log

    def files_after_a_round(name: str, version: int | None = None) -> object:
        if name == moving:
            add_round(writer, 1)
        return resolve(name, version)

    monkeypatch.setattr(lk._store, "read_log", files_after_a_round)
    snapshot = lk.snapshot()
    monkeypatch.undo()
    assert_consistent(snapshot)
    assert_same(contents(lk.at(snapshot.versions)), contents(snapshot))
    assert_consistent(lk.snapshot())
    assert lk.snapshot().scan("episodes").collect().height == 2 * per_round


def test_snapshots_are_consistent_while_another_thread_writes(tmp_path: Path) -> None:
    lk, writer = lake.open(tmp_path / "lake", create=True), lake.open(tmp_path / "lake")
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            for turn in range(2):
                add_round(writer, turn)
            done.set()
        while not done.wait(0.1):  # the writer needs the machine, too
            assert_consistent(lk.snapshot())

    in_threads(2, work)
    of_a_round = lk.scan("episodes").filter(pl.col("task_id") == "task 0").collect().height
    assert assert_whole(lk.snapshot()) == 2 * of_a_round
