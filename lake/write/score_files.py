"""Rows of scores as somebody gave them, column by column: from CSV, JSON, JSON Lines, Parquet, or a frame.

What a cell may be is decided cell by cell, so that the first that is wrong can be named.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import FormatError, UsageError
from lake.formats.base.look import look
from lake.formats.base.rows import values
from lake.formats.base.source import Input, Source
from lake.records import Reject, excerpt

_TRUTHS = {"true": True, "false": False}
_SEPARATORS = ",\t;|"


class Given(msgspec.Struct):
    """Rows as they were given."""

    source: str
    columns: Mapping[str, Any]
    """Name -> the cells, a sequence."""
    positions: Sequence[int]
    """Of each row: its line in JSON Lines, else its number from 0."""
    unread: list[Reject] = []
    """What is no row."""


def read(path: Path, source: str) -> Given:
    """The rows of a file, packed or not; its form is told from what it holds. Raises FormatError: it cannot be read."""
    kind = look(path).kind
    if kind in ("lines", "array", "object"):
        return _of_json(path, source)
    try:
        if kind == "parquet":
            with path.open("rb") as file:
                return of_frame(pl.read_parquet(file), source)
        if kind == "other":
            return of_frame(_csv(path), source)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise FormatError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    raise FormatError(f"{path} holds no scores (it is a {kind} file); valid: CSV, JSON, JSON Lines or Parquet")


def of_frame(frame: pl.DataFrame, source: str) -> Given:
    """The rows of a frame."""
    return Given(source, {column: frame[column] for column in frame.columns}, range(frame.height))


def _of_json(path: Path, source: str) -> Given:
    rows: list[dict[str, Any]] = []
    positions: list[int] = []
    unread: list[Reject] = []
    for item in values(Input(path, "")):
        if isinstance(item, Reject):
            unread.append(item)
        elif item.problem is None and isinstance(item.value, dict):
            rows.append(item.value)
            positions.append(item.index)
        else:
            problem = item.problem or f"it is {type(item.value).__name__}; valid: an object"
            unread.append(Reject(position=item.index, reason="invalid", message=problem, raw=item.raw))
    names = dict.fromkeys(name for row in rows for name in row)
    return Given(source, {name: [row.get(name) for row in rows] for name in names}, positions, unread)


def _csv(path: Path) -> pl.DataFrame:
    """All cells as texts: nobody guesses that the task `007` is a number."""
    with Source(path) as file:
        data, fault = file.read(), file.fault
    if fault is not None:
        raise FormatError(f"{path}: {fault}; nothing of it is taken")
    header = data.partition(b"\n")[0].decode("utf-8", "replace")
    rows = pl.read_csv(data, separator=max(_SEPARATORS, key=header.count), infer_schema=False)
    return rows.rename({column: column.strip() for column in rows.columns})


def converted(given: Given, column: str, convert: Callable[[Any], Any], valid: str) -> list[Any]:
    """The cells of a column, converted; None where there is none. Raises UsageError: names the first that is wrong."""
    found = []
    for place, cell in enumerate(given.columns[column]):
        try:
            found.append(None if cell is None else convert(cell))
        except (TypeError, ValueError, OverflowError):
            text = excerpt(repr(cell)[:200])
            where = f"{given.source}: row {given.positions[place]}"
            raise UsageError(f"{where}: `{column}` is {text}; valid: {valid}, or nothing") from None
    return found


def number(cell: Any) -> float | None:
    """A number, or a truth value. NaN is no number, so None."""
    if isinstance(cell, str):
        text = cell.strip().lower()
        if not text:
            return None
        cell = _TRUTHS[text] if text in _TRUTHS else float(text)
    elif not isinstance(cell, int | float | Decimal):
        raise TypeError
    return None if math.isnan(cell) else float(cell)


def whole(cell: Any) -> int | None:
    """A whole number; also as floating point, which it becomes beside a missing one in pandas."""
    if isinstance(cell, str):
        text = cell.strip()
        if not text:
            return None
        cell = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(cell, bool) or not isinstance(cell, int | float | Decimal):
        raise TypeError
    if math.isnan(cell):
        return None
    found = int(cell)
    if cell != found or abs(found) > ids.MASK:
        raise ValueError
    return found


def name(cell: Any) -> str | None:
    """A text; a number is the name of a task that is called so."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, date):
        return cell.isoformat()
    if isinstance(cell, bool) or not isinstance(cell, int | float | Decimal):
        raise TypeError
    if math.isnan(cell):
        return None
    return str(int(cell)) if cell == int(cell) else str(cell)


def episode_id(cell: object) -> int | None:
    """The id that a cell holds, as an integer or as people see it; None if it holds none."""
    text = str(cell).strip()
    if ids.is_text(text):
        return ids.from_text(text)
    return int(text) if text.isdecimal() and int(text) <= ids.MASK else None
