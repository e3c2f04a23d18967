"""SQL for the names of a lake: tables over file lists, the shipped views and macros, and which names a query mentions.

A table is a view over its snapshot's Parquet files. DuckDB gets its columns and types from the table's definition, so
binding opens no file, and columns younger than a file read as NULL. With a given schema, however, DuckDB assumes a
million rows and may join tables with the large side in memory. So files whose footers show all columns are read without
a schema.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from importlib import resources
from itertools import product
from typing import TYPE_CHECKING

from lake import ids
from lake.read.parquet import DataFile
from lake.tables import TABLES
from lake.tables.columns import Table

if TYPE_CHECKING:
    import duckdb

MOST_FOOTERS = 1000
"""Largest number of files whose footers are read for one query; each takes a fifth of a millisecond."""
_MOST_CACHED = 200_000
_has_all_columns: dict[str, bool] = {}
"""Path of a file -> whether it has all columns of its table; files never change."""
_EMPTY_TEXTS = ("", "[]", "{}", '""', "null", "None")
_BLANKS = ("", " ", "\n", "\r\n")
EMPTY_STATES = tuple(sorted({ids.text_hash("".join(texts)) for texts in product(_BLANKS, _EMPTY_TEXTS, _BLANKS)}))
"""`steps.state_hash` of states without information: an empty text, list, object or null, with a blank around it or not.

