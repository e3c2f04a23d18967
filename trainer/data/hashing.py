"""Stable pseudo-random keys of episodes: the same on every machine, for any set of episodes.

SplitMix64 (Steele et al. 2014).
"""

import numpy as np
import numpy.typing as npt

from trainer.data.ranges import Ints

Keys = npt.NDArray[np.uint64]


def order_keys(episode_ids_E: Ints, seed: int, epoch: int) -> Keys:
    """Sort keys of the episodes in one epoch: a hash of (seed, epoch, episode_id).

    Args:
        episode_ids_E: int64 [E].
        seed: of the run.
        epoch: 0, 1, ...

    Returns:
        uint64 [E]; equal ids have equal keys on every machine.
    """
    with np.errstate(over="ignore"):
        salt = splitmix(splitmix(np.array([seed], np.uint64)) + np.uint64(epoch))
        return splitmix(episode_ids_E.astype(np.uint64) ^ salt)


def splitmix(values: Keys) -> Keys:
    """One output of SplitMix64 for each state; a bijection of 64-bit numbers."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
