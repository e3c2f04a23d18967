"""How every Parquet file of a lake is encoded: the one function behind append, compact, z-order and forget.

zstd (level 3 for text and tokens; level 1 for narrow tables of numbers, which it packs as small in three quarters of
the time), and lz4 for the floats of narrow tables, which it packs in half the time and a tenth larger; dictionaries for
words only, BYTE_STREAM_SPLIT for floats, lists of floats included, plain for ids and token ids, and row groups of about
16 MB, computed from the width the rows have. pyarrow writes the files because delta-rs
cannot encode the inside of a list (delta-rs issue 3319): log-probabilities are a fifth smaller this way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lake.tables.columns import Table, Type

ROW_GROUP_BYTES = 16 << 20
_LONGEST_STATISTIC = 64
"""Characters; longer words get no minimum and maximum."""
_WIDE_ROW_BYTES = 1024
_HAS_RANGE = {Type.ID, Type.INT, Type.SMALL_INT, Type.FLOAT, Type.BOOL, Type.WORD, Type.TIME}


@dataclass(slots=True)
class FileStatistics:
    """What the log says of a file: rows, and the range of the columns in `Table.statistics`."""

    rows: int
    low: dict[str, Any]
    high: dict[str, Any]
    nulls: dict[str, int]
    write_ids: set[int]


def arrow(frame: pl.DataFrame, table: Table) -> pa.Table:
    """The frame as Arrow data with exactly the table's schema."""
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(table.arrow())


def write(sink: IO[bytes] | str, batches: Iterator[pa.Table], table: Table) -> FileStatistics:
    """Write a Parquet file of rows in order, in pieces of any size, each with the table's schema."""
    statistics = FileStatistics(0, {}, {}, {}, set())
    with pq.ParquetWriter(sink, table.arrow(), **_settings(table)) as writer:
        for data in _row_groups(batches):
            writer.write_table(data, row_group_size=max(1, data.num_rows))
            _extend(statistics, data, table)
    return statistics


def _row_groups(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in pieces of about a row group."""
    waiting: list[pa.Table] = []
    size = 0
    for batch in batches:
        pieces = max(1, -(-batch.nbytes // ROW_GROUP_BYTES))
        rows = max(1, -(-batch.num_rows // pieces))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if waiting and size + piece.nbytes > ROW_GROUP_BYTES * 1.25:
                yield pa.concat_tables(waiting)
                waiting, size = [], 0
            waiting.append(piece)
            size += piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


@cache
def _settings(table: Table) -> dict[str, Any]:
    """Arguments of `pyarrow.parquet.ParquetWriter`."""
    encodings: dict[str, str] = {}
    wide = table.row_bytes >= _WIDE_ROW_BYTES
    fast = [] if wide else [c.name for c in table.columns if c.type is Type.FLOAT]
    slow = [f"{c.name}.list.element" if c.type.is_list else c.name for c in table.columns if c.name not in fast]
    for column in table.columns:
        if column.type is Type.FLOAT:
            encodings[column.name] = "BYTE_STREAM_SPLIT"
        elif column.type is Type.FLOATS:
            encodings[f"{column.name}.list.element"] = "BYTE_STREAM_SPLIT"
    return {
        "compression": dict.fromkeys(slow, "zstd") | dict.fromkeys(fast, "lz4"),
        "compression_level": dict.fromkeys(slow, 3 if wide else 1),
        "use_dictionary": [c.name for c in table.columns if c.type is Type.WORD],
        "column_encoding": encodings,
        "write_statistics": [c.name for c in table.columns if c.type in _HAS_RANGE],
        "store_schema": False,
        # For the training reader, the one reader of a lake that verifies them: DuckDB and Polars cannot.
        "write_page_checksum": any(column.type is Type.TOKENS for column in table.columns),
    }


def _extend(statistics: FileStatistics, data: pa.Table, table: Table) -> None:
    statistics.rows += data.num_rows
    if "write_id" in data.schema.names:
        statistics.write_ids.update(pc.unique(data["write_id"]).to_pylist())
    for name in table.statistics:
        column = data[name]
        statistics.nulls[name] = statistics.nulls.get(name, 0) + column.null_count
        found = pc.min_max(column).as_py()
        for known, value, choose in ((statistics.low, found["min"], min), (statistics.high, found["max"], max)):
            if value is None or (isinstance(value, str) and len(value) > _LONGEST_STATISTIC):
                # A range that is not known in full is not stated at all: a reader would skip the file by it.
                if value is not None:
                    known[name] = None
            elif name not in known:
                known[name] = value
            elif known[name] is not None:
                known[name] = choose(known[name], value)
