"""Fitted estimators of off-policy evaluation: fitted evaluation (`fqe`) and doubly robust evaluation (`dr`).

Both fit a table of state values backwards, turn by turn (Le, Voloshin, Yue 2019, arXiv 1903.08738):

    V_t(s) = fit of  b_t + w_t (y_t - b_t)  on the state s_t        y_t = r_t + gamma V_{t+1}(s_{t+1})
    b_t    = sum_i w_it y_it / sum_i w_it

FQE takes the expectation over the target's actions. For a language model only the logged action's probability is known,
so the importance ratio of that turn takes its role: E_b[b + w (y - b) | s] = E_e[y | s] for any b. The b above removes
the noise that w adds to the level of y. Ratios of several turns multiply only as far as states are too rare to average
over, which `ridge` decides.

The fit is ridge regression on one indicator per state, with an unpenalised intercept m per turn. In closed form it is
V(s) = (S_s + ridge m) / (N_s + ridge), where N_s and S_s count and sum the targets of the state. m is such that the
fitted values of a turn add up to its targets. Therefore pi_e = pi_b gives exactly the mean return. With many visits to
each state the fit is the table of state means. With one visit to each state and ridge 1, it halves the difference
between the episode's target and the turn's mean, between importance sampling and ignoring the state.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from lake.statistics import Floats, Ints, Spread, spread_by_task, t_quantile
from trainer.evaluation.estimators.importance import (
    OpeEstimate,
    OpeEstimator,
    Reliability,
    Turns,
    ValueFunction,
    build_mean,
    divide_or_nan,
    measure_episode_reliability,
    measure_reliability,
)


class TurnVisits(NamedTuple):
    """One turn of all episodes that took it."""

    episode_N: Ints
    """Number of the episode."""
    state_N: Ints
    """Number of its state, 0, 1, ... within the turn."""


def list_visits(turns: Turns) -> list[TurnVisits]:
    """Return the episodes and states of each turn, which all fits of the same episodes share."""
    visits_H = []
    for turn in range(turns.horizon):
        episode_N = np.flatnonzero(turns.alive_EH[:, turn])
        _, state_N = np.unique(turns.state_EH[episode_N, turn], return_inverse=True)
        visits_H.append(TurnVisits(episode_N, state_N))
    return visits_H


def fit_values(turns: Turns, visits_H: list[TurnVisits], counts_E: Floats, ridge: float) -> Floats:
    """Fit state values of the target policy on some episodes, and predict them for all episodes.

    Args:
        counts_E: how often each episode counts in the fit; an episode with 0 is only predicted.
        ridge: pull of each state's value towards the mean of its turn, in visits.

    Returns:
        float64 [E, H]; 0 as padding. A state without counted visits has its turn's mean.
    """
    values_EH = np.zeros_like(turns.reward_EH)
    next_E = np.zeros(turns.episodes)
    for turn in reversed(range(turns.horizon)):
        episode_N, state_N = visits_H[turn]
        outcome = turns.reward_EH[episode_N, turn] + turns.gamma * next_E[episode_N]
        ratio = turns.ratio_EH[episode_N, turn]
        weight = counts_E[episode_N] * ratio
        total = float(weight.sum())
        baseline = float(weight @ outcome) / total if total > 0 else 0.0
        # The expected outcome of the target policy's actions: b + w (y - b).
        target = baseline + ratio * (outcome - baseline)
        next_E = np.zeros(turns.episodes)
        next_E[episode_N] = shrink_to_intercept(state_N, target, counts_E[episode_N], ridge)
        values_EH[:, turn] = next_E
    return values_EH


def shrink_to_intercept(state_E: Ints, target_E: Floats, counts_E: Floats, ridge: float) -> Floats:
    """Solve the ridge regression on state indicators, with an unpenalised intercept, in closed form."""
    visits_C = np.bincount(state_E, counts_E)
    sums_C = np.bincount(state_E, counts_E * target_E)
    pull_C = ridge / (visits_C + ridge)
    pulled = float(pull_C @ visits_C)
    intercept = float(pull_C @ sums_C) / pulled if pulled > 0 else 0.0
    fitted_C: Floats = (sums_C + ridge * intercept) / (visits_C + ridge)
    return fitted_C[state_E]


FOLDS = 5


def compute_contributions(turns: Turns, action_values_EH: Floats, state_values_EH: Floats) -> Floats:
    """Return each episode's contribution to the estimate, which is their mean: float64 [E].

    Q(s_t, a_t) and V(s_t) are float64 [E, H]; padding is not read.
    """
    state_EH = np.where(turns.alive_EH, state_values_EH, 0.0)
    action_EH = np.where(turns.alive_EH, action_values_EH, 0.0)
    next_EH = np.concatenate([state_EH[:, 1:], np.zeros((turns.episodes, 1))], axis=1)
    error_EH = turns.reward_EH + turns.gamma * next_EH - action_EH
    contribution_E: Floats = state_EH[:, 0] + (turns.weight_EH * error_EH) @ turns.discount_H
    return contribution_E


def cross_fit_values(turns: Turns, ridge: float) -> Floats:
    """Return state values of each episode, fitted without the episode's fold; float64 [E, H]."""
    fold_E = assign_folds(turns.task_E)
    visits_H = list_visits(turns)
    values_EH = np.zeros_like(turns.reward_EH)
    for fold in np.unique(fold_E):
        fold_mask_E = fold_E == fold
        values_EH[fold_mask_E] = fit_values(turns, visits_H, (~fold_mask_E).astype(np.float64), ridge)[fold_mask_E]
    return values_EH


