"""How long to wait before another try."""

import random


def compute_pause(failures: int, *, first: float, longest: float, jitter: float = 0.0) -> float:
    """Return the seconds to wait after failures in a row: `first`, then twice as long each time, up to `longest`.

    Args:
        failures: number of failed tries; after 0 there is no pause.
        jitter: largest share of the pause that is left out at random, so that callers who failed together part.
    """
    if failures < 1:
        return 0.0
    # 2.0 ** 1024 overflows, and an engine can be unreachable for hours.
    return min(first * 2.0 ** min(failures - 1, 64), longest) * (1 - jitter * random.random())
