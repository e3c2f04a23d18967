"""The SQL names of a lake: tables over file lists, the shipped views and macros, and which of them a query mentions.

A table is a view over its snapshot's Parquet files. Its columns and types are given to DuckDB, so that binding opens no
file: columns younger than a file read as NULL, and nothing needs every file's footer before the first row.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from importlib import resources

from lake import ids
from lake.read.empty_states import EMPTY_STATES
from lake.read.visibility import DataFile
from lake.tables import TABLES
from lake.tables.columns import Table

_CATALOG = re.compile(
    r"^\s*\(?\s*(show|describe|desc)\b|\b(information_schema|duckdb_\w+|pg_\w+|sqlite_\w+|pragma_\w+|show)\b", re.I
)
"""Queries about what there is, for which everything has to be there."""
_WORD = re.compile(r"\w+")


@lru_cache(maxsize=1)
def macros() -> list[str]:
    """The shipped macros, as SQL."""
    filled_in = {"{alphabet}": ids.ALPHABET, "{empty_states}": ", ".join(map(str, EMPTY_STATES))}
    found = [text for _, text in _scripts() if "CREATE MACRO" in text]
    for name, value in filled_in.items():
        found = [text.replace(name, value) for text in found]
    return found


@lru_cache(maxsize=1)
def views() -> dict[str, str]:
    """The shipped views, as SQL by name, in the order in which they build on one another."""
    return {name: text for name, text in _scripts() if "CREATE VIEW" in text}


_COLUMN = re.compile(r"--   (\w+): (.+)")
_CONTINUED = re.compile(r"--       (.+)")


@lru_cache(maxsize=1)
def meanings() -> dict[str, dict[str, str]]:
    """What the columns of the shipped views hold, by view and column, as the comments above their SQL say.

    `-- Columns: those of `TABLE`` stands for the columns of tables; a line `--   NAME: meaning` is for one column.
    """
    return {name: _meanings(text.partition("CREATE VIEW")[0]) for name, text in views().items()}


def _meanings(comment: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in comment.splitlines():
        if line.startswith("-- Columns: "):
            tables = [word for word in re.findall(r"`(\w+)`", line) if word in TABLES]
            # Of a column that several have, the one that is named first says what it is.
            found = {c.name: c.meaning for table in reversed(tables) for c in TABLES[table].columns}
        elif (own := _COLUMN.fullmatch(line)) is not None:
            name = own[1]
            found[name] = own[2]
        elif (more := _CONTINUED.fullmatch(line)) is not None:
            found[name] += f" {more[1]}"
    return found


@lru_cache(maxsize=1)
def references() -> dict[str, frozenset[str]]:
    """View -> the tables and views that it builds on, directly or through other views."""
    found: dict[str, frozenset[str]] = {}
    for name, text in views().items():
        direct = _known(re.sub(r"--[^\n]*", "", text)) - {name}
        found[name] = direct.union(*(found[view] for view in direct if view in found))
    return found


def mentioned(query: str) -> frozenset[str]:
    """Tables and views that a query may need: those whose names stand in it, and what these build on.

    A name in a text or a comment counts too: a table too many costs a little, a table too few would be an error.
    """
    if _CATALOG.search(query):
        return frozenset(TABLES) | frozenset(views())
    names = _known(query)
    return names.union(*(references()[name] for name in names if name in views()))


def _known(text: str) -> frozenset[str]:
    words = set(re.findall(r"\w+", text.lower()))
    return frozenset(words & (TABLES.keys() | views().keys()))


def _scripts() -> list[tuple[str, str]]:
    """Name and text of the files of `lake/sql`: `20_latest_scores.sql` holds `latest_scores`."""
    folder = resources.files("lake") / "sql"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return [(file.name[3:-4], file.read_text(encoding="utf-8")) for file in files]


def hidden(place: int) -> str:
    """Table with the episode_ids that readers do not see in the files of a place."""
    return f"hidden.retracted_{place}"


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
"""SQL: a lake's rows of `jobs` with times in place of versions: `sequence` by their own order, and what they read."""


