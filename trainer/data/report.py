"""The plan as rows for a person: what would be trained, what is dropped and why, what speaks against it."""

from collections import Counter
from statistics import median

import polars as pl

from trainer.data.plan import Plan
from trainer.data.plan_figures import balance, packing_figures
from trainer.data.preparation import Prepared
from trainer.data.selection import Selection

_RANKS = (2, 4, 8)
"""Numbers of ranks whose balance is shown."""

Row = tuple[str, str, str | None]


def plan_rows(prepared: Prepared, *, epochs: int, seconds: float | None, how: str) -> pl.DataFrame:
    """One row per figure.

    Args:
        prepared: the run that could start.
        epochs: passes over the data.
        seconds: estimated training time; None is not known.
        how: where the estimate comes from.

    Returns:
        item, value, note (text; note may be NULL).
    """
    plan, selection = prepared.plan, prepared.selection
    rows: list[Row] = [
        ("episodes selected", f"{selection.episodes:,}", None),
        ("episodes trained", f"{plan.episodes:,}", None),
        ("sequences", f"{plan.sequences:,}", "per epoch"),
        ("tokens", f"{plan.tokens:,}", "per epoch, context included"),
        ("action tokens", f"{plan.loss_tokens:,}", "per epoch; they carry the loss"),
        ("token source", selection.provenance, None),
        ("longest sequence", f"{selection.max_length:,}", _lengths(selection)),
        ("epochs", str(epochs), None),
        ("optimizer steps", str(len(plan.steps)), None),
        *_packing(plan),
    ]
    if selection.groups is not None:
        rows.append(("groups", f"{selection.groups:,}", f"{selection.dead_groups:,} of them dead"))
    rows += [(f"preferences: {name}", f"{number:,}", note) for name, number, note in selection.findings]
    rows += _mixture(plan)
    rows += _staleness(plan, selection)
    for row in selection.drops.iter_rows(named=True):
        tokens = "" if row["tokens"] is None else f", {row['tokens']:,} action tokens"
        where = f"in {row['episodes']:,} episodes{tokens}"
        rows.append((f"dropped: {row['reason']}", f"{row['steps']:,} steps", where))
    rows += [(f"refused: {r.reason}", f"{r.steps:,} steps", r.message) for r in prepared.refusals]
    rows.append(("estimated seconds", "unknown" if seconds is None else f"{seconds:.3g}", how))
    return pl.DataFrame(rows, schema=["item", "value", "note"], orient="row")


def _lengths(selection: Selection) -> str:
    """What the limit on the length of sequences does to the data."""
    too_long = selection.too_long
    return "max_length" if too_long is None else too_long.describe(selection.max_length)


def _packing(plan: Plan) -> list[Row]:
    """How the loss is averaged, what stays together, how full and how even micro-batches are."""
    figures = packing_figures(plan)
    shares = ", ".join(f"{ranks}: {balance(plan, ranks):.0%}" for ranks in _RANKS)
    return [
        ("loss average", plan.weighting.describe(), "how the losses of an optimizer step's tokens are averaged"),
        ("kept together", str(plan.weighting.atom), "what is never split over micro-batches or ranks"),
        ("micro-batches", f"{figures.micro_batches:.1f}", f"per optimizer step, at most {figures.most}"),
        ("packing", f"{figures.fill:.0%}", f"of the token budget of {plan.config.token_budget:,} used"),
        ("balance by ranks", shares, "share of the time that ranks would work, by squared sequence lengths"),
    ]


def _mixture(plan: Plan) -> list[Row]:
    """What an epoch draws of each source."""
    if plan.source_E is None:
        return []
    drawn: Counter[int] = Counter()
    for step in plan.steps:
        if step.epoch == 0:
            drawn.update(plan.source_E[step.episodes_E].tolist())
    held = Counter(plan.source_E.tolist())
    return [
        (
            f"mixture: {source.describe()}",
            f"{drawn[number] / len(plan.source_E):.1%}",
            f"{drawn[number]:,} draws per epoch of {held[number]:,} episodes, weight {source.weight:g}",
        )
        for number, source in enumerate(plan.config.mixture)
    ]


def _staleness(plan: Plan, selection: Selection) -> list[Row]:
    """How old the trained steps are, where that is known."""
    behind = selection.members.filter(pl.col("trained"))["staleness"]
    known = behind.drop_nulls().to_list()
    if not known:
        return []
    limit = "no limit" if plan.config.max_staleness is None else f"at most {plan.config.max_staleness}"
    unknown = f", {behind.null_count():,} steps of unknown version" if behind.null_count() else ""
    note = f"policy versions behind the newest, median {median(known):g}; {limit}{unknown}"
    return [("staleness", f"{min(known)} to {max(known)}", note)]
