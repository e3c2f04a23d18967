"""Fitted evaluation at the level of turns (Le, Voloshin, Yue 2019, arXiv 1903.08738).

    V = mean_i V_0(s_{i,0})        with the table V_t(s) of `value_table`, which meets one turn's ratio at a time

It needs states that recur: where most are visited once, `ridge` decides more than the data, and no value is told. It
also assumes that states tell all that matters (the Markov property). A state is the text of the observation, and where
a reward depends on what was done before (a key taken two rooms ago) it is averaged over all ways into the state, as the
behaviour policy went them. `dr` weighs each way by its own ratios, so their difference estimates that error. Where it
is significant, no value is told; elsewhere the interval has room for what the check cannot exclude.

`ridge` biases the table as well: it pulls the values of states together, and with them what the target gains by the
choice of states. Cross-validation of the fit prefers much ridge, because it looks at single values and not at their
mean under the target. So the default is small. Where a smaller ridge agrees with `dr`, the refusal names the ridge.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lake.statistics.intervals import Floats, Spread, spread_by_task, t_quantile
from trainer.evaluation.estimators.base import (
    Estimate,
    Estimator,
    Reliability,
    Turns,
    Value,
    divided,
    of_episodes,
    reliability,
)
from trainer.evaluation.estimators.doubly_robust import DoublyRobust
from trainer.evaluation.estimators.value_table import fitted_values, visits

LEAST_SHARED = 0.5
"""Share of turns in states that two or more episodes visited at that turn, from which on a value may be told."""

FQE_RIDGE = 0.01
"""Default of `Fitted.ridge`: with 8 visits to a state it takes away a thousandth of the state's value."""
_LESS = 0.01
"""Part of a ridge with which the fit is repeated, to find out whether the ridge causes a difference from `dr`."""


def shared_states(turns: Turns) -> float:
    """Share of turns that were taken in a state in which another episode took the same turn."""
    states = turns.state_EH * np.int64(turns.horizon) + np.arange(turns.horizon)
    _, count = np.unique(states[turns.alive_EH], return_counts=True)
    return float(count[count > 1].sum() / count.sum())


@dataclass(frozen=True)
class Fitted(Estimator):
    """Fitted evaluation: a value table by turn and state, shrunk towards the mean of the turn."""

    name: ClassVar[str] = "fqe"

    ridge: float = FQE_RIDGE
    """Visits that the mean of the turn counts as, in every state's value; above 0."""

    def reliability(self, turns: Turns) -> Reliability:
        """Of the ratios of single turns: no product of them enters but in the check."""
        shared, unchecked = shared_states(turns), of_episodes(turns).refusal
        objection = None
        if shared < LEAST_SHARED:
            objection = f"{shared:.0%} of turns in states that recur, needed are {LEAST_SHARED:.0%}"
        elif unchecked is not None:
            objection = f"whether states tell all that matters cannot be checked with dr: {unchecked}"
        return reliability(turns.ratio_EH[turns.alive_EH], objection=objection)

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`; fitted again for other counts."""
        visits_H = visits(turns)

        def value(counts_E: Floats) -> float:
            first_E = fitted_values(turns, visits_H, counts_E, self.ridge)[:, 0]
            return divided(float(counts_E @ first_E), float(counts_E.sum()))

        return value

    def bias(self, turns: Turns) -> str:
        """None if states tell all that matters; the interval has room for what is left."""
        del turns
        return "unknown (model)"

    def _with_interval(self, turns: Turns, found: Spread) -> Estimate:
        """The interval with room for what `dr` says beyond; refused where that is no chance."""
        gap = self._gap(turns)
        if gap is None:
            return Estimate(None, refused="dr, which checks it, rests on one task")
        outside = gap.interval() or (gap.value, gap.value)
        if not outside[0] <= 0 <= outside[1]:
            difference = f"dr differs from it by {gap.value:.3g} ({outside[0]:.3g} to {outside[1]:.3g})"
            less = Fitted(_LESS * self.ridge)
            gap = less._gap(turns) or gap
            within = gap.interval() or (gap.value, gap.value)
            if within[0] <= 0 <= within[1]:
                cause = f"ridge {self.ridge:g} pulls the values of states together; use --ridge {less.ridge:g}"
            else:
                cause = "what follows depends on more than the state shows"
            return Estimate(None, refused=f"{difference}: {cause}")
        half = t_quantile(min(found.df, gap.df)) * math.hypot(found.error, gap.error) + abs(gap.value)
        return Estimate(found.value, found.value - half, found.value + half)

    def _gap(self, turns: Turns) -> Spread | None:
        """Return how much more `dr` says, over tasks; None where that rests on one task."""
        fitted, robust = self.value(turns), DoublyRobust().value(turns)
        return spread_by_task(lambda counts_E: robust(counts_E) - fitted(counts_E), turns.task_E)