def assign_folds(task_E: Ints) -> Ints:
    """Return each episode's fold, 0 .. FOLDS-1; siblings get different folds, and so do tasks with one episode."""
    order = np.argsort(task_E, kind="stable")
    sorted_E = task_E[order]
    first_E = np.searchsorted(sorted_E, sorted_E, side="left")
    rank_E = np.empty(len(task_E), np.int64)
    rank_E[order] = np.arange(len(task_E)) - first_E
    return (rank_E + task_E) % FOLDS


@dataclass(frozen=True)
class DoublyRobust(OpeEstimator):
    """Doubly robust evaluation at the level of turns (Jiang, Li 2016, arXiv 1511.03722).

        V = (1/n) sum_i [ V(s_0) + sum_t gamma^t W_t (r_t + gamma V(s_{t+1}) - Q(s_t, a_t)) ]

    Unbiased if the ratios are right and E_b[w Q(s, a) | s] = V(s), even if the values are wrong. Also unbiased if Q and
    V are those of the target policy, even if the ratios are wrong. The critic here knows states and not actions
    (Q = V). That meets the first condition for any V, and the second one only with right ratios: V reduces variance. It
    is fitted on other episodes than those it is used for, in five folds.
    """

    name: ClassVar[str] = "dr"

    ridge: float = 1.0
    """Ridge of the critic's fit, in visits. Any ridge gives the same mean; 1 reduces variance more than 0."""

    def value(self, turns: Turns) -> ValueFunction:
        """Fit the critic once; see `OpeEstimator.value`."""
        values_EH = cross_fit_values(turns, self.ridge)
        return build_mean(compute_contributions(turns, values_EH, values_EH))


MIN_SHARED = 0.5
"""Minimum share of turns in states that two or more episodes visited at that turn; below it the value is refused."""

FQE_RIDGE = 0.01
"""Default of `FittedEvaluation.ridge`: with 8 visits to a state it shrinks the state's value by a thousandth."""
_RIDGE_FRACTION = 0.01
"""Fraction of the ridge with which the fit is repeated, to test whether the ridge causes a difference from `dr`."""