Siblings that meet in such a state do not share a situation. The macro `is_empty_state` uses the same hashes."""
_CATALOG = re.compile(
    r"^\s*\(?\s*(show|describe|desc)\b|\b(information_schema|duckdb_\w+|pg_\w+|sqlite_\w+|pragma_\w+|show)\b", re.I
)
"""Queries about the catalog, which need every table and view."""
_WORD = re.compile(r"\w+")
_COLUMN = re.compile(r"--   (\w+): (.+)")
_CONTINUED = re.compile(r"--       (.+)")


def find_complete(connection: "duckdb.DuckDBPyConnection", table: Table, files: Sequence[DataFile]) -> frozenset[str]:
    """Return the paths of files that have all columns of a table with its types; empty for too many files."""
    if len(files) > MOST_FOOTERS:
        return frozenset()
    unread = [file.path for file in files if file.path not in _has_all_columns]
    if unread:
        if len(_has_all_columns) > _MOST_CACHED:
            _has_all_columns.clear()
        import duckdb

        query = "SELECT file_name, list(name || ' ' || duckdb_type) FROM parquet_schema(?) GROUP BY file_name"
        try:
            footers = connection.execute(query, [unread]).fetchall()
        except duckdb.Error:
            footers = []  # a file is missing or damaged; the reader of its rows reports it
        columns = {f"{column.name} {column.sql_type}" for column in table.columns}
        _has_all_columns.update((path, columns <= set(present)) for path, present in footers)
    return frozenset(file.path for file in files if _has_all_columns.get(file.path, False))


@lru_cache(maxsize=1)
def read_macros() -> list[str]:
    """Return the shipped macros as SQL."""
    constants = {"{alphabet}": ids.ALPHABET, "{empty_states}": ", ".join(map(str, EMPTY_STATES))}
    macros = [text for _, text in _read_scripts() if "CREATE MACRO" in text]
    for name, constant in constants.items():
        macros = [text.replace(name, constant) for text in macros]
    return macros


@lru_cache(maxsize=1)
def read_views() -> dict[str, str]:
    """Return the shipped views as SQL by name, each after the views it uses."""
    return {name: text for name, text in _read_scripts() if "CREATE VIEW" in text}


@lru_cache(maxsize=1)
def read_column_meanings() -> dict[str, dict[str, str]]:
    """Return the meaning of each column of the shipped views, by view and column, from the comments above their SQL.

    `-- Columns: those of `TABLE`` includes the columns of tables; a line `--   NAME: meaning` describes one column.
    """
    meanings: dict[str, dict[str, str]] = {}
    for view, text in read_views().items():
        columns: dict[str, str] = {}
        name = ""
        for line in text.partition("CREATE VIEW")[0].splitlines():
            if line.startswith("-- Columns: "):
                tables = [word for word in re.findall(r"`(\w+)`", line) if word in TABLES]
                # A column of several tables has the meaning of the first table.
                columns = {c.name: c.meaning for table in reversed(tables) for c in TABLES[table].columns}
            elif (match := _COLUMN.fullmatch(line)) is not None:
                name = match[1]
                columns[name] = match[2]
            elif (match := _CONTINUED.fullmatch(line)) is not None:
                columns[name] += f" {match[1]}"
        meanings[view] = columns
    return meanings


@lru_cache(maxsize=1)
def find_references() -> dict[str, frozenset[str]]:
    """Return view -> the tables and views that it uses, directly or through other views."""
    references: dict[str, frozenset[str]] = {}
    for name, text in read_views().items():
        direct = _find_names(re.sub(r"--[^\n]*", "", text)) - {name}
        references[name] = direct.union(*(references[view] for view in direct if view in references))
    return references


def find_mentioned(query: str) -> frozenset[str]:
    """Return the tables and views that a query may need: all names in its text, and the names that these use.

    Names in string literals and comments count too. An extra table costs little; a missing one would be an error.
    """
    if _CATALOG.search(query):
        return frozenset(TABLES) | frozenset(read_views())
    names = _find_names(query)
    return names.union(*(find_references()[name] for name in names if name in read_views()))


def _find_names(text: str) -> frozenset[str]:
    words = set(re.findall(r"\w+", text.lower()))
    return frozenset(words & (TABLES.keys() | read_views().keys()))


def _read_scripts() -> list[tuple[str, str]]:
    """Return name and text of the files of `lake/sql`: `20_latest_scores.sql` holds `latest_scores`."""
    folder = resources.files("lake") / "sql"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return [(file.name[3:-4], file.read_text(encoding="utf-8")) for file in files]


def hidden_table(hidden_set: int) -> str:
    """Return the name of the table with the episode_ids of a set of hidden episodes (`DataFile.hidden_set`)."""
    return f"hidden.retracted_{hidden_set}"


_BY_CLOCK = """
SELECT * REPLACE (
    CASE WHEN event <> 'started' THEN
        max(epoch_us("at")) FILTER (event <> 'started') OVER (ORDER BY sequence ROWS UNBOUNDED PRECEDING)
    END AS sequence,
    CASE WHEN input_snapshot LIKE '{{%"jobs"%' THEN
        CAST(json_merge_patch(input_snapshot, json_object('jobs', epoch_us("at"))) AS VARCHAR)
    ELSE input_snapshot END AS input_snapshot
) FROM ({body})
"""
"""SQL: one lake's rows of `jobs` with end times (microseconds) for versions, in `sequence` and `input_snapshot`."""


