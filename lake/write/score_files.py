"""Rows of scores as somebody gave them, column by column: from CSV, JSON, JSON Lines, Parquet, or a frame.

What a cell may be is decided cell by cell, so that a wrong one costs its row alone. All rows are held at once, so
there is a limit to what a file unpacks to.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import FormatError
from lake.formats.base.documents import problem_of
from lake.formats.base.json_array import Element
from lake.formats.base.look import look
from lake.formats.base.rows import values
from lake.formats.base.source import Input, Source
from lake.records import Reject, excerpt, shown

BYTES_LIMIT = 256 << 20
"""Of a file's text, unpacked: in memory it takes about ten times as much."""
ROWS_LIMIT = 2_000_000
_PIECE = 1 << 20
_TRUTHS = {"true": True, "false": False}
_SEPARATORS = ",\t;|"


class Given(msgspec.Struct):
    """Rows as they were given."""

    source: str
    columns: Mapping[str, Any]
    """Name -> the cells, a sequence."""
    positions: Sequence[int]
    """Of each row: its line in JSON Lines, else its number from 0."""
    texts: Callable[[Sequence[int]], Iterator[str]]
    """The text of some rows, each given by its place in the columns."""
    unread: list[Reject] = []
    """What is no row."""


def read(path: Path, source: str) -> Given:
    """The rows of a file, packed or not; its form is told from what it holds. Raises FormatError: it cannot be read."""
    import pyarrow as pa

    kind = look(path).kind
    try:
        if kind == "parquet":
            return of_frame(_parquet(path), source)
        if kind in ("lines", "array", "object"):
            _require_short(path)
            return _of_json(path, source)
        if kind == "other":
            _require_short(path)
            return of_frame(_csv(path), source)
    except (pl.exceptions.PolarsError, pa.ArrowException, csv.Error, OSError) as error:
        raise FormatError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    raise FormatError(f"{path} holds no scores (it is a {kind} file); valid: CSV, JSON, JSON Lines or Parquet")


def of_frame(frame: pl.DataFrame, source: str) -> Given:
    """The rows of a frame."""

    def texts(places: Sequence[int]) -> Iterator[str]:
        return map(_text, frame[places].iter_rows(named=True))

    return Given(source, {column: frame[column] for column in frame.columns}, range(frame.height), texts)


def _text(row: dict[str, Any]) -> str:
    try:
        return excerpt(msgspec.json.encode(row, enc_hook=str).decode())
    except (ValueError, RecursionError, OverflowError):
        return excerpt(shown(row))


def _require_short(path: Path) -> None:
    left = BYTES_LIMIT
    with Source(path) as file:
        while piece := file.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise _too_long(path)


def _too_long(path: Path) -> FormatError:
    most = f"{BYTES_LIMIT >> 20} MB of text or {ROWS_LIMIT:,} rows"
    return FormatError(f"{path} holds more than {most}; split it into several files")


def _of_json(path: Path, source: str) -> Given:
    rows: list[Element] = []
    unread: list[Reject] = []
    for item in values(Input(path, "")):
        if len(rows) + len(unread) == ROWS_LIMIT:
            raise _too_long(path)
        if isinstance(item, Reject):
            unread.append(item)
            continue
        problem = problem_of(item)
        if problem is None and isinstance(item.value, dict):
            rows.append(item)
            continue
        problem = problem or f"it is {type(item.value).__name__}; valid: an object"
        unread.append(Reject(position=item.index, reason="invalid", message=problem, raw=item.raw))
    names = dict.fromkeys(name for row in rows for name in row.value)
    columns = {name: [row.value.get(name) for row in rows] for name in names}

    def texts(places: Sequence[int]) -> Iterator[str]:
        return (rows[place].raw for place in places)

    return Given(source, columns, [row.index for row in rows], texts, unread)


def _parquet(path: Path) -> pl.DataFrame:
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        about = pq.read_metadata(file)
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        # Of values, not of rows: those of a list are many in a row.
        counts = Counter[int]()
        for group in groups:
            for place in range(about.num_columns):
                counts[place] += group.column(place).num_values
        if max(counts.values(), default=0) > ROWS_LIMIT or sum(group.total_byte_size for group in groups) > BYTES_LIMIT:
            raise _too_long(path)
        file.seek(0)
        return pl.read_parquet(file)


def _csv(path: Path) -> pl.DataFrame:
    """All cells as texts: nobody guesses that the task `007` is a number."""
    with Source(path) as file:
        data, fault = file.read(), file.fault
    if fault is not None:
        raise FormatError(f"{path}: {fault}; nothing of it is taken")
    header = data.partition(b"\n")[0].decode("utf-8", "replace")
    separator = max(_SEPARATORS, key=header.count)
    names = next((cells for _, cells in _lists(data, separator, strict=False) if cells), [])
    counts = Counter(name.strip() for name in names)
    if twice := [name for name, count in counts.items() if name and count > 1]:
        raise FormatError(f"{path} has the column {twice[0]!r} {counts[twice[0]]} times; name each of them")
    try:
        rows = pl.read_csv(data, separator=separator, infer_schema=False, n_rows=ROWS_LIMIT + 1)
    except pl.exceptions.PolarsError:
        _require_sound(data, separator)
        raise
    if rows.height > ROWS_LIMIT:
        raise _too_long(path)
    return rows.rename({column: column.strip() for column in rows.columns if column.strip()})


def _lists(data: bytes, separator: str, *, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV as Python reads them, each with its first line: slower, but it tells what is wrong with one."""
    text = TextIOWrapper(BytesIO(data), "utf-8-sig", "replace", newline="")
    rows = csv.reader(text, delimiter=separator, strict=strict)
    line = 1
    try:
        for cells in rows:
            yield line, cells
            line = rows.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"line {line} begins a row that cannot be read: {error}") from error


def _require_sound(data: bytes, separator: str) -> None:
    """Raises csv.Error: what is wrong with the first line that is."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise csv.Error(f"line {line} is not UTF-8; save the file as UTF-8") from error
    width = 0
    for line, cells in _lists(data, separator, strict=True):
        width = width or len(cells)
        if len(cells) > width:
            advice = f"put texts that hold {separator!r} in quotes"
            raise csv.Error(f"line {line} has {len(cells)} fields, the header {width}; {advice}")


def converted(given: Given, column: str, convert: Callable[[Any], Any], valid: str) -> tuple[list[Any], dict[int, str]]:
    """The cells of a column, converted, None where there is none or a wrong one; and place -> what is wrong there."""
    found, wrong = [], {}
    for place, cell in enumerate(given.columns[column]):
        try:
            found.append(None if cell is None else convert(cell))
        except (TypeError, ValueError, OverflowError):
            found.append(None)
            wrong[place] = f"`{column}` is {shown(cell)[:200]}; valid: {valid}, or nothing"
    return found, wrong


def number(cell: Any) -> float | None:
    """A number, or a truth value. NaN is no number, so None."""
    if isinstance(cell, str):
        text = _figures(cell)
        if not text:
            return None
        cell = _TRUTHS[text] if text in _TRUTHS else float(text)
    elif not isinstance(cell, int | float | Decimal):
        raise TypeError
    return None if math.isnan(cell) else float(cell)


def whole(cell: Any) -> int | None:
    """A whole number; also as floating point, which it becomes beside a missing one in pandas."""
    if isinstance(cell, str):
        text = _figures(cell)
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


def _figures(cell: str) -> str:
    """The text of a number; the underscores that Python has in its own are none that a file means."""
    if "_" in cell:
        raise ValueError
    return cell.strip().lower()


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
