"""Parquet files of a lake as lazy frames, local or in a bucket, with the columns and types of a table's spec."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from lake.columns import Table
from lake.damage import blamed
from lake.visibility import DataFile


def scan(
    paths: Sequence[str], table: Table, options: Mapping[str, Any], statistics: pl.DataFrame | None = None
) -> pl.LazyFrame:
    """Files as a lazy frame of the table's columns; columns younger than a file are NULL.

    Args:
        paths: the files, at least one.
        table: whose files they are.
        options: Polars' storage options.
        statistics: what is known of each file, to prune by.
    """
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
    """The rows of a lazy frame over a lake's files.

    Raises:
        LakeAccessError: a file is missing or damaged; names it and its table.
    """
    try:
        return frame.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise blamed(frame, error) from error


def _statistics(files: Sequence[DataFile], table: Table) -> pl.DataFrame:
    """Length, minima and maxima of files in the form that `scan_parquet` prunes by."""
    schema = table.polars()
    columns = [pl.Series("len", [file.rows for file in files], dtype=pl.get_index_type())]
    nothing = (None, None)
    for name in table.columns:
        dtype = schema[name.name]
        ranges = [file.ranges.get(name.name, nothing) for file in files]
        columns.append(pl.Series(f"{name.name}_nc", [None] * len(files), dtype=pl.get_index_type()))
        columns.append(pl.Series(f"{name.name}_min", [low for low, _ in ranges], dtype=dtype))
        columns.append(pl.Series(f"{name.name}_max", [high for _, high in ranges], dtype=dtype))
    return pl.DataFrame(columns)
