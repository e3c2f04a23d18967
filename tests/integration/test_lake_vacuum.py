"""Vacuum: what no one can see any more leaves the disk, and nothing that a pin, the last week or a writer needs."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

import lake
from lake import Lake
from lake.care.maintenance import Vacuumed
from lake.errors import ConflictError, LakeAccessError, UsageError
from lake.storage.commits import CommitLostError
from lake.tables import TABLES
from lake.write.jobs import Job
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode
from testkit.examples import mostly_slow
from testkit.full_lake import OnPurposeError, full_lake, give_up, scores
from testkit.moving_clock import MovingClock
from testkit.wording import Wording


class KilledError(Exception):
    """Stands for the death of a process."""


@pytest.fixture
def clock() -> MovingClock:
    return MovingClock()


@pytest.fixture
def lk(tmp_path: Path, clock: MovingClock) -> Lake:
    """Two commits of one episode each."""
    lk = empty_lake(tmp_path / "lake", clock=clock)
    for task in ("a", "b"):
        lk.append([episode(task, tokens=True)], run_id="run")
    return lk


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with rows in every table; copy it to write to it."""
    return Path(full_lake(tmp_path_factory.mktemp("full") / "lake").uri)


def vacuum(lk: Lake, **options: Any) -> dict[str, Vacuumed]:
    return {done.table: done for done in lk.vacuum(**options)}


def deleted(lk: Lake, **options: Any) -> dict[str, int]:
    """Files that a vacuum deletes, by table."""
    return {name: done.deleted_files for name, done in vacuum(lk, **options).items() if done.deleted_files}


def data_files(lk: Lake, name: str) -> set[str]:
    return {path.name for path in (Path(lk.uri) / name).glob("*.parquet")}


def compact(lk: Lake, *names: str) -> None:
    for name in names or TABLES:
        lk.compact(name)


