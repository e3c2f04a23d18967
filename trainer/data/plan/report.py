"""The plan as rows for a person: what would be trained, what is dropped and why, what it would cost.

Large plans are judged by some of their optimizer steps, evenly spread.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median

import polars as pl

from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.plan.preparation import Prepared
from trainer.data.select.selection import Selection

_JUDGED = 100
"""Optimizer steps that are looked at."""


@dataclass(frozen=True, slots=True)
class PackingFigures:
    """Means over the optimizer steps that were looked at."""

    micro_batches: float
    """Micro-batches of an optimizer step on one rank."""
    most: int
    """The same, at most."""
    fill: float
    """Share of the token budget that is used; above 1 where atoms are longer than it."""


def judged_steps(plan: Plan) -> list[OptimizerStep]:
    """Evenly spread optimizer steps of a plan, all of a small one."""
    return plan.steps[:: -(-len(plan.steps) // _JUDGED)]


def packing_figures(plan: Plan) -> PackingFigures:
    """How a plan fills its micro-batches."""
    steps = judged_steps(plan)
    counts = [len(plan.micro_batches(step)[0]) for step in steps]
    tokens = sum(step.tokens for step in steps)
    return PackingFigures(fmean(counts), max(counts), tokens / (sum(counts) * plan.config.token_budget))


def balance(plan: Plan, ranks: int) -> float:
    """How evenly ranks are loaded: the share of their time that they work, were a round as long as its costliest part.

    Returns:
        Sum of all squared sequence lengths over `ranks` times the sum of each round's largest; 1 is perfect.
    """
    worked = waited = 0
    for step in judged_steps(plan):
        dealt = plan.micro_batches(step, ranks)
        costs = [[int((plan.tokens_Q[items] ** 2).sum()) for items in bins] for bins in dealt]
        worked += step.squared_lengths
        waited += ranks * sum(max(of_round) for of_round in zip(*costs, strict=True))
    return worked / waited


_RANKS = (2, 4, 8)
"""Numbers of ranks whose balance is shown."""

Row = tuple[str, str, str | None]


def plan_rows(prepared: Prepared, *, epochs: int, seconds: float | None, how: str) -> pl.DataFrame:
    """One row per figure.

    Args:
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
