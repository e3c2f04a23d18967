"""The value table that `fqe` is and `dr` has as its critic: fitted backwards, turn by turn (Le, Voloshin, Yue 2019).

    V_t(s) = fit of  b_t + w_t (y_t - b_t)  on the state s_t        y_t = r_t + gamma V_{t+1}(s_{t+1})
    b_t    = sum_i w_it y_it / sum_i w_it

FQE (arXiv 1903.08738) takes the expectation over the target's actions. Of a language model only the logged action's
probability is known, so the expectation is taken by the importance ratio of that one turn: E_b[b + w (y - b) | s] =
E_e[y | s] for any b; the b above takes away the noise of w in the level of y. Ratios of several turns meet only as far
as states are too rare to be averaged over, which `ridge` decides.

The fit is ridge regression on one indicator per state, with an intercept per turn that is not penalised, solved in
closed form: V(s) = (S_s + ridge m) / (N_s + ridge), where N_s and S_s count and sum the targets of the state, and m is
such that the fitted values of a turn add up to its targets. Therefore pi_e = pi_b gives exactly the mean return. With
many visits to each state the fit is the table of state means. Where every state is seen once it halves the difference
between the episode's own target and the turn's mean (ridge 1): between importance sampling and ignoring the state.
"""

from typing import NamedTuple

import numpy as np

from lake.statistics.intervals import Floats, Ints
from trainer.evaluation.estimators.base import Turns


class Visit(NamedTuple):
    """One turn of all episodes that took it."""

    episode_N: Ints
    """Which."""
    state_N: Ints
    """Their states, numbered 0, 1, ... within the turn."""


def visits(turns: Turns) -> list[Visit]:
    """The episodes and states of each turn: what every fit of the same episodes has in common."""
    found = []
    for turn in range(turns.horizon):
        episode_N = np.flatnonzero(turns.alive_EH[:, turn])
        _, state_N = np.unique(turns.state_EH[episode_N, turn], return_inverse=True)
        found.append(Visit(episode_N, state_N))
    return found


def fitted_values(turns: Turns, visits_H: list[Visit], counts_E: Floats, ridge: float) -> Floats:
    """State values of the target policy, fitted on some episodes, for all of them.

    Args:
        counts_E: how often each counts for the fit; those with 0 are only predicted.
        ridge: pull of each state's value towards the mean of its turn, in visits.

    Returns:
        float64 [E, H]; 0 as padding. A state that the fit has not seen has its turn's mean.
    """
    values_EH = np.zeros_like(turns.reward_EH)
    next_E = np.zeros(turns.episodes)
    for turn in reversed(range(turns.horizon)):
        here, state_N = visits_H[turn]
        outcome = turns.reward_EH[here, turn] + turns.gamma * next_E[here]
        target = _expected(outcome, turns.ratio_EH[here, turn], counts_E[here])
        next_E = np.zeros(turns.episodes)
        next_E[here] = _shrunk(state_N, target, counts_E[here], ridge)
        values_EH[:, turn] = next_E
    return values_EH


def _expected(outcome_E: Floats, ratio_E: Floats, counts_E: Floats) -> Floats:
    """What the target policy's actions would have led to, in expectation: b + w (y - b)."""
    weight_E = counts_E * ratio_E
    total = float(weight_E.sum())
    baseline = float(weight_E @ outcome_E) / total if total > 0 else 0.0
    target_E: Floats = baseline + ratio_E * (outcome_E - baseline)
    return target_E


def _shrunk(state_E: Ints, target_E: Floats, counts_E: Floats, ridge: float) -> Floats:
    """Ridge on indicators of states with an unpenalised intercept, in closed form."""
    visits_C = np.bincount(state_E, counts_E)
    sums_C = np.bincount(state_E, counts_E * target_E)
    pull_C = ridge / (visits_C + ridge)
    pulled = float(pull_C @ visits_C)
    intercept = float(pull_C @ sums_C) / pulled if pulled > 0 else 0.0
    fitted_C: Floats = (sums_C + ridge * intercept) / (visits_C + ridge)
    return fitted_C[state_E]
