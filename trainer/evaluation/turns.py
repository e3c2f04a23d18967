"""Episodes as arrays: what every off-policy estimator reads.

Axes: `_E` episodes, `_H` turns (shorter episodes are padded at the end), `_P` tasks.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_LOG_WEIGHT = 300.0
"""Products of ratios are clamped to exp(+-300), so that squares stay finite; no estimate survives such a weight."""


@dataclass(frozen=True)
class Turns:
    """Rewards and importance ratios of some episodes, turn by turn."""

    log_ratio_EH: Floats
    """Sum over the turn's sampled tokens of log pi_e - log pi_b; 0 where the policy sampled nothing, and as padding."""
    reward_EH: Floats
    """Reward of the turn; 0 as padding."""
    length_E: Ints
    """Turns of each episode, at least 1."""
    state_EH: Ints
    """Number of the state the turn was taken in: equal numbers are one state; -1 as padding."""
    task_E: Ints
    """Number of the episode's task, 0 .. P-1."""
    gamma: float = 1.0
    """Discount per turn."""

    @property
    def episodes(self) -> int:
        """E."""
        return len(self.length_E)

    @property
    def horizon(self) -> int:
        """H."""
        return int(self.reward_EH.shape[1])

    @cached_property
    def alive_EH(self) -> npt.NDArray[np.bool_]:
        """Turns that were taken."""
        taken_EH: npt.NDArray[np.bool_] = np.arange(self.horizon) < self.length_E[:, None]
        return taken_EH

    @cached_property
    def discount_H(self) -> Floats:
        """The discount of each turn, gamma ** t."""
        return np.asarray(self.gamma, np.float64) ** np.arange(self.horizon)

    @cached_property
    def ratio_EH(self) -> Floats:
        """pi_e / pi_b of each turn; 1 as padding."""
        return exp_clamped(self.log_ratio_EH)

    @cached_property
    def weight_EH(self) -> Floats:
        """Product of the ratios up to and including each turn; what an episode ended with goes on as padding."""
        return exp_clamped(np.cumsum(self.log_ratio_EH, axis=1))

    @cached_property
    def return_E(self) -> Floats:
        """Discounted return of each episode."""
        return np.asarray(self.reward_EH @ self.discount_H, np.float64)


def exp_clamped(log_EH: Floats) -> Floats:
    """Weights of their logarithms, finite."""
    return np.asarray(np.exp(np.clip(log_EH, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)), np.float64)
