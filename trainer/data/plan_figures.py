"""What a plan costs before it is run: how full micro-batches are, and how even ranks would be.

Large plans are judged by some of their optimizer steps, evenly spread.
"""

from dataclasses import dataclass
from statistics import fmean

from trainer.data.plan import OptimizerStep, Plan

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

    Args:
        plan: of the run.
        ranks: how many.

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
