"""The Parquet files of a snapshot: which of them hold visible rows, and their rows as lazy frames.

Readers leave out whole files of dead write attempts. The rows of a write attempt are alone in their files, so the
minimum and maximum of `write_id` in the log's statistics identify the attempt without opening a file. A compacted file
holds accepted rows only. Its name gives the versions of `episodes` and `jobs` from which that holds
(docs/decisions/0010). Readers open a file only if it mixes attempts and no such versions apply; if some of its rows are
dead, they filter its rows.

An episode is hidden while a row of `retractions` about it is in force. The view `current_retractions` applies the same
rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lake.errors import LakeAccessError
from lake.storage.data_files import FileEntry, compute_digest, read_name_digest
from lake.storage.objects import Objects
from lake.tables.columns import Table

if TYPE_CHECKING:
    import polars as pl

ADVICE = "`trajlake doctor` lists missing and damaged files"
_SCANNED = re.compile(r"Parquet SCAN \[(.+?)(?:, \.\.\. \d+ other sources?)?\]")
_FILE = re.compile(r"(?P<folders>(?:\w+://|/|\.\.\./).*/)(?P<table>\w+)/(?P<file>[^/]+\.parquet)")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file with visible rows. Readers skip rows whose write_id is in `dead`, which is normally empty."""

    path: str
    rows: int
    bytes: int
    dead: frozenset[int]
    write_id: int | None = None
    """The write attempt of all rows; None for several attempts."""
    ranges: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Minimum and maximum of key columns; (None, None) if unknown."""
    hidden_set: int = 0
    """Number of the set of hidden episodes to leave out; one lake has one set (`lake.read.joined_snapshot`)."""

    @classmethod
    def of(cls, entry: FileEntry, dead: frozenset[int] = frozenset()) -> DataFile:
        """Convert an entry of the log."""
        ranges = {name: (low, entry.high[name]) for name, low in entry.low.items()}
        return cls(entry.path, entry.rows, entry.bytes, dead, entry.only_write_id, ranges)


def is_clean(entry: FileEntry, versions: Mapping[str, int]) -> bool:
    """Return whether compaction wrote the file from rows that are visible at these versions."""
    since = entry.clean_since
    return since is not None and versions["episodes"] >= since[0] and versions["jobs"] >= since[1]


def find_visible_files(
    entries: Iterable[FileEntry],
    accepted: Callable[[], Set[int]],
    versions: Mapping[str, int],
    read_write_ids: Callable[[FileEntry], frozenset[int]],
) -> list[DataFile]:
    """Return the files with at least one accepted row, with the write ids of their dead rows.

    `accepted` is called only if a file needs it.
    """
    files = []
    for entry in entries:
        if is_clean(entry, versions):
            files.append(DataFile.of(entry))
            continue
        write_ids = read_write_ids(entry)
        dead = write_ids - accepted()
        if dead < write_ids:
            files.append(DataFile.of(entry, frozenset(dead)))
    return files


def select_in_force(retractions: pl.LazyFrame) -> pl.LazyFrame:
    """Select the rows of `retractions` that hide an episode: no restorations, and no retractions that these undo.

    A restoration undoes rows of kind `retracted` only, matched by episode and write attempt.
    """
    import polars as pl

    is_restored = pl.col("kind") == "restored"
    restored = retractions.filter(is_restored).select("episode_id", write_id="restores", kind=pl.lit("retracted"))
    restored = restored.explode("write_id", empty_as_null=False, keep_nulls=False)
    return retractions.filter(~is_restored).join(restored, on=["episode_id", "write_id", "kind"], how="anti")


def damaged_file_error(path: str, error: Exception) -> LakeAccessError:
    """Build the error for a data file that cannot be read."""
    reason = str(error).partition("\n")[0].replace(path, "it").removesuffix(": it")
    if isinstance(error, FileNotFoundError):
        reason = "there is no such file"
    table = path.rpartition("/")[0].rpartition("/")[2]
    return LakeAccessError(f"table `{table}`: {path} cannot be read: {reason}. {ADVICE}")


def failed_read_error(frame: pl.LazyFrame, error: Exception) -> LakeAccessError:
    """Build the error for a lazy frame that could not be collected, with the damaged file if it can be identified."""
    import polars as pl

    scanned: list[str] = []
    # If the schema comes from the files, the plan cannot be printed either.
    with suppress(OSError, pl.exceptions.PolarsError):
        scanned = _SCANNED.findall(frame.explain(optimized=False))  # the first file of each table
    if match := _FILE.search(str(error)):
        # Polars shortens a long path at its beginning.
        folders = (path.rpartition("/")[0] for path in scanned)
        folder = next((path for path in folders if path.endswith(f"/{match['table']}")), None)
        return damaged_file_error(f"{folder or match['folders'] + match['table']}/{match['file']}", error)
    for path in scanned:
        if damaged := _find_damaged_sibling(path):
            return damaged_file_error(damaged, error)
    reason = str(error).partition("\n")[0]
    tables = dict.fromkeys(path.rpartition("/")[0].rpartition("/")[2] for path in scanned)
    source = f" of {' or '.join(f'`{table}`' for table in tables)}" if tables else ""
    return LakeAccessError(f"a file{source} cannot be read: {reason}. {ADVICE}")


def _find_damaged_sibling(path: str) -> str | None:
    """Return the first file of a local table folder whose bytes do not match the digest in its name."""
    folder = Path(path).parent
    if "://" in path or not folder.is_dir():
        return None
    objects = Objects(str(folder.parent))

    def ends_well(file: Path) -> bool:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - 4))
            return stream.read() == b"PAR1"

    # Files with a wrong end come first: they are the cheapest to recognise.
    for file in sorted(folder.glob("*.parquet"), key=lambda file: (ends_well(file), file)):
        recorded = read_name_digest(file.name)
        if recorded is not None and compute_digest(objects, f"{folder.name}/{file.name}") != recorded:
            return str(file)
    return None


def scan_files(
    paths: Sequence[str], table: Table, options: Mapping[str, Any], statistics: pl.DataFrame | None = None
) -> pl.LazyFrame:
    """Scan files as a lazy frame of the table's columns, pruned by statistics; columns younger than a file are NULL."""
    import polars as pl

    return pl.scan_parquet(
        list(paths),
        missing_columns="insert",
        extra_columns="ignore",
        schema=table.polars(),
        storage_options=dict(options) or None,
        # Polars' own Delta reader passes this argument too. It has no public name yet: a test in
        # tests/unit/test_lake_snapshot.py fails when it changes.
        _table_statistics=statistics,
    )


