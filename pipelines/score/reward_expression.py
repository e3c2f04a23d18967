"""One SQL expression over component scores: what may stand in it, and its values.

The expression is text from a file, so it is taken apart by DuckDB's own parser before it is run, and only what an
arithmetic formula needs is let through: constants, the components' names, comparisons, CASE, and a list of functions.
What is run then sees one table in memory: no file, no network, no setting can be reached.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import polars as pl

from lake.errors import UsageError

OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "^")
ROUNDING = ("abs", "ceil", "ceiling", "floor", "round", "sign", "trunc", "greatest", "least")
CURVES = ("cos", "exp", "ln", "log", "log10", "log2", "pow", "power", "sin", "sqrt", "tanh")
CHOICES = ("coalesce", "if", "ifnull", "isfinite", "isinf", "isnan", "nullif")
FUNCTIONS = frozenset((*OPERATORS, *ROUNDING, *CURVES, *CHOICES))
"""Functions and operators that an expression may use."""
MOST_CHARACTERS = 4_000
_CLASSES = frozenset(("BETWEEN", "CASE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR"))
_BARE: dict[str, Any] = {
    "type": "SELECT_NODE",
    "modifiers": [],
    "cte_map": {"map": []},
    "where_clause": None,
    "group_expressions": [],
    "group_sets": [],
    "aggregate_handling": "STANDARD_HANDLING",
    "having": None,
    "sample": None,
    "qualify": None,
}
"""What a parsed SELECT of one expression has beside it: nothing."""
_NUMBERS = frozenset(("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "FLOAT", "DOUBLE"))


class Expression:
    """A checked expression over the components `names`.

    UsageError if it is not one expression, uses what it may not, names another column, or gives no number.
    """

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.text = text
        self._names = tuple(names)
        with _connection() as connection:
            _check(connection, text, self._names)
            unknown = pl.DataFrame(
                {name: [None] for name in self._names}, schema=dict.fromkeys(self._names, pl.Float64)
            )
            try:
                kind = str(_run(connection, f"SELECT typeof(({text}\n)) FROM components", unknown).fetchall()[0][0])
            except duckdb.Error as error:
                raise _refused(text, " ".join(str(error).split())) from error
            if kind not in _NUMBERS and not kind.startswith("DECIMAL"):
                raise _refused(text, f"it gives {kind}, not a number")

    def values(self, components: pl.DataFrame) -> pl.Series:
        """Its value in every row, float64, from Float64 components; NULL where SQL says so, or it has none."""
        placed = components.select(self._names).with_row_index("place")
        query = f"SELECT place, TRY(CAST(({self.text}\n) AS DOUBLE)) AS value FROM components"
        with _connection() as connection:
            found = pl.DataFrame(_run(connection, query, placed).to_arrow_table())
        return found.sort("place").get_column("value").cast(pl.Float64)


def _connection() -> duckdb.DuckDBPyConnection:
    """A connection that reaches nothing but what is registered in it."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "python_enable_replacements": False,
        "temp_directory": "",
    }
    connection = duckdb.connect(":memory:", config=settings)
    connection.execute("SET lock_configuration = true")
    return connection


def _run(connection: duckdb.DuckDBPyConnection, query: str, frame: pl.DataFrame) -> duckdb.DuckDBPyRelation:
    connection.register("components", frame.to_arrow())
    return connection.sql(query)


def _check(connection: duckdb.DuckDBPyConnection, text: str, names: Sequence[str]) -> None:
    if len(text) > MOST_CHARACTERS:
        raise _refused(text, f"it has {len(text):,} characters; valid: at most {MOST_CHARACTERS:,}")
    known = {name.lower() for name in names}
    for part in _parts(_parsed(connection, text)):
        kind = part["class"]
        if kind not in _CLASSES:
            raise _refused(text, f"it uses {kind}, which no formula over scores needs")
        if kind == "FUNCTION" and (part["function_name"].lower() not in FUNCTIONS or part.get("schema")):
            raise _refused(text, f"it uses {part['function_name']!r}; valid: {' '.join(sorted(FUNCTIONS))}")
        if kind == "COLUMN_REF" and (len(part["column_names"]) > 1 or part["column_names"][0].lower() not in known):
            name = ".".join(part["column_names"])
            raise _refused(text, f"it names {name!r}; valid: the components {', '.join(names)}")


def _parsed(connection: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    """The expression's tree, if the text is one expression and nothing else."""
    found = connection.execute("SELECT json_serialize_sql($1)", [f"SELECT {text}\n"]).fetchall()[0][0]
    parsed = json.loads(found)
    if parsed["error"]:
        raise _refused(text, " ".join(str(parsed.get("error_message")).split()))
    nodes = [statement["node"] for statement in parsed["statements"]]
    alone = len(nodes) == 1 and all(nodes[0].get(key) == value for key, value in _BARE.items())
    if not alone or nodes[0]["from_table"]["type"] != "EMPTY" or len(nodes[0]["select_list"]) != 1:
        raise _refused(text, "it is more than one expression")
    tree: dict[str, Any] = nodes[0]["select_list"][0]
    return tree


def _parts(tree: Any) -> Iterator[dict[str, Any]]:
    """Every expression of a tree."""
    stack = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if "class" in part:
                yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _refused(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 120 else f"{text[:117]}..."
    return UsageError(f"sql {shown!r}: {why}. Write one numeric expression over the components' scores")
