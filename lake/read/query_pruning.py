"""Choosing the files that a query may need: the conditions that DuckDB pushes down, against the log's statistics.

DuckDB plans the query over empty tables of the lake's schema. Only optimizers that move conditions are on, since others
would drop scans of empty tables. The plan shows the conditions of each scan of a table, through views, joins, macros
and parameters. A file is left out if every scan of its table excludes it. A condition in an unknown form excludes
nothing, so answers stay right if a new DuckDB prints conditions in another form. tests/unit/test_lake_query_pruning.py
fails then.
"""

import atexit
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import duckdb
import msgspec

from lake.read import query_views
from lake.read.parquet import DataFile
from lake.tables import TABLES
from lake.tables.columns import Table

Key = int | str
_MOVE_FILTERS = (
    "expression_rewriter",
    "filter_pullup",
    "filter_pushdown",
    "cte_filter_pusher",
    "cte_inlining",
    "deliminator",
    "unused_columns",
)
"""Optimizers that only move conditions."""
_WITH_EPISODE_KEYS = ("episodes", "steps", "tokens", "spans")
"""Tables whose rows have the run_id and group_id of their episode, and its write_id unless a job wrote them."""
FEW_FILES = 16
FEW_BYTES = 64 << 20
_MOST_IDS = 100
"""Largest number of ids in a condition whose episodes are looked up."""
_MOST_EPISODES = 16
"""Largest number of episodes in a condition whose groups are looked up."""
CONDITIONS = re.compile(r"\b(where|having|qualify|join|on|filter)\b", re.IGNORECASE)
_LONGEST_TEXT = 500
_INTEGER = r"-?\d+"
_TEXT = r"'(?:[^']|'')*'"
_VALUE = rf"{_INTEGER}|{_TEXT}"
_COMPARISON = re.compile(rf"\((\w+) (=|>=|<=|>|<) ({_VALUE})\)")
_BETWEEN = re.compile(rf"\(\((\w+) >= ({_VALUE})\) AND \(\1 <= ({_VALUE})\)\)")
_IN_LIST = re.compile(rf"(?:optional: )?\((\w+) IN \(((?:{_VALUE})(?:, (?:{_VALUE}))*)\)\)")
_EACH = re.compile(_VALUE)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a column: one of the values, or a closed range; None means no bound."""

    column: str
    values: frozenset[Key] | None = None
    low: Key | None = None
    high: Key | None = None

    def excludes(self, low: Key, high: Key) -> bool:
        """Return whether no value from `low` to `high` meets the condition."""
        if self.values is not None:
            return all(_less(value, low) or _less(high, value) for value in self.values)
        return (self.low is not None and _less(high, self.low)) or (self.high is not None and _less(self.high, low))


Scan = tuple[Condition, ...]
"""Conditions that all needed rows of one scan meet."""


class ReadPlan(NamedTuple):
    """What a query reads of tables, by name; a query may need every row and column of a table that is missing here."""

    scans: dict[str, list[Scan]]
    """Conditions of each scan of a table."""
    columns: dict[str, set[str]]
    """Columns that the query reads, including those in conditions."""


class EpisodeOrigin(NamedTuple):
    """The write, run and group of an episode, which locate its rows."""

    write_id: int
    run_id: str
    group_id: int


def excludes_file(file: DataFile, scan: Scan) -> bool:
    """Return whether the log's minimum and maximum show that a file has no row for a scan."""
    ranges = ((condition, *file.ranges.get(condition.column, (None, None))) for condition in scan)
    return any(
        low is not None and high is not None and condition.excludes(low, high) for condition, low, high in ranges
    )


def choose_files(
    table: Table,
    files: Sequence[DataFile],
    scans: Sequence[Scan],
    find_origins: Callable[[Condition], Collection[EpisodeOrigin]],
    episode_writes: Callable[[], Collection[int]],
) -> tuple[list[DataFile], str]:
    """Return the files of a table that a query may need, and a condition that all needed rows meet ("" if unknown).

    Ids are hashes, so a file's smallest and largest episode_id exclude little. `episodes` has the write and group of an
    episode, and these identify its files, even after compaction, which sorts by run and group. The look-up in
    `episodes` costs time, so it happens only if much data would be read.

    Args:
        scans: conditions of each scan of the table.
        find_origins: origins of the episodes that meet a condition on `episode_id` or `group_id`; empty if unknown.
        episode_writes: write attempts that wrote episodes.
    """
    if not scans:
        return list(files), ""
    if table.distinct:
        # The choice of files must not change which of two equal rows is shown, so only conditions on the key count.
        scans = [tuple(c for c in scan if c.column in table.key) for scan in scans]
    files = [file for file in files if not all(excludes_file(file, scan) for scan in scans)]
    if table.name not in _WITH_EPISODE_KEYS or not is_much(files):
        return files, ""
    groups: set[int] = set()
    refined_scans = []
    for scan in scans:
        by_id = next((c for c in scan if c.column in ("episode_id", "group_id") and c.values), None)
        origins = find_origins(by_id) if by_id is not None and len(by_id.values or ()) <= _MOST_IDS else ()
        if not origins:
            return files, ""
        groups |= {origin.group_id for origin in origins}
        runs = frozenset[Key](origin.run_id for origin in origins)
        of_scan = frozenset[Key](origin.group_id for origin in origins)
        writes = frozenset(origin.write_id for origin in origins)
        refined_scans.append(((*scan, Condition("run_id", runs), Condition("group_id", of_scan)), writes))
    of_episodes = frozenset(episode_writes())
    files = [
        file
        for file in files
        if not all(
            (file.write_id in of_episodes and file.write_id not in writes) or excludes_file(file, scan)
            for scan, writes in refined_scans
        )
    ]
    return files, "group_id IN (" + ", ".join(map(str, sorted(groups))) + ")" if len(groups) <= _MOST_IDS else ""


