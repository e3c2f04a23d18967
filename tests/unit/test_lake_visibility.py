"""Which files exist for readers, from the log's statistics alone where they say enough."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import LakeAccessError
from lake.store import FileEntry
from lake.visibility import all_files, visible_files, write_ids

NOWHERE = "/nowhere/file.parquet"


def entry(low: int | None, high: int | None, path: str | Path = NOWHERE) -> FileEntry:
    return FileEntry(str(path), rows=3, bytes=100, low_write_id=low, high_write_id=high)


def stored(path: Path, ids: list[int]) -> FileEntry:
    """A file with rows of these write attempts, and the statistics that Delta keeps of it."""
    pl.DataFrame({"write_id": ids}, schema={"write_id": pl.Int64}).write_parquet(path)
    return entry(min(ids), max(ids), path)


def test_a_file_of_one_accepted_write_is_whole_and_is_not_opened() -> None:
    (file,) = visible_files([entry(5, 5)], {5, 6})
    assert (file.path, file.rows, file.bytes, file.dead) == (NOWHERE, 3, 100, frozenset())


def test_a_file_of_one_dead_write_does_not_exist() -> None:
    assert visible_files([entry(5, 5)], {6}) == []
    assert visible_files([entry(5, 5)], set()) == []


@pytest.mark.parametrize(
    ("accepted", "dead"),
    [({1, 2, 3}, frozenset()), ({1, 3}, {2}), ({2}, {1, 3}), ({1, 2, 3, 4}, frozenset()), ({4}, None), (set(), None)],
)
def test_a_file_of_several_writes_is_looked_into(tmp_path: Path, accepted: set[int], dead: set[int] | None) -> None:
    """Write 2 lies between the least and the greatest: statistics alone cannot tell."""
    files = visible_files([stored(tmp_path / "compacted.parquet", [1, 1, 2, 3])], accepted)
    assert [file.dead for file in files] == ([] if dead is None else [dead])


def test_a_file_without_statistics_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    stored(path, [7, 7])
    assert write_ids(entry(None, None, path)) == {7}


@pytest.mark.parametrize("damage", ["missing", "not Parquet"])
def test_a_file_that_has_to_be_looked_into_and_cannot_is_an_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "gone.parquet"
    if damage == "not Parquet":
        path.write_bytes(b"not Parquet at all")
    with pytest.raises(LakeAccessError, match="trajlake doctor"):
        visible_files([entry(1, 2, path)], {1})


def test_files_of_tables_that_are_always_visible_are_whole() -> None:
    assert [file.dead for file in all_files([entry(1, 2), entry(None, None)])] == [frozenset(), frozenset()]


@given(
    files=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=5),
    accepted=st.sets(st.integers(0, 6)),
)
def test_what_is_left_is_what_was_accepted(
    files: list[list[int]], accepted: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The oracle filters rows one by one."""
    folder = tmp_path_factory.mktemp("files")
    entries = [stored(folder / f"{n}.parquet", ids) for n, ids in enumerate(files)]
    seen = []
    for file in visible_files(entries, accepted):
        ids = pl.read_parquet(file.path)["write_id"].to_list()
        seen.append([number for number in ids if number not in file.dead])
    expected = [[number for number in ids if number in accepted] for ids in files]
    assert seen == [ids for ids in expected if ids]