def scan_pruned(files: Sequence[DataFile], table: Table, options: Mapping[str, Any]) -> pl.LazyFrame:
    """Scan the visible rows of files. A filter on a key column skips the files that its range excludes."""
    import polars as pl

    clean = [file for file in files if not file.dead]
    frames = []
    if clean:
        # `scan_parquet` prunes by the length of each file and the minimum and maximum of its columns.
        counts = pl.get_index_type()
        statistics = [pl.Series("len", [file.rows for file in clean], dtype=counts)]
        for name, dtype in table.polars().items():
            ranges = [file.ranges.get(name, (None, None)) for file in clean]
            statistics.append(pl.Series(f"{name}_nc", [None] * len(clean), dtype=counts))
            statistics.append(pl.Series(f"{name}_min", [low for low, _ in ranges], dtype=dtype))
            statistics.append(pl.Series(f"{name}_max", [high for _, high in ranges], dtype=dtype))
        frames.append(scan_files([file.path for file in clean], table, options, pl.DataFrame(statistics)))
    for file in files:
        if file.dead:
            frame = scan_files([file.path], table, options)
            frames.append(frame.filter(~pl.col("write_id").is_in(sorted(file.dead))))
    return pl.concat(frames) if frames else pl.LazyFrame(schema=table.polars())


def collect_rows(frame: pl.LazyFrame) -> pl.DataFrame:
    """Collect a lazy frame over files of a lake. Raises LakeAccessError: names a damaged file and its table."""
    import polars as pl

    try:
        return frame.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise failed_read_error(frame, error) from error
