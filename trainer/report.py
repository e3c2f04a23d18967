"""The plan as rows for a person: what would be trained, what is dropped and why, what speaks against it."""

import polars as pl

from trainer.preparation import Prepared


def plan_rows(prepared: Prepared, *, epochs: int, seconds: float, how: str) -> pl.DataFrame:
    """One row per figure.

    Args:
        prepared: the run that could start.
        epochs: passes over the data.
        seconds: estimated training time.
        how: where the estimate comes from.

    Returns:
        item, value, note (text; note may be NULL).
    """
    plan, selection = prepared.plan, prepared.selection
    rows: list[tuple[str, str, str | None]] = [
        ("episodes selected", f"{selection.episodes:,}", None),
        ("episodes trained", f"{plan.episodes:,}", None),
        ("sequences", f"{plan.sequences:,}", "per epoch"),
        ("tokens", f"{plan.tokens:,}", "per epoch, context included"),
        ("action tokens", f"{plan.loss_tokens:,}", "per epoch; they carry the loss"),
        ("token source", selection.provenance, None),
        ("epochs", str(epochs), None),
        ("optimizer steps", str(len(plan.steps)), None),
    ]
    if selection.groups is not None:
        rows.append(("groups", f"{selection.groups:,}", f"{selection.dead_groups:,} of them dead"))
    for row in selection.drops.iter_rows(named=True):
        tokens = "" if row["tokens"] is None else f", {row['tokens']:,} action tokens"
        where = f"in {row['episodes']:,} episodes{tokens}"
        rows.append((f"dropped: {row['reason']}", f"{row['steps']:,} steps", where))
    rows += [(f"refused: {r.reason}", f"{r.steps:,} steps", r.message) for r in prepared.refusals]
    rows.append(("estimated seconds", f"{seconds:.3g}", how))
    return pl.DataFrame(rows, schema=["item", "value", "note"], orient="row")
