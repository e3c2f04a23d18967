"""Compaction and z-order: fewer files, the same rows for every reader, old and new."""

from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

import lake
from lake import Lake
from lake.care.maintenance import Compaction
from lake.errors import UsageError
from lake.execution.local import LocalExecutor
from lake.storage.commits import CommitLostError
from lake.tables import TABLES
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode
from testkit.full_lake import add_round, full_lake


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return full_lake(tmp_path / "lake")


def everything(snapshot: lake.Snapshot) -> dict[str, pl.DataFrame]:
    return {name: snapshot.scan(name).collect().sort("write_id", *table.key) for name, table in TABLES.items()}


def compact(lk: Lake, *names: str) -> dict[str, Compaction]:
    """Some tables, or all."""
    return {name: lk.compact(name) for name in names or TABLES}


def test_every_table_shows_the_same_rows_before_and_after(lk: Lake) -> None:
    before = lk.snapshot()
    expected = everything(before)
    done = compact(lk)
    assert_same(everything(lk.snapshot()), expected)
    assert_same(everything(before), expected)
    assert_same(everything(lk.at(before.versions)), expected)
    assert done["episodes"].files_before == 6
    assert done["episodes"].files_after == 1
    assert len(lk.snapshot().entries("jobs")) == 1


def test_processes_merge_the_same_files(lk: Lake, tmp_path: Path) -> None:
    """Bins of two files; a merged file has the digest of its bytes in its name."""
    other_lake = full_lake(tmp_path / "other")
    size = max(entry.bytes for entry in lk.snapshot().entries("steps")) * 5 // 2

    def merged(lk: Lake, executor: LocalExecutor | None) -> tuple[Compaction, list[str]]:
        done = lk.compact("steps", target_bytes=size, executor=executor)
        return done, sorted(entry.name.rpartition("-")[2] for entry in lk.snapshot().entries("steps"))

    in_process, in_workers = merged(lk, None), merged(other_lake, LocalExecutor(2, processes=True))
    assert in_workers == in_process
    assert in_process[0].files_after > 1


def test_rows_are_in_the_tables_order_and_the_file_in_the_lakes_encoding(lk: Lake) -> None:
    names = ("steps", "tokens", "advantages", "jobs")
    compact(lk, *names)
    for name in names:
        (file,) = (file for file in lk.snapshot().files(name) if file.write_id is None)
        frame = pl.read_parquet(file.path)
        sort = TABLES[name].sort
        assert frame.select(sort).equals(frame.sort(sort, nulls_last=True).select(sort))
    metadata = pq.ParquetFile(next(f.path for f in lk.snapshot().files("tokens") if f.write_id is None)).metadata
    columns = {metadata.row_group(0).column(i).path_in_schema: metadata.row_group(0).column(i) for i in range(27)}
    assert "BYTE_STREAM_SPLIT" in columns["action_logprobs.list.element"].encodings
    assert columns["run_id"].compression == "ZSTD"


def test_rows_of_undecided_writes_stay_where_they_are_and_may_still_be_accepted(lk: Lake) -> None:
    """A job is half way through while its table is compacted."""
    steps = lk.scan("steps").collect()
    scores = steps.select("episode_id", "step_index", "group_id", "run_id").with_columns(
        scorer=pl.lit("late"), scorer_version=pl.lit("1"), value=pl.lit(2.0)
    )
    with lk.job(kind="judge") as job:
        job.write("scores", scores)
        before = lk.scan("scores").collect().height
        compact(lk, "scores", "jobs")
        assert lk.scan("scores").collect().height == before, "not visible yet"
    assert lk.scan("scores").collect().height == before + scores.height


