"""Division whose bits do not depend on how many rows there are.

Polars multiplies a column by the reciprocal of a constant, but divides where the column has one row (version 2.1): the
same episode would score otherwise alone than in company. Divided by a column, both are a division.
"""

import polars as pl


def divided(column: pl.Expr, by: int) -> pl.Expr:
    """A column over a positive constant, as float64; NULL stays NULL."""
    return column / pl.when(column.is_not_null()).then(float(by))
