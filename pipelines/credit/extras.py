"""Checks of the columns that only some estimators read: value estimates, lengths, component scores, batch keys."""

import polars as pl

from lake.errors import ContractError
from pipelines.credit.checks import LARGEST
from pipelines.credit.columns import InputNeeds


def check_extras(frame: pl.DataFrame, needs: InputNeeds) -> None:
    """Check the columns beyond the usual ones in active rows sorted by `KEYS`.

    Raises:
        ContractError: a number that is NaN, infinite or beyond 1e100, or a value of the whole episode that changes
            within it.
    """
    names = dict.fromkeys((*needs.step_columns, *needs.of_episodes))
    floats = [name for name in names if name != "reward" and frame.schema[name] == pl.Float64]
    if not floats and not needs.of_episodes:
        return
    faults = frame.lazy().select(
        *((~(pl.col(name).abs() <= LARGEST)).fill_null(value=False).alias(f"{name} is not finite") for name in floats),
        *(_changes(name).alias(f"{name} changes") for name in needs.of_episodes),
    )
    for fault, rows in faults.sum().collect().row(0, named=True).items():
        if rows:
            row = frame.filter(faults.select(fault).collect().to_series()).row(0, named=True)
            name, kind = fault.split(" ", 1)
            raise ContractError(_message(row, name, kind))


def _changes(name: str) -> pl.Expr:
    """Rows that continue an episode with another value."""
    within = pl.col("episode_id") == pl.col("episode_id").shift()
    return within & pl.col(name).ne_missing(pl.col(name).shift())


def _message(row: dict[str, object], name: str, kind: str) -> str:
    at = f"steps: episode {row['episode_id']!r}, step_index {row['step_index']}: {name} {row[name]!r}"
    if kind == "changes":
        return f"{at} differs from the step before. It belongs to the whole episode; join it by episode_id."
    return f"{at} is not a finite number below 1e100. Write NULL where it is not known, or repair the source."