def test_a_compacted_file_needs_no_look_inside(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("steps", "tokens", "spans", "groupings")
    compact(lk, *names)
    snapshot = lake.open(lk.uri).snapshot()
    look = lake.Snapshot._look

    def deciding_only(self: lake.Snapshot, path: str) -> frozenset[int]:
        assert "/episodes/" in path, "no other file has to be opened"
        return look(self, path)

    monkeypatch.setattr(lake.Snapshot, "_look", deciding_only)
    for name in names:
        mixed = [entry for entry in snapshot.entries(name) if entry.only_write_id is None]
        assert mixed
        assert all(entry.clean_since is not None for entry in mixed)
        assert [f for f in snapshot.files(name) if f.write_id is None]


def test_a_snapshot_older_than_the_rows_of_a_compacted_file_does_not_show_them(tmp_path: Path) -> None:
    """Episodes resolved before, steps after: a compaction in between merged rows that came later."""
    lk = empty_lake(tmp_path / "lake")
    add_round(lk, 0)
    versions = lk.snapshot().versions
    expected = contents(lk.at(versions), ("episodes", "steps", "tokens"))
    add_round(lk, 1)
    compact(lk, "episodes", "steps", "tokens", "jobs")
    newest = lk.snapshot().versions
    torn = versions | {name: newest[name] for name in ("steps", "tokens")}
    snapshot = lk.at(torn)
    assert_same(contents(snapshot, ("episodes", "steps", "tokens")), expected)
    assert snapshot.sql("SELECT count(*) AS n FROM steps").item() == expected["steps"].height


def test_two_compactions_at_once_do_not_double_rows(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(lk.snapshot())
    reader = lake.open(lk.uri)
    write = lk._store._write

    def late(*args: object, **options: object) -> object:
        monkeypatch.undo()
        reader.compact("steps")
        return write(*args, **options)

    monkeypatch.setattr(lk._store, "_write", late)
    with pytest.raises(CommitLostError, match="rewritten by another process"):
        lk.compact("steps")
    assert_same(everything(lk.snapshot()), expected)
    assert lk.compact("steps").files_before == 0, "the other one did it"


def test_appends_beside_a_compaction_succeed(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = lake.open(lk.uri)
    write = lk._store._write

    def meanwhile(*args: object, **options: object) -> object:
        monkeypatch.undo()
        reader.append([episode("meanwhile", tokens=True)], run_id="run")
        return write(*args, **options)

    before = assert_whole(lk.snapshot())
    for name in ("steps", "tokens", "episodes"):
        monkeypatch.setattr(lk._store, "_write", meanwhile)
        assert lk.compact(name).files_before > 1
    assert assert_whole(lk.snapshot()) == before + 1


def test_files_of_the_target_size_are_left_alone(lk: Lake) -> None:
    size = max(entry.bytes for entry in lk.snapshot().entries("episodes"))
    assert lk.compact("episodes", target_bytes=size).files_before == 0
    assert lk.compact("episodes", target_bytes=3 * size).files_after > 1


def test_z_order_keeps_the_rows_and_clusters_both_columns(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode(f"t{n % 8}", n, steps=4) for n in range(64)], run_id="run")
    expected = everything(lk.snapshot())
    done = lk.compact("steps", z_order=["group_id", "step_index"])
    assert (done.files_before, done.files_after) == (1, 1)
    assert_same(everything(lk.snapshot()), expected)
    (file,) = lk.snapshot().files("steps")
    halves = pl.read_parquet(file.path)
    first = halves.head(64)
    assert first["group_id"].n_unique() <= 4
    assert first["step_index"].n_unique() <= 2


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("step", [], "there is no table `step`"),
        ("steps", ["nope"], "cannot be ordered by nope; valid: episode_id"),
        ("tokens", ["action_ids"], "cannot be ordered by action_ids"),
        ("steps", ["run_id"] * 5, "at most 4"),
    ],
)
def test_what_cannot_be_compacted_is_refused(lk: Lake, name: str, columns: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lk.compact(name, z_order=columns)


def test_an_empty_lake_is_compacted_to_nothing(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    assert all(done.files_before == 0 for done in compact(lk).values())


def test_a_job_that_leaves_many_small_files_merges_them(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake", compact_above=5)
    for n in range(8):
        lk.append([episode("t", n)], run_id="run")
    assert len(lk.snapshot().entries("episodes")) < 6
    assert len(lk.snapshot().entries("jobs")) < 8
    assert assert_whole(lk.snapshot()) == 8
    never = empty_lake(tmp_path / "never", compact_above=0)
    for n in range(7):
        never.append([episode("t", n)], run_id="run")
    assert len(never.snapshot().entries("episodes")) == 7


def test_a_replay_after_compaction_by_a_new_process_adds_nothing(lk: Lake) -> None:
    compact(lk, "episodes", "steps", "retractions")
    records = [episode("task 0", index, tokens=True) for index in range(2)]
    counts = lake.open(lk.uri).append(records, run_id="run")
    assert (counts.new, counts.present) == (0, 2)


def test_skipping_survives_compaction(lk: Lake) -> None:
    def fingerprint() -> int:
        snapshot = lk.snapshot()
        return snapshot.fingerprint(snapshot.scan("episodes").collect(), filter="all")

    before = fingerprint()
    with lk.job(kind="credit", fingerprint=before) as job:
        pass
    compact(lk, "episodes", "jobs")
    assert fingerprint() == before
    assert lk.find_job("credit", job.series_id, before) == job.job_id


def test_history_names_what_was_done_and_by_whom(lk: Lake) -> None:
    lk.compact("steps")
    newest, *older = lk.history("steps")
    assert newest["note"]["operation"] == "compact"
    assert newest["note"]["removed"] == 6
    assert {entry["note"].get("operation") for entry in older} == {"append", "create table"}
    assert datetime.fromisoformat(newest["note"]["at"]) <= datetime.now(UTC)
