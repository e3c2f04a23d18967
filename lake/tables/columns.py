"""Column and Table: the definition of a table, and its renderings for Arrow, Polars, Delta and SQL.

The types are deliberately few. Delta's oldest protocol stores all of them (no unsigned integers, no column mapping, no
deletion vectors), so any engine reads a lake. Free-form payloads are JSON strings; values that queries filter or
aggregate have separate columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


class Type(StrEnum):
    """The closed set of column types."""

    ID = "id"
    """A 63-bit hash in an int64; users see 13 base32 characters."""
    INT = "int64"
    """A count or an index."""
    SMALL_INT = "int32"
    """A count that stays below 2^31."""
    FLOAT = "float64"
    """A reward, a return, an advantage: float64 because sums of centred values lose digits."""
    BOOL = "bool"
    """True, false, or NULL for unknown."""
    TEXT = "text"
    """UTF-8 text."""
    WORD = "word"
    """Text with few distinct values (names, states): dictionary-encoded, three times faster to group by."""
    JSON = "json"
    """A JSON document in UTF-8."""
    TIME = "timestamp"
    """UTC, microseconds."""
    BYTES = "bytes"
    """Raw bytes."""
    IDS = "list<id>"
    """Ids, none NULL."""
    TOKENS = "list<int32>"
    """Token ids, none NULL."""
    FLOATS = "list<float32>"
    """A number for each token or step, none NULL; log-probabilities and entropies are in nats."""
    MASK = "list<bool>"
    """One flag per token, none NULL."""

    @property
    def is_list(self) -> bool:
        """Whether a value is a list."""
        return self.value.startswith("list<")


_ENGINES: dict[Type, tuple[str, str, str]] = {
    Type.ID: ("BIGINT", "int64", "Int64"),
    Type.INT: ("BIGINT", "int64", "Int64"),
    Type.SMALL_INT: ("INTEGER", "int32", "Int32"),
    Type.FLOAT: ("DOUBLE", "float64", "Float64"),
    Type.BOOL: ("BOOLEAN", "bool_", "Boolean"),
    Type.TEXT: ("VARCHAR", "string", "String"),
    Type.WORD: ("VARCHAR", "string", "String"),
    Type.JSON: ("VARCHAR", "string", "String"),
    Type.TIME: ("TIMESTAMP WITH TIME ZONE", "", ""),
    Type.BYTES: ("BLOB", "binary", "Binary"),
    Type.IDS: ("BIGINT[]", "int64", "Int64"),
    Type.TOKENS: ("INTEGER[]", "int32", "Int32"),
    Type.FLOATS: ("FLOAT[]", "float32", "Float32"),
    Type.MASK: ("BOOLEAN[]", "bool_", "Boolean"),
}
"""Names of the types in DuckDB, Arrow and Polars; for lists the last two name the elements."""
_WITH_STATISTICS = frozenset(("write_id", "run_id", "group_id", "episode_id", "job_id", "series_id"))


@cache
def _arrow(kind: Type) -> pa.DataType:
    import pyarrow as pa

    plain = pa.timestamp("us", tz="UTC") if kind is Type.TIME else getattr(pa, _ENGINES[kind][1])()
    return pa.list_(pa.field("element", plain, nullable=False)) if kind.is_list else plain


@cache
def _polars(kind: Type) -> pl.DataType:
    import polars as pl

    plain: pl.DataType = pl.Datetime("us", "UTC") if kind is Type.TIME else getattr(pl, _ENGINES[kind][2])()
    return pl.List(plain) if kind.is_list else plain


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, type and meaning."""

    name: str
    type: Type
    meaning: str
    required: bool = False
    """NULL is not allowed."""
    values: tuple[str, ...] = ()
    """The closed vocabulary of a WORD column, if it has one."""

    @property
    def sql_type(self) -> str:
        """The column's type in DuckDB."""
        return _ENGINES[self.type][0]