def table_sql(
    table: Table,
    files: Sequence[DataFile],
    *,
    hide: Collection[int] = (),
    where: str = "",
    by_clock: bool = False,
    columns: Collection[str] | None = None,
    complete: Collection[str] = (),
) -> str:
    """Return a table's visible rows as SQL.

    Args:
        hide: sets of hidden episodes to leave out (`hidden_table`).
        where: a condition that holds for every row the query needs; DuckDB skips parts of files by it.
        by_clock: replace versions by microseconds, for `jobs` of several lakes, whose versions cannot be compared.
        columns: the columns that are read, as in `cached_table_sql`; None reads all. DuckDB takes longer to bind all
            columns of a wide table than to answer most queries.
        complete: paths of files that have all columns (`find_complete`).
    """
    if not files:
        nulls = ", ".join(f"CAST(NULL AS {c.sql_type}) AS {quote_name(c.name)}" for c in table.columns)
        return f"SELECT {nulls} WHERE false"
    if columns is not None:
        columns = {*columns, *table.key, "write_id", *(("episode_id",) if hide else ()), *_WORD.findall(where)}
    alike: dict[tuple[int, tuple[int, ...], bool], list[str]] = defaultdict(list)
    for file in files:
        alike[file.hidden_set, tuple(sorted(file.dead)), file.path in complete].append(file.path)
    selects: dict[int, list[str]] = defaultdict(list)
    for (hidden_set, dead, is_complete), paths in sorted(alike.items()):
        conditions = [where] if where else []
        if dead:
            conditions.append(f"write_id NOT IN ({', '.join(map(str, dead))})")
        # Complete files are read without a schema; their folders' names give no columns.
        source = (
            f"read_parquet([{', '.join(map(quote_text, paths))}], hive_partitioning = false)"
            if is_complete
            else read_parquet_sql(table, paths, columns)
        )
        condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        names = _select_list(table, None if is_complete else columns)
        selects[hidden_set].append(f"SELECT {names} FROM {source}{condition}")
    bodies = []
    for hidden_set, of_set in selects.items():
        body = " UNION ALL ".join(of_set)
        if hidden_set in hide:
            body = f"SELECT * FROM ({body}) ANTI JOIN {hidden_table(hidden_set)} USING (episode_id)"
        bodies.append(_BY_CLOCK.format(body=body) if by_clock else body)
    body = " UNION ALL ".join(bodies)
    if table.distinct:
        key = ", ".join(map(quote_name, table.key))
        body = f"SELECT * FROM ({body}) QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY write_id) = 1"
    return body


def cached_table_sql(table: Table, names: Sequence[str], columns: Collection[str], *, hide: bool = False) -> str:
    """Return a table's rows as SQL over registered in-memory tables.

    Args:
        columns: the columns that are in memory; all others are NULL.
        hide: leave out the episodes of `hidden_table(0)`; the cache holds rows of one lake only.
    """
    return cached_rows_sql(names, _select_list(table, columns), hide=hide)


def _select_list(table: Table, columns: Collection[str] | None) -> str:
    """List the columns of a table; columns outside `columns` are NULL, so that a query may name but not read them.

    The query's plan reads no such column (`lake.read.query_pruning`), so no answer depends on the NULL. An error in
    place of NULL would be safer, but DuckDB evaluates some columns before it drops them.
    """
    return ", ".join(
        quote_name(c.name) if columns is None or c.name in columns else f"NULL::{c.sql_type} AS {quote_name(c.name)}"
        for c in table.columns
    )


def cached_rows_sql(names: Sequence[str], select_list: str = "*", *, hide: bool = False) -> str:
    """Return the rows of registered in-memory tables as SQL, optionally without the episodes of `hidden_table(0)`."""
    body = " UNION ALL ".join(f"SELECT {select_list} FROM {name}" for name in names)
    return f"SELECT * FROM ({body}) ANTI JOIN {hidden_table(0)} USING (episode_id)" if hide else body


def view_over_files_sql(view: str, table: Table, files: Sequence[DataFile], complete: Collection[str] = ()) -> str:
    """Return a shipped view over selected files of the one table it reads, as SQL; `complete` as in `table_sql`."""
    body = read_views()[view].partition("CREATE VIEW")[2].partition(" AS")[2].rstrip("; \n")
    return f"WITH {table.name} AS ({table_sql(table, files, complete=complete)}) SELECT * FROM ({body})"


def read_parquet_sql(table: Table, paths: Iterable[str], columns: Collection[str] | None = None) -> str:
    """Return a call of read_parquet that takes columns (None: all) and types from the table, not from the files."""
    schema = ", ".join(
        f"{quote_text(c.name)}: {{name: {quote_text(c.name)}, type: {quote_text(c.sql_type)}, default_value: NULL}}"
        for c in table.columns
        if columns is None or c.name in columns
    )
    return f"read_parquet([{', '.join(map(quote_text, paths))}], schema = MAP {{{schema}}})"


def quote_name(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Quote a text for SQL."""
    return "'" + text.replace("'", "''") + "'"
