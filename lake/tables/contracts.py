"""A frame against its table's spec, before it is written.

What the types cannot hold is checked here: no missing or unknown columns, no NULL where none is allowed, closed
vocabularies, no NaN or infinity (NULL is how unknown is spelled), the elements of lists included. A cast that could
change a value (a float to an integer, text to a number) is refused. The message names table, column and row key.
"""

from collections.abc import Callable

import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.tables.columns import Column, Table, Type


def _is_text(dtype: pl.DataType) -> bool:
    return isinstance(dtype, pl.String | pl.Categorical | pl.Enum)


_TAKES: dict[Type, Callable[[pl.DataType], bool]] = {
    Type.ID: lambda dtype: dtype.is_integer(),
    Type.INT: lambda dtype: dtype.is_integer(),
    Type.SMALL_INT: lambda dtype: dtype.is_integer(),
    Type.FLOAT: lambda dtype: dtype.is_numeric(),
    Type.BOOL: lambda dtype: dtype == pl.Boolean,
    Type.TEXT: _is_text,
    Type.WORD: _is_text,
    Type.JSON: _is_text,
    Type.BYTES: lambda dtype: dtype == pl.Binary,
    Type.TIME: lambda dtype: isinstance(dtype, pl.Datetime | pl.Date),
}
"""What a column of a type may be cast from."""
_ELEMENTS = {Type.IDS: Type.ID, Type.TOKENS: Type.INT, Type.FLOATS: Type.FLOAT, Type.MASK: Type.BOOL}


def conform(frame: pl.DataFrame, table: Table) -> pl.DataFrame:
    """The frame with the table's columns in order and of its types.

    Columns that allow NULL may be left out and are filled with NULL.

    Raises:
        ContractError: an unknown column, a missing required one, a value of the wrong type, a forbidden NULL, a word
            outside its vocabulary, NaN or infinity.
    """
    schema = table.polars()
    if unknown := [name for name in frame.columns if name not in schema]:
        raise ContractError(f"table `{table.name}` has no column {_names(unknown)}; its columns: {_names(table.names)}")
    if missing := [c.name for c in table.columns if c.required and c.name not in frame.columns]:
        msg = f"table `{table.name}` needs column {_names(missing)}; the frame has {_names(frame.columns)}"
        raise ContractError(msg)
    for name, found in frame.schema.items():
        if not _castable(found, table.column(name)):
            raise ContractError(f"table `{table.name}`, column `{name}`: the frame has {found}; valid: {schema[name]}")
    filled = frame.with_columns(pl.lit(None).alias(c.name) for c in table.columns if c.name not in frame.columns)
    try:
        typed = filled.select(pl.col(name).cast(dtype) for name, dtype in schema.items())
    except pl.exceptions.PolarsError as error:
        raise ContractError(f"table `{table.name}`: {str(error).partition(chr(10))[0]}") from error
    for column in _suspicious(typed, table):
        _check(typed, table, column)
    return typed


def _castable(found: pl.DataType, column: Column) -> bool:
    """Whether a cast keeps every value's meaning; that it fits the range is left to the cast."""
    if column.type in _ELEMENTS:
        if not isinstance(found, pl.List):
            return found == pl.Null
        return found.inner == pl.Null or _TAKES[_ELEMENTS[column.type]](pl.Series(dtype=found.inner).dtype)
    return found == pl.Null or _TAKES[column.type](found)


def _suspicious(frame: pl.DataFrame, table: Table) -> list[Column]:
    """Columns that break their contract, or are lists, found in one pass over the frame."""
    looks = {}
    for column in table.columns:
        value = pl.col(column.name)
        if column.values:
            looks[column.name] = ~value.is_in(list(column.values)).all()
        elif column.type is Type.FLOAT:
            looks[column.name] = ~value.is_finite().all()
    found = frame.select(**looks).row(0, named=True) if looks else {}
    return [
        column
        for column in table.columns
        if found.get(column.name) or column.type in _ELEMENTS or (column.required and frame[column.name].null_count())
    ]


def _check(frame: pl.DataFrame, table: Table, column: Column) -> None:
    value = pl.col(column.name)
    if column.required and frame[column.name].null_count():
        _fail(frame.filter(value.is_null()), table, column, "is NULL", "a value; NULL is not allowed here")
    if column.values:
        bad = frame.filter(value.is_not_null() & ~value.is_in(list(column.values)))
        _fail(bad, table, column, "has an unknown value", ", ".join(column.values))
    if column.type is Type.FLOAT:
        bad = frame.filter(~value.is_finite())
        _fail(bad, table, column, "is not finite", "a finite number, or NULL if unknown")
    if isinstance(frame.schema[column.name], pl.List):
        _check_elements(frame, table, column)


def _check_elements(frame: pl.DataFrame, table: Table, column: Column) -> None:
    elements = frame[column.name].explode(empty_as_null=False, keep_nulls=False)
    if elements.null_count():
        bad = frame.filter(pl.col(column.name).list.eval(pl.element().is_null()).list.any())
        _fail(bad, table, column, "holds a NULL", "a value in every place of the list")
    if elements.dtype.is_float() and not elements.is_finite().all():
        bad = frame.filter(~pl.col(column.name).list.eval(pl.element().is_finite()).list.all())
        _fail(bad, table, column, "holds a number that is not finite", "finite numbers")


def _fail(bad: pl.DataFrame, table: Table, column: Column, fault: str, valid: str) -> None:
    if bad.is_empty():
        return
    row = bad.row(0, named=True)
    key = ", ".join(
        f"{name}={ids.to_text(value) if table.column(name).type is Type.ID and value is not None else value}"
        for name, value in ((name, row[name]) for name in table.key)
    )
    rows = "1 row" if bad.height == 1 else f"{bad.height} rows"
    value = "" if row[column.name] is None else f" ({row[column.name]!r:.80})"
    raise ContractError(
        f"table `{table.name}`, column `{column.name}`, row {key}: {fault}{value} in {rows}; valid: {valid}"
    )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
