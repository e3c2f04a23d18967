"""Doubly robust evaluation at the level of turns (Jiang, Li 2016, arXiv 1511.03722).

    V = (1/n) sum_i [ V(s_0) + sum_t gamma^t W_t (r_t + gamma V(s_{t+1}) - Q(s_t, a_t)) ]

Unbiased if the ratios are right and E_b[w Q(s, a) | s] = V(s), however wrong the values; or if Q and V are those of the
target policy, however wrong the ratios. The critic here knows states and not actions (Q = V), which meets the first
condition for any V and makes the second hold for right ratios only: V is there to take variance away. It is fitted
(`estimators/value_table.py`) on other episodes than the one it is used for, five parts of the episodes taking turns.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lake.statistics.intervals import Floats, Ints
from trainer.evaluation.estimators.base import Estimator, Turns, Value, mean
from trainer.evaluation.estimators.value_table import fitted_values, visits

FOLDS = 5


def doubly_robust(turns: Turns, action_values_EH: Floats, state_values_EH: Floats) -> Floats:
    """Each episode's contribution to the estimate, which is their mean: float64 [E].

    Q(s_t, a_t) and V(s_t) are float64 [E, H]; padding is not read.
    """
    state_EH = np.where(turns.alive_EH, state_values_EH, 0.0)
    action_EH = np.where(turns.alive_EH, action_values_EH, 0.0)
    next_EH = np.concatenate([state_EH[:, 1:], np.zeros((turns.episodes, 1))], axis=1)
    error_EH = turns.reward_EH + turns.gamma * next_EH - action_EH
    contribution_E: Floats = state_EH[:, 0] + (turns.weight_EH * error_EH) @ turns.discount_H
    return contribution_E


def cross_fitted(turns: Turns, ridge: float) -> Floats:
    """State values for each episode, fitted without its own part of its task; float64 [E, H]."""
    fold_E = folds(turns.task_E)
    visits_H = visits(turns)
    values_EH = np.zeros_like(turns.reward_EH)
    for fold in np.unique(fold_E):
        mine_E = fold_E == fold
        values_EH[mine_E] = fitted_values(turns, visits_H, (~mine_E).astype(np.float64), ridge)[mine_E]
    return values_EH


def folds(task_E: Ints) -> Ints:
    """Number of each episode's part, 0 .. FOLDS-1: siblings go to different ones, and so do tasks of one episode."""
    return (_rank_in_task(task_E) + task_E) % FOLDS


def _rank_in_task(task_E: Ints) -> Ints:
    """0, 1, ... for the episodes of each task, in their order."""
    order = np.argsort(task_E, kind="stable")
    sorted_E = task_E[order]
    first_E = np.searchsorted(sorted_E, sorted_E, side="left")
    rank_E = np.empty(len(task_E), np.int64)
    rank_E[order] = np.arange(len(task_E)) - first_E
    return rank_E


@dataclass(frozen=True)
class DoublyRobust(Estimator):
    """Per-decision importance sampling with a fitted state value as control variate."""

    name: ClassVar[str] = "dr"

    ridge: float = 1.0
    """Of the critic's fit. Any critic gives the same mean, and this one takes more variance away than one without."""

    def value(self, turns: Turns) -> Value:
        """See `Estimator.value`; the critic is fitted once."""
        values_EH = cross_fitted(turns, self.ridge)
        return mean(doubly_robust(turns, values_EH, values_EH))
