"""Discounted return-to-go, the quantity every estimator starts from.

Computed from the end, the k-th row from the end of all episodes at once: the same operations in the same order as the
obvious loop, so the result equals it bit for bit at any length and any discount. Power-scaled window sums underflow
(gamma = 0.95 fails beyond 13,600 steps, in float64) and differences of prefix sums lose all digits.

Axes: `_N` rows, `_E` episodes, `_T` steps from the end.
"""

import numpy as np

from pipelines.credit.segments import Floats, Segments


def discounted_returns(rewards_N: Floats, episodes: Segments, gamma: float) -> Floats:
    """G_t = r_t + gamma * G_{t+1}, and G of an episode's last row is its reward. Nothing is bootstrapped.

    Args:
        rewards_N: rewards, NaN where unknown; each episode's rows are consecutive and in step order.
        episodes: the episodes, as runs of rows.
        gamma: discount in [0, 1].

    Returns:
        G_N in the unit of the rewards; NaN at an unknown reward and at all earlier steps of its episode.
    """
    lengths_E = episodes.lengths_K
    longest_first_E = np.argsort(-lengths_E, kind="stable")
    last_E = episodes.last_K[longest_first_E]
    longest = int(lengths_E.max())
    alive_T = len(lengths_E) - np.searchsorted(np.sort(lengths_E), np.arange(longest), side="right")
    returns_N = rewards_N.copy()
    for back, alive in enumerate(alive_T.tolist()[1:], start=1):
        row_E = last_E[:alive] - back
        returns_N[row_E] += gamma * returns_N[row_E + 1]
    return returns_N
