"""Which committed rows exist for readers: whole files of dead write attempts are left out.

A write attempt's rows are alone in their files, so the `write_id` minimum and maximum in the log's file statistics
tell, without opening a file, whether it is accepted. Only a file that holds several write_ids needs a look inside,
and a row filter if some of them are dead (docs/decisions/0005).
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

import polars as pl

from lake.errors import LakeAccessError
from lake.store import FileEntry


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file with visible rows. Rows whose write_id is in `dead` do not exist; it is normally empty."""

    path: str
    rows: int
    bytes: int
    dead: frozenset[int]


def visible_files(entries: Iterable[FileEntry], accepted: Set[int]) -> list[DataFile]:
    """Files with at least one accepted row, each with the write_ids in it that are not accepted."""
    files = []
    for entry in entries:
        inside = write_ids(entry)
        dead = inside - accepted
        if dead < inside:
            files.append(DataFile(entry.path, entry.rows, entry.bytes, frozenset(dead)))
    return files


def all_files(entries: Iterable[FileEntry]) -> list[DataFile]:
    """Every file, whole."""
    return [DataFile(entry.path, entry.rows, entry.bytes, frozenset()) for entry in entries]


def write_ids(entry: FileEntry) -> frozenset[int]:
    """The write_ids a file holds: from its statistics, or from its column where they do not say.

    Raises:
        LakeAccessError: the file had to be read and cannot be.
    """
    if entry.low_write_id is not None and entry.low_write_id == entry.high_write_id:
        return frozenset((entry.low_write_id,))
    return frozenset(collected(pl.scan_parquet(entry.path).select("write_id").unique())["write_id"].to_list())


def collected(frame: pl.LazyFrame) -> pl.DataFrame:
    """The rows of a lazy frame over a lake's files.

    Raises:
        LakeAccessError: a file is missing or damaged.
    """
    try:
        return frame.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).partition("\n")[0]
        msg = f"the lake cannot be read: {reason}. `trajlake doctor` lists missing and damaged files"
        raise LakeAccessError(msg) from error
