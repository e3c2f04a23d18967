"""Which data files have every column of their table, as their footers say: these can be read without naming a schema.

DuckDB has no idea how many rows there are where a schema is named (`lake.read.query_views.parquet`): it takes a million
of them for one, and joins them the wrong way round, with the large side in memory. A file never changes, so a process
looks once.
"""

from collections.abc import Sequence

import duckdb

from lake.read.visibility import DataFile
from lake.tables.columns import Table

_MOST_FILES = 1000
"""Files whose footers are looked at for one query; each takes a fifth of a millisecond."""
_MOST_KNOWN = 200_000
_known: dict[str, bool] = {}


def whole(connection: duckdb.DuckDBPyConnection, table: Table, files: Sequence[DataFile]) -> frozenset[str]:
    """Paths of the files that have all columns of a table, in its types; of too many files it is not asked."""
    if len(files) > _MOST_FILES:
        return frozenset()
    unknown = [file.path for file in files if file.path not in _known]
    if unknown:
        if len(_known) > _MOST_KNOWN:
            _known.clear()
        _known.update(_look(connection, table, unknown))
    return frozenset(file.path for file in files if _known.get(file.path, False))


def _look(connection: duckdb.DuckDBPyConnection, table: Table, paths: list[str]) -> dict[str, bool]:
    query = "SELECT file_name, list(name || ' ' || duckdb_type) FROM parquet_schema(?) GROUP BY file_name"
    try:
        found = connection.execute(query, [paths]).fetchall()
    except duckdb.Error:
        return {}  # a file is gone or damaged: whoever reads it says which
    columns = {f"{column.name} {column.sql_type}" for column in table.columns}
    return {path: columns <= set(there) for path, there in found}