def table_sql(
    table: Table,
    files: Sequence[DataFile],
    *,
    hide: Collection[int] = (),
    where: str = "",
    by_clock: bool = False,
    columns: Collection[str] | None = None,
    whole: Collection[str] = (),
) -> str:
    """A table's visible rows as SQL.

    Args:
        hide: places whose files have hidden episodes (`hidden`).
        where: a condition that every wanted row meets; it lets DuckDB skip parts of files.
        by_clock: of `jobs` of several lakes, whose versions cannot be compared: microseconds stand for them.
        columns: those that are read, as in `kept_sql`; None is all. To name all that a wide table has takes DuckDB
            longer than most queries take.
        whole: paths of files that have all columns (`lake.read.footers`).
    """
    if not files:
        nothing = ", ".join(f"CAST(NULL AS {c.sql_type}) AS {quoted_name(c.name)}" for c in table.columns)
        return f"SELECT {nothing} WHERE false"
    if columns is not None:
        columns = {*columns, *table.key, "write_id", *(("episode_id",) if hide else ()), *_WORD.findall(where)}
    alike: dict[tuple[int, tuple[int, ...], bool], list[str]] = defaultdict(list)
    for file in files:
        alike[file.place, tuple(sorted(file.dead)), file.path in whole].append(file.path)
    of_places: dict[int, list[str]] = defaultdict(list)
    for (place, dead, is_whole), paths in sorted(alike.items()):
        conditions = [where] if where else []
        if dead:
            conditions.append(f"write_id NOT IN ({', '.join(map(str, dead))})")
        source = _as_they_are(paths) if is_whole else parquet(table, paths, columns)
        condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        of_places[place].append(f"SELECT {_listed(table, None if is_whole else columns)} FROM {source}{condition}")
    places = []
    for place, parts in of_places.items():
        body = " UNION ALL ".join(parts)
        if place in hide:
            body = f"SELECT * FROM ({body}) ANTI JOIN {hidden(place)} USING (episode_id)"
        places.append(_BY_CLOCK.format(body=body) if by_clock else body)
    body = " UNION ALL ".join(places)
    if table.distinct:
        key = ", ".join(map(quoted_name, table.key))
        body = f"SELECT * FROM ({body}) QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY write_id) = 1"
    return body


def kept_sql(table: Table, names: Sequence[str], columns: Collection[str], *, hide: bool = False) -> str:
    """As `table_sql`, of rows in memory that a connection has under these names, in parts.

    Args:
        columns: those that are in memory; the others are NULL.
        hide: leave out the episodes of `hidden(0)`: rows of one lake alone are held.
    """
    return held_sql(names, _listed(table, columns), hide=hide)


def _listed(table: Table, columns: Collection[str] | None) -> str:
    """The columns of a table; those that are not there are NULL, so that a query may name what it does not read.

    There is a plan that reads none of them (`lake.read.query_pruning`), so no answer can depend on them. An error in
    their place would be safer, but DuckDB evaluates some columns that it then drops.
    """
    return ", ".join(
        quoted_name(c.name) if columns is None or c.name in columns else f"NULL::{c.sql_type} AS {quoted_name(c.name)}"
        for c in table.columns
    )


def held_sql(names: Sequence[str], listed: str = "*", *, hide: bool = False) -> str:
    """Rows in memory that a connection has under these names, in parts; perhaps without those of `hidden(0)`."""
    body = " UNION ALL ".join(f"SELECT {listed} FROM {name}" for name in names)
    return f"SELECT * FROM ({body}) ANTI JOIN {hidden(0)} USING (episode_id)" if hide else body


def over_sql(view: str, table: Table, files: Sequence[DataFile], whole: Collection[str] = ()) -> str:
    """A shipped view over some files alone of the one table that it reads, as SQL; `whole` as in `table_sql`."""
    body = views()[view].partition("CREATE VIEW")[2].partition(" AS")[2].rstrip("; \n")
    return f"WITH {table.name} AS ({table_sql(table, files, whole=whole)}) SELECT * FROM ({body})"


def parquet(table: Table, paths: Iterable[str], columns: Collection[str] | None = None) -> str:
    """A call of read_parquet that takes columns (None: all) and types from the spec, not from the files."""
    schema = ", ".join(
        f"{quoted(c.name)}: {{name: {quoted(c.name)}, type: {quoted(c.sql_type)}, default_value: NULL}}"
        for c in table.columns
        if columns is None or c.name in columns
    )
    return f"read_parquet([{', '.join(map(quoted, paths))}], schema = MAP {{{schema}}})"


def _as_they_are(paths: Iterable[str]) -> str:
    """A call of read_parquet that takes columns and types from the files, and none from the names of folders."""
    return f"read_parquet([{', '.join(map(quoted, paths))}], hive_partitioning = false)"


def quoted_name(name: str) -> str:
    """A name as SQL."""
    return '"' + name.replace('"', '""') + '"'


def quoted(text: str) -> str:
    """A text as SQL."""
    return "'" + text.replace("'", "''") + "'"
