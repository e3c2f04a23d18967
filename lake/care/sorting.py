"""Rows of files in a new order, out of core: what compaction, z-order and erasure write back.

DuckDB sorts with bounded memory and spills to a temporary folder, so a table's files are merged at any size.
"""

import tempfile
from collections.abc import Iterator, Sequence

import duckdb
import pyarrow as pa

from lake.read.query_views import parquet, quoted, quoted_name
from lake.storage.data_files import FileEntry
from lake.storage.objects import Objects
from lake.tables.columns import Table

MEMORY = "1GB"
_BATCH_ROWS = 8192
_BITS = 16
"""Bits a column contributes to a z-order key: 65,536 quantiles."""


def ordered_rows(
    objects: Objects, entries: Sequence[FileEntry], table: Table, *, z_order: Sequence[str] = (), where: str = ""
) -> Iterator[pa.Table]:
    """Rows of files in the table's order, or along a z-order curve.

    Args:
        z_order: columns to interleave instead of the table's sort keys.
        where: SQL condition of the rows that stay.
    """
    columns = ", ".join(map(quoted_name, table.names))
    source = parquet(table, (entry.path for entry in entries))
    condition = f" WHERE {where}" if where else ""
    query = f"SELECT {columns} FROM {source}{condition}"
    if z_order:
        query = _along_curve(query, columns, z_order)
    else:
        query += " ORDER BY " + ", ".join(f"{quoted_name(name)} ASC NULLS LAST" for name in table.sort)
    with tempfile.TemporaryDirectory(prefix="trajlake-sort-") as spill, duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute(f"SET temp_directory = {quoted(spill)}")
        files = objects.filesystem({entry.path: entry.bytes for entry in entries})
        if files is not None:
            connection.register_filesystem(files)
        schema = table.arrow()
        try:
            for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
                if batch.num_rows:
                    yield pa.Table.from_batches([batch]).cast(schema)
        except duckdb.Error as error:
            raise objects.explained(error) from None


def _along_curve(query: str, columns: str, z_order: Sequence[str]) -> str:
    """Order by a Morton key: the bits of each column's quantile, interleaved."""
    ranks = ", ".join(
        f"ntile({1 << _BITS}) OVER (ORDER BY {quoted_name(name)} NULLS LAST) - 1 AS z{i}"
        for i, name in enumerate(z_order)
    )
    bits = " + ".join(
        f"(((z{i} >> {bit}) & 1)::HUGEINT << {bit * len(z_order) + i})"
        for bit in range(_BITS)
        for i in range(len(z_order))
    )
    return f"SELECT {columns} FROM (SELECT *, {ranks} FROM ({query})) ORDER BY {bits}"
