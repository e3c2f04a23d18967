"""Which files a query cannot need: the conditions that DuckDB itself pushes down to a table, against the log's figures.

DuckDB plans the query over empty tables of the lake's schema, with every optimizer off that looks at data. The plan
then says which conditions each scan of a table applies, through views, joins, macros and parameters. A file may be
left out if every scan of its table excludes it. Whatever is not understood excludes nothing.
"""

import atexit
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import duckdb
import msgspec

from lake.read import query_views
from lake.read.visibility import DataFile
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
"""Optimizers that move conditions and nothing else. All others are off: over empty tables they would drop scans."""
_WITH_THEIR_EPISODE = ("episodes", "steps", "tokens", "spans")
"""Tables whose rows carry the run_id and group_id of their episode, and the write_id too unless a job wrote them."""
FEW_FILES = 16
FEW_BYTES = 64 << 20
_MANY = 100
"""Ids in a condition above which looking them up is not worth it."""
_FEW = 16
"""Episodes in a condition above which they may be of many groups."""
CONDITIONS = re.compile(r"\b(where|having|qualify|join|on|filter)\b", re.IGNORECASE)
_LONGEST_TEXT = 500
_INTEGER = r"-?\d+"
_TEXT = r"'(?:[^']|'')*'"
_VALUE = rf"{_INTEGER}|{_TEXT}"
_COMPARED = re.compile(rf"\((\w+) (=|>=|<=|>|<) ({_VALUE})\)")
_BETWEEN = re.compile(rf"\(\((\w+) >= ({_VALUE})\) AND \(\1 <= ({_VALUE})\)\)")
_AMONG = re.compile(rf"(?:optional: )?\((\w+) IN \(((?:{_VALUE})(?:, (?:{_VALUE}))*)\)\)")
_EACH = re.compile(_VALUE)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Condition:
    """What a column of a wanted row must be: one of the values, or in the closed range; None is no bound."""

    column: str
    values: frozenset[Key] | None = None
    low: Key | None = None
    high: Key | None = None

    def excludes(self, low: Key, high: Key) -> bool:
        """Whether no value between `low` and `high` will do."""
        if self.values is not None:
            return all(_less(value, low) or _less(high, value) for value in self.values)
        return (self.low is not None and _less(high, self.low)) or (self.high is not None and _less(self.high, low))


Scan = tuple[Condition, ...]
"""Conditions that every wanted row of one scan meets."""


class Plan(NamedTuple):
    """What a query wants of tables, by name; a table that is missing may be wanted whole."""

    scans: dict[str, list[Scan]]
    """One for each time that it reads the table."""
    columns: dict[str, set[str]]
    """Those that it reads, for its conditions too."""


class Origin(NamedTuple):
    """Where the rows of an episode are: the write that brought it, its run and its group."""

    write_id: int
    run_id: str
    group_id: int


def excluded(file: DataFile, scan: Scan) -> bool:
    """Whether the log's minimum and maximum say that a file has no row for a scan."""
    ranges = ((condition, *file.ranges.get(condition.column, (None, None))) for condition in scan)
    return any(low is not None and high is not None and one.excludes(low, high) for one, low, high in ranges)


def needed(
    table: Table,
    files: Sequence[DataFile],
    scans: Sequence[Scan],
    origins: Callable[[Condition], Collection[Origin]],
    episode_writes: Callable[[], Collection[int]],
) -> tuple[list[DataFile], str]:
    """Files of a table that a query may need, and a condition that all its wanted rows meet ("" if none is known).

    Ids are hashes, so a file's smallest and largest episode_id say little. `episodes` says in which write and group an
    episode lies, and that says in which files, also after compaction, which sorts by run and group. Asking it costs a
    look into `episodes`: only worth it where much is left to read.

    Args:
        scans: what the query wants of it, one for each time it reads the table.
        origins: where the episodes are that meet a condition on `episode_id` or `group_id`; empty if unknown.
    """
    if not scans:
        return list(files), ""
    if table.distinct:
        # Which of two equal rows is shown must not depend on the files: only conditions on the key may choose.
        scans = [tuple(c for c in scan if c.column in table.key) for scan in scans]
    left = [file for file in files if not all(excluded(file, scan) for scan in scans)]
    if table.name not in _WITH_THEIR_EPISODE or not much(left):
        return left, ""
    groups: set[int] = set()
    refined = []
    for scan in scans:
        asked = next((c for c in scan if c.column in ("episode_id", "group_id") and c.values), None)
        found = origins(asked) if asked is not None and len(asked.values or ()) <= _MANY else ()
        if not found:
            return left, ""
        groups |= {origin.group_id for origin in found}
        runs = frozenset[Key](origin.run_id for origin in found)
        of_scan = frozenset[Key](origin.group_id for origin in found)
        writes = frozenset(origin.write_id for origin in found)
        refined.append(((*scan, Condition("run_id", runs), Condition("group_id", of_scan)), writes))
    written = frozenset(episode_writes())
    left = [
        file
        for file in left
        if not all(
            (file.write_id in written and file.write_id not in writes) or excluded(file, scan)
            for scan, writes in refined
        )
    ]
    return left, "group_id IN (" + ", ".join(map(str, sorted(groups))) + ")" if len(groups) <= _MANY else ""


