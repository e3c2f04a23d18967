"""The renderings of every table as text, for the golden files and the test that compares with them.

The fifth rendering, markdown, has its golden file in docs/reference/tables.md.
"""

import json
from collections.abc import Callable
from pathlib import Path

from deltalake import Schema

from lake.tables import TABLES
from lake.tables.columns import Table

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tables"


def arrow(table: Table) -> str:
    """One line per field: name, type, nullable."""
    return "".join(f"{f.name}: {f.type}{'' if f.nullable else ' not null'}\n" for f in table.arrow())


def polars(table: Table) -> str:
    """One line per column: name and type."""
    return "".join(f"{name}: {dtype!r}\n" for name, dtype in table.polars().items())


def delta(table: Table) -> str:
    """The schema as Delta's log stores it, one line per field."""
    fields = json.loads(Schema.from_arrow(table.arrow()).to_json())["fields"]
    return "".join(f"{json.dumps(field, sort_keys=True)}\n" for field in fields)


def sql(table: Table) -> str:
    """DuckDB's DDL."""
    return table.sql() + ";\n"


RENDERINGS: dict[str, Callable[[Table], str]] = {
    "arrow.txt": arrow,
    "polars.txt": polars,
    "delta.txt": delta,
    "duckdb.txt": sql,
}
"""Golden file -> rendering of one table."""


def golden_text(file_name: str) -> str:
    """What a golden file has to hold: all tables in order, each under its name."""
    render = RENDERINGS[file_name]
    return "".join(f"==== {name}\n{render(table)}\n" for name, table in TABLES.items())