class Visibility(StrEnum):
    """When a committed row becomes visible to readers; `lake.read.snapshot` applies it."""

    ALWAYS = "always"
    """When its commit is in the snapshot."""
    ACCEPTED = "accepted"
    """When `episodes` or the terminal row of a succeeded job has its write_id."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its grain, key, columns and visibility."""

    name: str
    grain: str
    """The meaning of one row."""
    key: tuple[str, ...]
    """Columns that identify a visible row."""
    sort: tuple[str, ...]
    """Order of rows in a file."""
    row_bytes: int
    """Typical uncompressed width of a row, which determines the size of row groups."""
    columns: tuple[Column, ...]
    visibility: Visibility = Visibility.ACCEPTED
    distinct: bool = False
    """A set: readers see rows of equal key as one row, so writing a fact again changes nothing."""
    hides_retracted: bool = False
    """Readers do not see rows of retracted episodes."""

    def column(self, name: str) -> Column:
        """Return the column of a name. Raises KeyError: no such column."""
        return {column.name: column for column in self.columns}[name]

    @property
    def statistics(self) -> tuple[str, ...]:
        """Columns whose minimum and maximum the log has for every file.

        They decide visibility, and files are sorted by them. More columns would make every commit slower.
        """
        return tuple(c.name for c in self.columns if c.name in _WITH_STATISTICS)

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return [column.name for column in self.columns]

    def arrow(self) -> pa.Schema:
        """Return the table's Arrow schema, required columns not nullable; Delta's schema is rendered from it."""
        import pyarrow as pa

        return pa.schema([pa.field(c.name, _arrow(c.type), nullable=not c.required) for c in self.columns])

    def polars(self) -> pl.Schema:
        """Return the table's Polars schema."""
        import polars as pl

        return pl.Schema({c.name: _polars(c.type) for c in self.columns})

    def sql(self) -> str:
        """Return the table's DuckDB DDL."""
        lines = [f'  "{c.name}" {c.sql_type}{" NOT NULL" if c.required else ""}' for c in self.columns]
        return f'CREATE TABLE "{self.name}" (\n' + ",\n".join(lines) + "\n)"

    def markdown(self) -> str:
        """Return the table's section of the reference page."""
        head = f"## {self.name}\n\n{self.grain} Key: {', '.join(f'`{k}`' for k in self.key)}."
        if self.visibility is Visibility.ACCEPTED:
            head += " A row exists for readers once its `write_id` is accepted."
        if self.distinct:
            head += " A set: the same fact written twice is one row for readers."
        if self.hides_retracted:
            head += " Rows of retracted episodes are not shown."
        rows = [
            f"| `{c.name}` | {c.type.value} | {'no' if c.required else 'yes'} | "
            + c.meaning
            + (f" One of: {', '.join(f'`{v}`' for v in c.values)}." if c.values else "")
            + " |"
            for c in self.columns
        ]
        return "\n".join([head, "", "| column | type | NULL | meaning |", "| --- | --- | --- | --- |", *rows, ""])


WRITE_ID = Column("write_id", Type.ID, "The write attempt that wrote the row.", required=True)
EPISODE = Column("episode_id", Type.ID, "Hash of the group's key and (rollout, attempt, agent).", required=True)
STEP = Column("step_index", Type.SMALL_INT, "0, 1, 2, ... within the episode, without gaps.", required=True)
GROUP = Column(
    "group_id", Type.ID, "Siblings from one identical start: hash of (format, run, round, task, seed).", required=True
)
RUN = Column("run_id", Type.WORD, "The run that produced the rollout.", required=True)
JOB = Column("job_id", Type.ID, "The job that wrote the row.", required=True)
SERIES = Column("series_id", Type.ID, "Hash of the job's kind, parameters and code.", required=True)
ATTEMPT = Column("attempt", Type.SMALL_INT, "0, 1, 2, ...: how often the job was started again.", required=True)
