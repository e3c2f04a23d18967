"""A frame against its table's spec, before it is written.

What the types cannot hold is checked here: no missing or unknown columns, no NULL where none is allowed, closed
vocabularies, no NaN or infinity (NULL is how unknown is spelled). The message names table, column and row key.
"""

import polars as pl

from lake import ids
from lake.columns import Column, Table, Type
from lake.errors import ContractError


def conform(frame: pl.DataFrame, table: Table) -> pl.DataFrame:
    """The frame with the table's columns in order and of its types.

    Columns that allow NULL may be left out and are filled with NULL.

    Raises:
        ContractError: an unknown column, a missing required one, a value of the wrong type, a forbidden NULL, a word
            outside its vocabulary, NaN or infinity.
    """
    schema = table.polars()
    if unknown := [name for name in frame.columns if name not in schema]:
        msg = f"table `{table.name}` has no column {_names(unknown)}; its columns: {_names(table.names)}"
        raise ContractError(msg)
    if missing := [c.name for c in table.columns if c.required and c.name not in frame.columns]:
        msg = f"table `{table.name}` needs column {_names(missing)}; the frame has {_names(frame.columns)}"
        raise ContractError(msg)
    filled = frame.with_columns(pl.lit(None).alias(c.name) for c in table.columns if c.name not in frame.columns)
    try:
        typed = filled.select(pl.col(name).cast(dtype) for name, dtype in schema.items())
    except pl.exceptions.PolarsError as error:
        msg = f"table `{table.name}`: {error}; its types: {dict(schema)}"
        raise ContractError(msg) from error
    for column in table.columns:
        _check(typed, table, column)
    return typed


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


def _fail(bad: pl.DataFrame, table: Table, column: Column, fault: str, valid: str) -> None:
    if bad.is_empty():
        return
    row = bad.row(0, named=True)
    key = ", ".join(
        f"{name}={ids.to_text(value) if table.column(name).type is Type.ID and value is not None else value}"
        for name, value in ((name, row[name]) for name in table.key)
    )
    value = "" if row[column.name] is None else f" ({row[column.name]!r})"
    msg = (
        f"table `{table.name}`, column `{column.name}`, row {key}: {fault}{value} in {bad.height} rows; valid: {valid}"
    )
    raise ContractError(msg)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