def find_groups(
    table: Table, scans: Sequence[Scan], find_origins: Callable[[Condition], Collection[EpisodeOrigin]]
) -> frozenset[int]:
    """Return the groups of all rows that the scans of a table need; empty if unknown."""
    groups: set[int] = set()
    for scan in scans:
        by = {condition.column: condition for condition in scan if condition.values}
        if "group_id" in by:
            groups.update(value for value in by["group_id"].values or () if isinstance(value, int))
        elif table.name == "episodes" and "episode_id" in by and len(by["episode_id"].values or ()) <= _MOST_EPISODES:
            groups.update(origin.group_id for origin in find_origins(by["episode_id"]))
        else:
            return frozenset()
    return frozenset(groups)


def is_much(files: Sequence[DataFile]) -> bool:
    """Return whether the files are so many or so large that planning the query can save time."""
    return len(files) > FEW_FILES or sum(file.bytes for file in files) > FEW_BYTES


class Planner:
    """An in-memory database with the lake's tables, empty, and its views, in which queries are planned.

    It never opens a lake, so a process needs one; calls may come from any thread.
    """

    def __init__(self) -> None:
        self._connection = duckdb.connect(":memory:", config={"memory_limit": "256MB", "threads": 1})
        self._connection.execute(";".join(table.sql() for table in TABLES.values()))
        self._connection.execute(";".join([*query_views.read_macros(), *query_views.read_views().values()]))
        optimizers = [name for (name,) in self._connection.execute("SELECT name FROM duckdb_optimizers()").fetchall()]
        disabled = ",".join(name for name in optimizers if name not in _MOVE_FILTERS)
        self._connection.execute(f"SET disabled_optimizers = '{disabled}'")
        self._connection.execute("SET enable_external_access = false; SET lock_configuration = true")

    def columns(self, name: str) -> list[tuple[str, str]]:
        """Return names and SQL types of the columns of a table or view."""
        rows = self._connection.cursor().execute(f"DESCRIBE {query_views.quote_name(name)}").fetchall()
        return [(row[0], row[1]) for row in rows]

    def plan(
        self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None, seconds: float = 1.0
    ) -> ReadPlan:
        """Return what a query reads of each table; an empty plan if DuckDB cannot plan it within the time."""
        cursor = self._connection.cursor()
        timer = threading.Timer(seconds, cursor.interrupt)
        timer.daemon = True
        timer.start()
        try:
            plans = cursor.execute(f"EXPLAIN (FORMAT json) {query}", params or None).fetchall()
        except (duckdb.Error, RuntimeError):
            return ReadPlan({}, {})
        finally:
            timer.cancel()
            cursor.close()
        plan = ReadPlan({}, {})
        nodes = [node for _, text in plans for node in msgspec.json.decode(text)]
        while nodes:
            node = nodes.pop(0)
            nodes = [*node.get("children", []), *nodes]
            details = node.get("extra_info", {})
            if isinstance(details, dict) and "Table" in details:
                name = str(details["Table"]).rpartition(".")[2]
                filters = _list_texts(details.get("Filters"))
                plan.scans.setdefault(name, []).append(tuple(filter(None, map(parse_condition, filters))))
                # Words of a condition that are no columns do no harm.
                words = (word for text in filters for word in _WORD.findall(text))
                plan.columns.setdefault(name, set()).update(_list_texts(details.get("Projections")), words)
        return plan

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@lru_cache(maxsize=1)
def get_planner() -> Planner:
    """Return the planner of this process."""
    planner = Planner()
    atexit.register(planner.close)
    return planner


def _list_texts(field: str | list[str] | None) -> list[str]:
    """Return a field of a plan as a list: DuckDB prints one text as a string, several as a list, none as nothing."""
    return [field] if isinstance(field, str) and field else list(field or ())


def parse_condition(text: str) -> Condition | None:
    """Parse a condition as DuckDB prints it; None for other forms and for texts so long that DuckDB may cut them."""
    if len(text) > _LONGEST_TEXT and "'" in text:
        return None
    if match := _COMPARISON.fullmatch(text):
        column, operator, value = match[1], match[2], _parse_value(match[3])
        if operator == "=":
            return Condition(column, frozenset((value,)))
        # A closed bound in place of an open one excludes almost the same files.
        return Condition(column, low=value) if operator in (">", ">=") else Condition(column, high=value)
    if match := _BETWEEN.fullmatch(text):
        return Condition(match[1], low=_parse_value(match[2]), high=_parse_value(match[3]))
    if match := _IN_LIST.fullmatch(text):
        return Condition(match[1], frozenset(map(_parse_value, _EACH.findall(match[2]))))
    return None


def _parse_value(text: str) -> Key:
    return text[1:-1].replace("''", "'") if text.startswith("'") else int(text)


def _less(key: Key, bound: Key) -> bool:
    """Compare as files do (UTF-8 bytes sort like code points); values of two types are never less."""
    if isinstance(key, str) and isinstance(bound, str):
        return key < bound
    return isinstance(key, int) and isinstance(bound, int) and key < bound
