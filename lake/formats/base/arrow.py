"""Rows of Arrow as Python has them: one that holds what Python has no value for is told, and costs no other row."""

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_NOT_HELD = (ValueError, OverflowError, LookupError, TypeError)
"""What comes of a value that Python does not have; errors of Arrow are of these classes too."""


class Unreadable(str):
    """Why a cell has no value, in the place of its value."""

    __slots__ = ()


def rows_of(batch: "pa.RecordBatch") -> Iterator[tuple[dict[str, Any], str | None]]:
    """The rows of a batch, and why a row cannot be taken as it is: a date of the year 300,000, say."""
    try:
        rows = batch.to_pylist()
    except _NOT_HELD:
        yield from _cell_by_cell(batch)
    else:
        yield from zip(rows, repeat(None))


def is_finite(array: "pa.Array[Any]") -> bool:
    """Whether the numbers of an array are finite, at any depth."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind: Any = array.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(array)).as_py() is not False
    if not _has_floats(kind):
        return True
    if isinstance(array, pa.MapArray):
        return is_finite(array.keys) and is_finite(array.items)
    inner: Any = array.flatten()  # of a struct its fields, of a list all that its lists hold
    return all(map(is_finite, inner if isinstance(inner, list) else [inner]))


def _has_floats(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(kind) or any(_has_floats(kind.field(place).type) for place in range(kind.num_fields))


def _cell_by_cell(batch: "pa.RecordBatch") -> Iterator[tuple[dict[str, Any], str | None]]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for place in range(batch.num_rows):
        row = {name: _cell(name, column, place) for name, column in columns.items()}
        yield row, next((cell for cell in row.values() if isinstance(cell, Unreadable)), None)


def _cell(name: str, column: "pa.Array[Any]", place: int) -> Any:
    try:
        return column[place].as_py()
    except _NOT_HELD as error:
        valid = "valid: times of the years 1 to 9999, in a zone that this machine knows"
        return Unreadable(f"`{name}` is a {column.type} that cannot be read ({error}); {valid}")