def dead_write(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children whose writer died before their episodes."""

    def dead(*_: Any, **__: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(lk._store, "append_episodes", dead)
        with pytest.raises(KilledError):
            lk.append([episode("dead", tokens=True)], run_id="run")


# ---------------------------------------------------------------- what goes, and when


def test_a_lake_with_nothing_to_delete_stays_as_it_is(lk: Lake, clock: MovingClock) -> None:
    clock.forward(days=40)
    before = lk.snapshot().versions
    assert deleted(lk) == {}
    assert lk.snapshot().versions == before


def test_files_that_compaction_replaced_go_after_a_week(lk: Lake, clock: MovingClock) -> None:
    expected = contents(lk.snapshot())
    old = data_files(lk, "steps")
    compact(lk, "steps", "jobs")
    clock.forward(days=6.9)
    assert deleted(lk) == {}
    clock.forward(days=0.2)
    assert deleted(lk) == {"steps": 2, "jobs": 4}
    assert not old & data_files(lk, "steps")
    assert_same(contents(lk.snapshot()), expected)
    assert deleted(lk) == {}


def test_the_last_weeks_versions_stay_readable(lk: Lake, clock: MovingClock) -> None:
    clock.forward(days=30)
    moment = clock()
    lk.append([episode("c", tokens=True)], run_id="run")
    clock.forward(days=6)
    compact(lk)
    lk.vacuum()
    for when, count in ((moment, 2), (clock(), 3)):
        assert assert_whole(lk.at(when)) == count
    assert assert_whole(lk.at(2)) == 2


def test_orphans_go_after_a_week_whatever_they_are_called(lk: Lake, clock: MovingClock) -> None:
    orphans = [Path(lk.uri) / "steps" / name for name in ("part-0.parquet", ".hidden.tmp", "sub/part-1.parquet")]
    for orphan in orphans:
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"half a file")
    assert deleted(lk) == {}
    clock.forward(days=8)
    done = vacuum(lk)["steps"]
    assert (done.deleted_files, done.deleted_bytes) == (3, 33)
    assert not any(orphan.exists() for orphan in orphans)
    assert assert_whole(lk.snapshot()) == 2


def test_dead_writes_are_taken_out_of_the_tables_and_then_off_the_disk(
    lk: Lake, clock: MovingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_write(lk, monkeypatch)
    expected = contents(lk.snapshot())
    assert len(lk.snapshot().dead_write_ids) == 1
    clock.forward(days=6)
    vacuum(lk)
    assert len(lk.snapshot().dead_write_ids) == 1, "its writer may be slow"
    clock.forward(days=2)
    done = vacuum(lk)
    assert {name: report.dead_files for name, report in done.items() if report.dead_files} == {"steps": 1, "tokens": 1}
    assert lk.snapshot().dead_write_ids == frozenset()
    assert len(data_files(lk, "steps")) == 3
    clock.forward(days=8)
    assert deleted(lk) == {"steps": 1, "tokens": 1}
    assert_same(contents(lk.snapshot()), expected)


def test_dead_rows_that_share_a_file_with_live_ones_go_and_those_stay(
    lk: Lake, clock: MovingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tool compacted: it knows nothing of dead writes."""
    dead_write(lk, monkeypatch)
    DeltaTable(Path(lk.uri) / "steps").optimize.compact()
    lk = lake.open(lk.uri, clock=clock)
    expected = contents(lk.snapshot())
    assert lk.snapshot().files("steps")[0].dead
    clock.forward(days=8)
    lk.vacuum()
    assert lk.snapshot().dead_write_ids == frozenset()
    assert_same(contents(lk.snapshot()), expected)


def test_a_dry_run_says_what_would_be_deleted_and_changes_nothing(lk: Lake, clock: MovingClock) -> None:
    compact(lk)
    clock.forward(days=8)
    before = {str(path): path.stat().st_mtime_ns for path in Path(lk.uri).rglob("*")}
    planned = deleted(lk, dry_run=True)
    assert {str(path): path.stat().st_mtime_ns for path in Path(lk.uri).rglob("*")} == before
    assert planned == deleted(lk)
    assert set(planned) == {"episodes", "steps", "tokens", "jobs"}


def test_a_shorter_retention_is_obeyed_and_one_that_would_hurt_readers_refused(
    lk: Lake, clock: MovingClock, wording: Wording
) -> None:
    compact(lk, "steps")
    clock.forward(hours=3)
    with pytest.raises(UsageError, match="retention of 0:59:00 would") as caught:
        lk.vacuum(retention=timedelta(minutes=59))
    assert "valid: an hour or" in wording(caught.value)
    assert deleted(lk, retention=timedelta(hours=4)) == {}
    assert deleted(lk, retention=timedelta(hours=2)) == {"steps": 2}


# ---------------------------------------------------------------- what is pinned


def test_what_a_name_or_a_lease_needs_stays_until_it_is_given_up(lk: Lake, clock: MovingClock) -> None:
    lk.name_snapshot("kept")
    expected = contents(lk.snapshot())
    lk.append([episode("c", tokens=True)], run_id="run")
    leased = lk.snapshot()
    lk.append([episode("d", tokens=True)], run_id="run")
    with lk.lease(leased, "a trainer", timedelta(days=30)):
        compact(lk)
        clock.forward(days=20)
        done = vacuum(lk)
        assert (done["episodes"].deleted_files, done["episodes"].kept_for_pins) == (1, 3)
        assert assert_whole(lake.open(lk.uri).at(leased.versions)) == 3
    assert deleted(lk)["episodes"] == 1
    assert_same(contents(lk.at("kept")), expected)
    lk.drop_snapshot("kept")
    assert deleted(lk)["episodes"] == 2
    assert assert_whole(lk.snapshot()) == 4


def test_a_damaged_pin_stops_it_before_anything_is_deleted(lk: Lake, clock: MovingClock, wording: Wording) -> None:
    lk.name_snapshot("kept")
    compact(lk)
    clock.forward(days=20)
    pin = Path(lk.uri) / "_trajlake" / "snapshots" / "kept.json"
    content = pin.read_bytes()
    pin.write_bytes(content[:-9])
    before = data_files(lk, "steps")
    with pytest.raises(LakeAccessError, match=r"kept\.json is damaged") as caught:
        lk.vacuum()
    assert "restore it or delete" in wording(caught.value)
    assert data_files(lk, "steps") == before
    pin.write_bytes(content)
    lk.vacuum()
    assert assert_whole(lk.at("kept")) == 2


def age(folder: Path, days: float) -> None:
    """Make every file of a lake as old as if it had been written so long ago."""
    then = time.time() - days * 86_400
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def test_a_snapshot_named_40_days_ago_opens_on_every_table(full: Path, tmp_path: Path, clock: MovingClock) -> None:
    """After log clean-up by Delta itself, compaction and vacuum."""
    folder = Path(shutil.copytree(full, tmp_path / "lake"))
    clock.forward(days=-40)
    lake.open(folder, clock=clock).name_snapshot("then")
    named = lake.open(folder).snapshot()
    expected = {name: named.scan(name).collect().sort(table.key) for name, table in TABLES.items()}
    age(folder, 40)
    clock.forward(days=40)
    lk = lake.open(folder, clock=clock)
    with lk.job(kind="more", run_id="run") as job:
        job.record([episode("new", tokens=True)])
    compact(lk)
    age(folder, 35)
    for name in TABLES:
        table = DeltaTable(folder / name)
        table.create_checkpoint()
        table.cleanup_metadata()
    deleted_files = deleted(lake.open(folder, clock=clock))
    assert deleted_files == {"episodes": 1, "steps": 1, "tokens": 1, "jobs": 2}, "what `more` wrote; all else is pinned"
    snapshot = lake.open(folder, clock=clock).at("then")
    with snapshot.session() as session:
        for name, table in TABLES.items():
            assert snapshot.scan(name).collect().sort(table.key).equals(expected[name]), name
            assert session.query(f"SELECT count(*) AS n FROM {name}").item() == expected[name].height
    lk.drop_snapshot("then")
    assert set(deleted(lk)) >= {"episodes", "steps", "tokens", "scores", "jobs"}


def test_with_deltas_own_retention_it_would_not_open(lk: Lake, clock: MovingClock) -> None:
    """What the test above is about: the default forgets versions after 30 days."""
    lk.name_snapshot("then")
    folder = Path(lk.uri) / "steps"
    DeltaTable(folder).alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})
    age(Path(lk.uri), 40)
    table = DeltaTable(folder)
    table.create_checkpoint()
    table.cleanup_metadata()
    with pytest.raises(LakeAccessError, match=r"table `steps` of .* has no version 2"):
        lake.open(lk.uri, clock=clock).at("then")