def groups_of(
    table: Table, scans: Sequence[Scan], origins: Callable[[Condition], Collection[Origin]]
) -> frozenset[int]:
    """The groups in which all rows lie that the scans of a table want; empty if that is not known."""
    found: set[int] = set()
    for scan in scans:
        by = {condition.column: condition for condition in scan if condition.values}
        if "group_id" in by:
            found.update(value for value in by["group_id"].values or () if isinstance(value, int))
        elif table.name == "episodes" and "episode_id" in by and len(by["episode_id"].values or ()) <= _FEW:
            found.update(origin.group_id for origin in origins(by["episode_id"]))
        else:
            return frozenset()
    return frozenset(found)


def much(files: Sequence[DataFile]) -> bool:
    """Whether so much is to be read that leaving some of it out is worth a look at the conditions."""
    return len(files) > FEW_FILES or sum(file.bytes for file in files) > FEW_BYTES


class Planner:
    """An in-memory database with the lake's tables, empty, and its views: where queries are planned.

    It never sees a lake, so one serves a whole process; calls may come from any thread.
    """

    def __init__(self) -> None:
        self._connection = duckdb.connect(":memory:", config={"memory_limit": "256MB", "threads": 1})
        self._connection.execute(";".join(table.sql() for table in TABLES.values()))
        self._connection.execute(";".join([*query_views.macros(), *query_views.views().values()]))
        optimizers = [name for (name,) in self._connection.execute("SELECT name FROM duckdb_optimizers()").fetchall()]
        off = ",".join(name for name in optimizers if name not in _MOVE_FILTERS)
        self._connection.execute(f"SET disabled_optimizers = '{off}'")
        self._connection.execute("SET enable_external_access = false; SET lock_configuration = true")

    def columns(self, name: str) -> list[tuple[str, str]]:
        """Names and SQL types of the columns of a table or view."""
        found = self._connection.cursor().execute(f"DESCRIBE {query_views.quoted_name(name)}").fetchall()
        return [(row[0], row[1]) for row in found]

    def plan(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None, seconds: float = 1.0) -> Plan:
        """What a query wants of each table; of nothing anything is known if it cannot be planned in so many seconds."""
        cursor = self._connection.cursor()
        timer = threading.Timer(seconds, cursor.interrupt)
        timer.daemon = True
        timer.start()
        try:
            plans = cursor.execute(f"EXPLAIN (FORMAT json) {query}", params or None).fetchall()
        except (duckdb.Error, RuntimeError):
            return Plan({}, {})
        finally:
            timer.cancel()
            cursor.close()
        found = Plan({}, {})
        for _, text in plans:
            for node in _nodes(msgspec.json.decode(text)):
                details = node.get("extra_info", {})
                if isinstance(details, dict) and "Table" in details:
                    name = str(details["Table"]).rpartition(".")[2]
                    filters = _texts(details.get("Filters"))
                    found.scans.setdefault(name, []).append(tuple(filter(None, map(parsed, filters))))
                    # A word of a condition that is no column does no harm.
                    words = (word for text in filters for word in _WORD.findall(text))
                    found.columns.setdefault(name, set()).update(_texts(details.get("Projections")), words)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@lru_cache(maxsize=1)
def planner() -> Planner:
    """The planner of this process."""
    planner = Planner()
    atexit.register(planner.close)
    return planner


def _nodes(tree: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in tree:
        yield node
        yield from _nodes(node.get("children", []))


def _texts(printed: str | list[str] | None) -> list[str]:
    """What DuckDB prints as a list if there are several, and as nothing if there are none."""
    return [printed] if isinstance(printed, str) and printed else list(printed or ())


def parsed(text: str) -> Condition | None:
    """A condition as DuckDB prints it, or None if it is of another kind, or has texts so long that they may be cut."""
    if len(text) > _LONGEST_TEXT and "'" in text:
        return None
    if found := _COMPARED.fullmatch(text):
        column, operator, value = found[1], found[2], _value(found[3])
        if operator == "=":
            return Condition(column, frozenset((value,)))
        # A strict bound excludes no more files than a loose one that matters.
        return Condition(column, low=value) if operator in (">", ">=") else Condition(column, high=value)
    if found := _BETWEEN.fullmatch(text):
        return Condition(found[1], low=_value(found[2]), high=_value(found[3]))
    if found := _AMONG.fullmatch(text):
        return Condition(found[1], frozenset(map(_value, _EACH.findall(found[2]))))
    return None


def _value(text: str) -> Key:
    return text[1:-1].replace("''", "'") if text.startswith("'") else int(text)


def _less(one: Key, other: Key) -> bool:
    """Order as in the file (UTF-8 bytes are ordered as code points are); values of two types are never ordered."""
    if isinstance(one, str) and isinstance(other, str):
        return one < other
    return isinstance(one, int) and isinstance(other, int) and one < other
