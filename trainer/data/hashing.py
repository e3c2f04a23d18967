"""Stable pseudo-random keys of episodes: the same on every machine, for any set of episodes."""

import numpy as np
import numpy.typing as npt

from lake.ids import splitmix64
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
    salt = splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(epoch))
    return splitmix64(episode_ids_E.astype(np.uint64) ^ salt)
