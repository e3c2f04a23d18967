"""Every read of the viewer, one module per subject: pure functions (lake, arguments) -> small Polars frame.

Queries do not use Streamlit. They bind values as parameters and never paste them into SQL. SQL filters, orders and
pages with LIMIT, and cuts texts, so that no page depends on the size of the lake. Ids are int64; unknown stays NULL.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import polars as pl

from lake.read import snapshot

P = ParamSpec("P")
T = TypeVar("T")
Params = dict[str, Any]
Row = dict[str, Any]

EXCERPT = 240
"""Characters of a text in a table cell."""
PAGE_ROWS = 25
"""Rows of a table page."""
NO_ADVANTAGES = "(SELECT * FROM advantages WHERE false)"
"""The relation that queries join where no credit is chosen."""


class LakeReader(snapshot.SnapshotReader, Protocol):
    """The lake as queries read it: `viewer.reader.Reader`."""

    def read(self, query: Callable[Concatenate["LakeReader", P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer of a query that is too expensive to compute twice in one state; see `Reader.read`."""
        ...

    def run_sizes(self) -> dict[str | None, int]:
        """Return the bytes of the tables' files by run; None: of no run."""
        ...

    def holding(self, text: str) -> pl.DataFrame:
        """Return the episodes that hold a text, or have it as an id; see `viewer.reader.Reader.holding`."""
        ...

    def members(self, group_id: int) -> list[int]:
        """Return the sorted episodes that a group was collected with, retracted ones included."""
        ...

    def vocabulary(self, encoding_id: int) -> dict[int, bytes] | None:
        """Return the bytes of each token of an encoding; None if the lake has no tokenizer of it."""
        ...

    def locked(self, query: str) -> pl.DataFrame:
        """Return the rows of an untrusted SELECT; see `viewer.reader.Reader.locked`."""
        ...


@dataclass(frozen=True, slots=True)
class ListWindow:
    """A page of a list: `limit` rows after the first `offset`."""

    limit: int = PAGE_ROWS
    offset: int = 0

    @classmethod
    def page(cls, number: int, rows: int = PAGE_ROWS) -> "ListWindow":
        """Return the window of a page, counted from 1."""
        return cls(rows, (number - 1) * rows)

    def params(self) -> Params:
        """Return the values of $limit and $offset."""
        return {"limit": self.limit, "offset": self.offset}


@dataclass(frozen=True, slots=True)
class Sort:
    """The column that orders a list."""

    column: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str | None) -> "Sort | None":
        """Read the form in an address: the column's name, with a `-` in front for descending order."""
        name = (text or "").removeprefix("-")
        return cls(name, (text or "").startswith("-")) if name else None

    def __str__(self) -> str:
        return f"-{self.column}" if self.descending else self.column


def order_by(sort: Sort | None, columns: Mapping[str, tuple[str, ...]], default: str) -> str:
    """Return the terms of ORDER BY: the sort column with NULLs last, then the default order.

    Args:
        columns: SQL terms by the name of a sort column; further terms break ties of the first. An unknown name leaves
            the default order.
    """
    if sort is None or sort.column not in columns:
        return default
    direction = "DESC" if sort.descending else "ASC"
    terms = [f"{term} {direction} NULLS LAST" for term in columns[sort.column]]
    return ", ".join([*terms, default])


def build_sort_terms(*names: str) -> dict[str, tuple[str, ...]]:
    """Return the `columns` of `order_by` for columns that are ordered by their values."""
    return {name: (f'"{name}"',) for name in names}


_BLANK = r"(?:\s|\\[nrt])*"
FAILURE = (
    r'"is_error": ?true|"exit_code": ?-?[1-9]|"observation": ?"error"'
    rf'|"(?:content|text)": ?"{_BLANK}(?:<returncode>|Exit code:? |Process exited with code )-?[1-9]'
    rf'|exit code [1-9][0-9]*\.?\]?{_BLANK}"'
    rf'|"(?:content|text)": ?"{_BLANK}(?:OBSERVATION:|ERROR:)?{_BLANK}'
    r"\[?(?:Your proposed edit has introduced|No exact match found|No replacement was performed)"
    r'|"role": ?"tool",[^{}]*(?:\[\{[^{}]*)?"(?:content|text)": ?"Error'
    r'|"content": ?"Error(?:[^"\\]|\\.)*",[^{}]*"role": ?"tool"'
)
"""Pattern of the JSON of results that failed: by a field, an exit code, their first words, or a refused edit."""


def build_replies_sql(episodes: str, next_steps: str = "true") -> str:
    """Return SQL of the replies to steps: episode_id, step_index of the answered step, is_error, is_empty, long_texts.

    A reply is the state and the messages of the next step, or the messages after the last step. It is an error if its
    source says so or the result of any call failed (`FAILURE`). is_empty is of the state, and NULL for the last step.
    long_texts has the messages with texts in `blobs`, which is_error does not know.

    Args:
        episodes: a condition on episode_id.
        next_steps: a condition on the steps after the answered ones.
    """
    state = "if(state_role IN ('tool', 'function') OR state_role = 'user' AND step_index > 0, state, NULL)"
    body = f"concat(context, json_object('role', state_role, 'content', {state}))"
    long_texts = "if(contains({0}, '\"blob:sha256:'), {0}, NULL)"
    return f"""(
        SELECT episode_id, step_index - 1 AS step_index, {long_texts.format("context")} AS long_texts,
               state_is_error OR regexp_matches({body}, '{FAILURE}') AS is_error, is_empty_state(state_hash) AS is_empty
        FROM steps WHERE {episodes} AND {next_steps}
        UNION ALL
        SELECT episode_id, num_steps - 1, {long_texts.format("final_observation")},
               regexp_matches(final_observation, '{FAILURE}'), NULL
        FROM episodes WHERE {episodes}
    )"""


def build_action_sql(steps: str) -> str:
    """Return SQL of a step's action: its text and its tool calls without their ids, which are random."""
    return f"({steps}.action, without_call_ids({steps}.tool_calls))"


def build_id_list(ids: Any) -> str:
    """Return ids for `IN (...)`. Literal ids let the lake read only the files that hold them."""
    return ", ".join(map(str, ids)) or "NULL"


def get_first_row(frame: pl.DataFrame) -> Row | None:
    """Return the first row as a dictionary, or None for an empty frame."""
    return frame.row(0, named=True) if frame.height else None


def count(lake: LakeReader, query: str, params: Params | None = None) -> int:
    """Return the value of a query that counts."""
    return int(lake.sql(query, params).item())


def quote_literal(value: Any) -> str:
    """Return a value as SQL, for queries that leave the viewer; the viewer's pages bind values."""
    if isinstance(value, list):
        return f"[{', '.join(map(quote_literal, value))}]"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def build_like_pattern(pattern: str) -> str:
    r"""Return a LIKE pattern (ESCAPE '\') for a text in which `*` matches any characters."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")


def bin_spans(frame: pl.DataFrame, limit: int = 400) -> pl.DataFrame:
    """Bin rows along the integer column `x` into at most `limit` equal spans; `x` and `last` become a span's ends."""
    if frame.is_empty():
        return frame.with_columns(last=pl.col("x"))
    first, last = frame.select(pl.col("x").min().alias("first"), pl.col("x").max().alias("last")).row(0)
    width = -(-(last - first + 1) // limit)
    start = first + (pl.col("x") - first) // width * width
    return frame.with_columns(x=start, last=start + width - 1)
