"""Parquet files of a lake as lazy frames with a table's columns and types, and which file a failed read is about."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from lake.errors import LakeAccessError
from lake.read.visibility import DataFile
from lake.storage.data_files import digest_in_name, digest_of
from lake.storage.objects import Objects
from lake.tables.columns import Table

ADVICE = "`trajlake doctor` lists missing and damaged files"
_SCANNED = re.compile(r"Parquet SCAN \[(.+?)(?:, \.\.\. \d+ other sources?)?\]")
_FILE = re.compile(r"(?P<folders>(?:\w+://|/|\.\.\./).*/)(?P<table>\w+)/(?P<file>[^/]+\.parquet)")


def damaged(path: str, error: Exception) -> LakeAccessError:
    """The error of a data file that cannot be read."""
    reason = str(error).partition("\n")[0].replace(path, "it").removesuffix(": it")
    if isinstance(error, FileNotFoundError):
        reason = "there is no such file"
    table = path.rpartition("/")[0].rpartition("/")[2]
    return LakeAccessError(f"table `{table}`: {path} cannot be read: {reason}. {ADVICE}")


def blamed(frame: pl.LazyFrame, error: Exception) -> LakeAccessError:
    """The error of a lazy frame over a lake's files that could not be collected, with the file if it can be found."""
    scanned: list[str] = []
    # Where the schema comes from the files, the plan cannot be shown either.
    with suppress(OSError, pl.exceptions.PolarsError):
        scanned = _SCANNED.findall(frame.explain(optimized=False))  # the first file of each table
    if named := _FILE.search(str(error)):
        # Polars shortens a long path from its beginning.
        whole = (path.rpartition("/")[0] for path in scanned if path.rpartition("/")[0].endswith(f"/{named['table']}"))
        return damaged(f"{next(whole, named['folders'] + named['table'])}/{named['file']}", error)
    for path in scanned:
        if found := _damaged_beside(path):
            return damaged(found, error)
    reason = str(error).partition("\n")[0]
    tables = dict.fromkeys(path.rpartition("/")[0].rpartition("/")[2] for path in scanned)
    of = f" of {' or '.join(f'`{table}`' for table in tables)}" if tables else ""
    return LakeAccessError(f"a file{of} cannot be read: {reason}. {ADVICE}")


def _damaged_beside(path: str) -> str | None:
    """The first file of a table that is not what its name says; only files of a local folder are looked at."""
    folder = Path(path).parent
    if "://" in path or not folder.is_dir():
        return None
    objects = Objects(str(folder.parent))
    # Those that end wrong come first: they are the cheapest to tell.
    for file in sorted(folder.glob("*.parquet"), key=lambda file: (_ends_well(file), file)):
        recorded = digest_in_name(file.name)
        if recorded is not None and digest_of(objects, f"{folder.name}/{file.name}") != recorded:
            return str(file)
    return None


def _ends_well(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 4))
        return opened.read() == b"PAR1"


def scan(
    paths: Sequence[str], table: Table, options: Mapping[str, Any], statistics: pl.DataFrame | None = None
) -> pl.LazyFrame:
    """Files as a lazy frame of the table's columns, pruned by statistics; columns younger than a file are NULL."""
    return pl.scan_parquet(
        list(paths),
        missing_columns="insert",
        extra_columns="ignore",
        schema=table.polars(),
        storage_options=dict(options) or None,
        # What Polars' own Delta reader passes on: it has no public name yet (tests/unit/test_lake_snapshot.py pins it).
        _table_statistics=statistics,
    )


def scan_pruned(files: Sequence[DataFile], table: Table, options: Mapping[str, Any]) -> pl.LazyFrame:
    """The visible rows of files, lazily; a filter on a key column skips the files that its range excludes."""
    whole = [file for file in files if not file.dead]
    parts = [scan([f.path for f in whole], table, options, _statistics(whole, table))] if whole else []
    for file in files:
        if file.dead:
            parts.append(scan([file.path], table, options).filter(~pl.col("write_id").is_in(sorted(file.dead))))
    return pl.concat(parts) if parts else pl.LazyFrame(schema=table.polars())


def collected(frame: pl.LazyFrame) -> pl.DataFrame:
    """The rows of a lazy frame over a lake's files. Raises LakeAccessError: names a damaged file and its table."""
    try:
        return frame.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise blamed(frame, error) from error


def _statistics(files: Sequence[DataFile], table: Table) -> pl.DataFrame:
    """Length, minima and maxima of files in the form that `scan_parquet` prunes by."""
    schema = table.polars()
    columns = [pl.Series("len", [file.rows for file in files], dtype=pl.get_index_type())]
    nothing = (None, None)
    for name, dtype in schema.items():
        ranges = [file.ranges.get(name, nothing) for file in files]
        columns.append(pl.Series(f"{name}_nc", [None] * len(files), dtype=pl.get_index_type()))
        columns.append(pl.Series(f"{name}_min", [low for low, _ in ranges], dtype=dtype))
        columns.append(pl.Series(f"{name}_max", [high for _, high in ranges], dtype=dtype))
    return pl.DataFrame(columns)
