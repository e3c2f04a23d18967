"""Which committed rows exist for readers: whole files of dead write attempts are left out.

A write attempt's rows are alone in their files, so the `write_id` minimum and maximum in the log's file statistics
tell, without opening a file, whether it is accepted. A file that compaction made holds accepted rows only, and its
name says from which versions of `episodes` and `jobs` on that is so (docs/decisions/0010). Only a mixed file of other
origin, or one younger than the snapshot, needs a look inside, and a row filter if some of its rows are dead.

An episode is hidden while a row of `retractions` about it is in force. The view `current_retractions` is the same rule.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lake.storage.data_files import FileEntry

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file with visible rows. Rows whose write_id is in `dead` do not exist; it is normally empty."""

    path: str
    rows: int
    bytes: int
    dead: frozenset[int]
    write_id: int | None = None
    """The write attempt of all its rows, if it is one."""
    ranges: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Minimum and maximum of key columns; (None, None) where not known."""
    place: int = 0
    """Which set of hidden episodes is left out of its rows; of one lake there is one (`lake.read.joined_snapshot`)."""


WriteIds = Callable[[FileEntry], frozenset[int]]
"""Looks into a file for its write attempts."""


def is_clean(entry: FileEntry, versions: Mapping[str, int]) -> bool:
    """Whether every row of a file is visible at these versions because compaction took visible rows only."""
    since = entry.clean_since
    return since is not None and versions["episodes"] >= since[0] and versions["jobs"] >= since[1]


def visible_files(
    entries: Iterable[FileEntry], accepted: Callable[[], Set[int]], versions: Mapping[str, int], look: WriteIds
) -> list[DataFile]:
    """Files with at least one accepted row, each with the others' write_ids; `accepted` is asked only if need be."""
    files = []
    for entry in entries:
        if is_clean(entry, versions):
            files.append(_data_file(entry))
            continue
        inside = look(entry)
        dead = inside - accepted()
        if dead < inside:
            files.append(_data_file(entry, frozenset(dead)))
    return files


def all_files(entries: Iterable[FileEntry]) -> list[DataFile]:
    """Every file, whole."""
    return [_data_file(entry) for entry in entries]


def _data_file(entry: FileEntry, dead: frozenset[int] = frozenset()) -> DataFile:
    ranges = {name: (low, entry.high[name]) for name, low in entry.low.items()}
    return DataFile(entry.path, entry.rows, entry.bytes, dead, entry.only_write_id, ranges)


def in_force(retractions: "pl.LazyFrame") -> "pl.LazyFrame":
    """The rows of `retractions` that hide their episode: not restorations, nor the retractions that they take back.

    A restoration takes back rows of kind `retracted` alone, by episode and write attempt.
    """
    import polars as pl

    is_restored = pl.col("kind") == "restored"
    named = retractions.filter(is_restored).select("episode_id", write_id="restores", kind=pl.lit("retracted"))
    taken_back = named.explode("write_id", empty_as_null=False, keep_nulls=False)
    return retractions.filter(~is_restored).join(taken_back, on=["episode_id", "write_id", "kind"], how="anti")