def compute_shared_share(turns: Turns) -> float:
    """Return the share of turns in states in which another episode took the same turn."""
    states = turns.state_EH * np.int64(turns.horizon) + np.arange(turns.horizon)
    _, count = np.unique(states[turns.alive_EH], return_counts=True)
    return float(count[count > 1].sum() / count.sum())


@dataclass(frozen=True)
class FittedEvaluation(OpeEstimator):
    """Fitted evaluation: V = mean_i V_0(s_{i,0}), from the table of state values.

    It needs recurring states. Where most states are visited once, `ridge` decides more than the data, and the value is
    refused. It also assumes the Markov property. A state is the text of the observation. Where a reward depends on
    earlier actions (a key taken two rooms ago), the table averages over all ways into the state, in the behaviour
    policy's proportions. `dr` weighs each way by its ratios, so their difference estimates that error. A significant
    difference refuses the value; otherwise the interval has room for what the check cannot exclude.

    `ridge` biases the table as well: it pulls the values of states together, and with them the target's gain from
    choosing states. Cross-validation of the fit prefers much ridge, because it looks at single values and not at their
    mean under the target. So the default is small. Where a smaller ridge agrees with `dr`, the refusal names the ridge.
    """

    name: ClassVar[str] = "fqe"
    bias_direction: ClassVar[str] = "unknown (model)"
    """The bias is 0 under the Markov property; the interval has room for a violation."""

    ridge: float = FQE_RIDGE
    """Weight of the turn's mean in every state's value, in visits; above 0."""

    def reliability(self, turns: Turns) -> Reliability:
        """Measure the ratios of single turns; only the check against `dr` multiplies them."""
        shared, fault = compute_shared_share(turns), measure_episode_reliability(turns).refusal
        objection = None
        if shared < MIN_SHARED:
            objection = f"{shared:.0%} of turns in states that recur, needed are {MIN_SHARED:.0%}"
        elif fault is not None:
            objection = f"the Markov property cannot be checked with dr: {fault}"
        return measure_reliability(turns.ratio_EH[turns.alive_EH], objection=objection)

    def value(self, turns: Turns) -> ValueFunction:
        """Fit the table for given counts; see `OpeEstimator.value`."""
        visits_H = list_visits(turns)

        def value(counts_E: Floats) -> float:
            first_E = fit_values(turns, visits_H, counts_E, self.ridge)[:, 0]
            return divide_or_nan(float(counts_E @ first_E), float(counts_E.sum()))

        return value

    def _add_interval(self, turns: Turns, spread: Spread) -> OpeEstimate:
        """Widen the interval by the difference from `dr`; refuse the value where the difference is significant."""
        gap = self._compare_with_robust(turns)
        if gap is None:
            return OpeEstimate(None, refused="dr, which checks it, rests on one task")
        interval = gap.interval() or (gap.value, gap.value)
        if not interval[0] <= 0 <= interval[1]:
            difference = f"dr differs from it by {gap.value:.3g} ({interval[0]:.3g} to {interval[1]:.3g})"
            smaller = FittedEvaluation(_RIDGE_FRACTION * self.ridge)
            gap = smaller._compare_with_robust(turns) or gap
            interval = gap.interval() or (gap.value, gap.value)
            if interval[0] <= 0 <= interval[1]:
                cause = f"ridge {self.ridge:g} pulls the values of states together; use --ridge {smaller.ridge:g}"
            else:
                cause = "rewards depend on more than the state shows"
            return OpeEstimate(None, refused=f"{difference}: {cause}")
        half = t_quantile(min(spread.df, gap.df)) * math.hypot(spread.error, gap.error) + abs(gap.value)
        return OpeEstimate(spread.value, spread.value - half, spread.value + half)

    def _compare_with_robust(self, turns: Turns) -> Spread | None:
        """Return the difference of `dr` from this estimate, over tasks; None if there is only one task."""
        fitted, robust = self.value(turns), DoublyRobust().value(turns)
        return spread_by_task(lambda counts_E: robust(counts_E) - fitted(counts_E), turns.task_E)