# ---------------------------------------------------------------- next to writers that stand still


def before_commit(lk: Lake, monkeypatch: pytest.MonkeyPatch, table: str, action: Callable[[], None]) -> None:
    """Let something happen once, when a table's data file is written and no commit names it yet."""
    commit = lk._store._commit

    def stopped(handle: Any, name: str, *args: Any, **options: Any) -> None:
        if name == table:
            monkeypatch.undo()
            action()
        commit(handle, name, *args, **options)

    monkeypatch.setattr(lk._store, "_commit", stopped)


def forty_days_pass(lk: Lake, clock: MovingClock) -> Callable[[], None]:
    """Another process compacts and vacuums twice, weeks apart."""

    def pass_() -> None:
        reader = lake.open(lk.uri, clock=clock)
        for _ in range(2):
            clock.forward(days=20)
            compact(reader, "episodes", "steps", "tokens")
            reader.vacuum()
            assert assert_whole(reader.snapshot()) == 2

    return pass_


@pytest.mark.parametrize("table", mostly_slow(["tokens", "steps", "episodes", "jobs"], "steps"))
def test_a_writer_stopped_between_a_file_and_its_commit_loses_nothing(
    lk: Lake, clock: MovingClock, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At `episodes` its children are committed: the vacuum takes them for a dead writer's."""
    before_commit(lk, monkeypatch, table, forty_days_pass(lk, clock))
    assert lk.append([episode("c", tokens=True), episode("d", tokens=True)], run_id="run").new == 2
    for opened in (lk, lake.open(lk.uri, clock=clock)):
        assert assert_whole(opened.snapshot()) == 4
        assert opened.scan("tokens").collect().height == 8
    assert lk.append([episode("c", tokens=True)], run_id="run").present == 1
    clock.forward(days=40)
    lk.vacuum()
    assert assert_whole(lk.snapshot()) == 4
    assert lk.snapshot().dead_write_ids == frozenset()


def test_a_compaction_stopped_between_its_file_and_its_commit_changes_nothing(
    lk: Lake, clock: MovingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file looks like an orphan and is deleted: it must not be committed any more."""
    expected = contents(lk.snapshot())

    def a_week_passes() -> None:
        clock.forward(days=8)
        assert deleted(lake.open(lk.uri, clock=clock)) == {"steps": 1}

    before_commit(lk, monkeypatch, "steps", a_week_passes)
    with pytest.raises(CommitLostError):
        lk.compact("steps")
    assert_same(contents(lk.snapshot()), expected)
    assert lk.compact("steps").files_before == 2
    assert_same(contents(lk.snapshot()), expected)


# ---------------------------------------------------------------- next to jobs


def judging(lk: Lake) -> tuple[Job, pl.DataFrame]:
    steps = lk.scan("steps").collect()
    return lk.job(kind="judge"), scores(steps)


def test_rows_of_a_job_that_runs_for_weeks_are_its_own(lk: Lake, clock: MovingClock) -> None:
    job, rows = judging(lk)
    with job:
        job.write("scores", rows)
        clock.forward(days=29)
        vacuum(lake.open(lk.uri, clock=clock))
    assert lk.scan("scores").collect().height == rows.height


def test_a_job_whose_rows_were_dropped_fails_and_can_be_run_again(lk: Lake, clock: MovingClock) -> None:
    def judge_for_a_month() -> None:
        job, rows = judging(lk)
        with job:
            job.write("scores", rows)
            clock.forward(days=31)
            assert vacuum(lake.open(lk.uri, clock=clock))["scores"].dead_files == 1

    says = r"rows of job \w{13} in `scores` were dropped as dead before it ended: .*; run it again|run it again"
    with pytest.raises(ConflictError, match=says):
        judge_for_a_month()
    assert lk.scan("scores").collect().is_empty()
    (run,) = lk.sql("SELECT status, error FROM job_runs WHERE kind = 'judge'").rows()
    assert run[0] == "failed"
    assert "were dropped as dead" in run[1]
    again, rows = judging(lk)
    with again:
        again.write("scores", rows)
    assert lk.scan("scores").collect().height == rows.height
    assert lk.snapshot().dead_write_ids == frozenset()


def test_rows_of_a_failed_job_go_after_a_week(lk: Lake, clock: MovingClock) -> None:
    job, rows = judging(lk)
    with suppress(OnPurposeError), job:
        job.write("scores", rows)
        give_up()
    clock.forward(days=8)
    assert vacuum(lk)["scores"].dead_files == 1
    assert lk.snapshot().entries("scores") == []


@pytest.mark.parametrize("name", mostly_slow(["episodes", "steps", "retractions"], "retractions"))
def test_a_damaged_log_stops_it_before_anything_is_deleted(tmp_path: Path, name: str) -> None:
    """An entry that a power cut left empty reads as a commit of nothing: what it named would look like orphans."""
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode("a", attempt=n) for n in range(2)], run_id="run")
    later = lake.open(lk.uri, clock=lambda: datetime.now(UTC) + timedelta(days=40))
    later.snapshot()  # what is read once is not read again: vacuum looks for itself
    (Path(lk.uri) / name / "_delta_log" / f"{1:020d}.json").write_bytes(b"")
    files = {path for path in Path(lk.uri).rglob("*") if path.is_file()}
    with pytest.raises(LakeAccessError, match=rf"commit 1 of `{name}` is empty \(.*\): the log is damaged"):
        later.vacuum()
    assert {path for path in Path(lk.uri).rglob("*") if path.is_file()} == files
