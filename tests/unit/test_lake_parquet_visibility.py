"""Which files exist for readers, from the log's statistics and the file's name alone where they say enough."""

from collections.abc import Set
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.read.parquet import DataFile, find_visible_files, is_clean
from lake.storage.data_files import FileEntry

AT = datetime(2026, 1, 1, tzinfo=UTC)
VERSIONS = {"episodes": 10, "jobs": 20}


def entry(low: int | None, high: int | None, name: str = "0123.parquet") -> FileEntry:
    path = f"/nowhere/{name}"
    return FileEntry(path, name, 3, 100, AT, {"write_id": low, "run_id": "a"}, {"write_id": high, "run_id": "b"})


def never(entry: FileEntry) -> frozenset[int]:
    pytest.fail(f"{entry.name} need not be opened")


def look(entry: FileEntry) -> frozenset[int]:
    return frozenset(range(entry.low["write_id"], entry.high["write_id"] + 1))


def read_write_ids(entry: FileEntry) -> frozenset[int]:
    assert entry.only_write_id is not None, "the log says it"
    return frozenset((entry.only_write_id,))


def visible(entries: list[FileEntry], accepted: Set[int]) -> list[DataFile]:
    return find_visible_files(entries, lambda: accepted, VERSIONS, look)


def test_a_file_of_one_accepted_write_is_whole() -> None:
    (file,) = find_visible_files([entry(5, 5)], lambda: {5, 6}, VERSIONS, read_write_ids)
    assert (file.path, file.rows, file.bytes, file.dead, file.write_id) == (
        "/nowhere/0123.parquet",
        3,
        100,
        frozenset(),
        5,
    )
    assert file.ranges == {"write_id": (5, 5), "run_id": ("a", "b")}


def test_a_file_of_one_dead_write_does_not_exist() -> None:
    assert visible([entry(5, 5)], {6}) == []
    assert visible([entry(5, 5)], set()) == []


@pytest.mark.parametrize(
    ("accepted", "dead"),
    [({1, 2, 3}, frozenset()), ({1, 3}, {2}), ({2}, {1, 3}), ({1, 2, 3, 4}, frozenset()), ({4}, None), (set(), None)],
)
def test_a_file_of_several_writes_is_looked_into(accepted: set[int], dead: set[int] | None) -> None:
    """Write 2 lies between the least and the greatest: statistics alone cannot tell."""
    assert [file.dead for file in visible([entry(1, 3)], accepted)] == ([] if dead is None else [dead])


def test_a_file_that_compaction_made_is_whole_without_a_look_or_a_question() -> None:
    clean = entry(1, 9, "clean-10-20-abc.parquet")
    (file,) = find_visible_files([clean], lambda: pytest.fail("nothing has to be known"), VERSIONS, never)
    assert file.dead == frozenset()


@pytest.mark.parametrize("name", ["clean-11-20-abc.parquet", "clean-10-21-abc.parquet"])
def test_a_file_that_compaction_made_of_rows_younger_than_the_snapshot_is_looked_into(name: str) -> None:
    assert not is_clean(entry(1, 3, name), VERSIONS)
    (file,) = visible([entry(1, 3, name)], {1, 2})
    assert file.dead == {3}


def test_an_ordinary_file_says_nothing_about_being_clean() -> None:
    assert entry(1, 1).clean_since is None
    assert entry(1, 1, "part-00000-9b2-c000.snappy.parquet").clean_since is None, "as delta-rs and Spark name them"


def test_files_of_tables_that_are_always_visible_are_whole() -> None:
    assert [DataFile.of(each).dead for each in [entry(1, 2), entry(None, None)]] == [frozenset(), frozenset()]


@given(
    files=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=5),
    accepted=st.sets(st.integers(0, 6)),
)
def test_what_is_left_is_what_was_accepted(
    files: list[list[int]], accepted: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The oracle filters rows one by one; files are real, and looked into."""
    folder = tmp_path_factory.mktemp("files")
    entries = []
    for n, ids in enumerate(files):
        path = folder / f"{n}.parquet"
        pl.DataFrame({"write_id": ids}, schema={"write_id": pl.Int64}).write_parquet(path)
        entries.append(FileEntry(str(path), path.name, len(ids), 1, AT, {"write_id": min(ids)}, {"write_id": max(ids)}))

    def read(entry: FileEntry) -> frozenset[int]:
        return frozenset(pl.read_parquet(Path(entry.path))["write_id"])

    reads = []
    for file in find_visible_files(entries, lambda: accepted, VERSIONS, read):
        ids = pl.read_parquet(file.path)["write_id"].to_list()
        reads.append([number for number in ids if number not in file.dead])
    expected = [[number for number in ids if number in accepted] for ids in files]
    assert reads == [remaining for remaining in expected if remaining]
