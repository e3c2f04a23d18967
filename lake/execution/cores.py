"""Cores that this process may use, on any system, and how many of them a model's arithmetic is worth."""

import os

_PARAMETERS_PER_THREAD = 4_000_000
"""Threads of a smaller model wait for one another longer than they compute: on two busy cores, an update of 97,600
parameters took 8.4 s with two threads and 0.2 s with one (decision 0054)."""


def usable_cores() -> int:
    """Cores that this process may use: the scheduler's answer on Linux, elsewhere all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_for(parameters: int) -> int | None:
    """Threads for the arithmetic of a model on the CPU; None: as many as the library takes by itself.

    `OMP_NUM_THREADS` stays the most.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    most = min(usable_cores(), int(given)) if given.isdecimal() and int(given) else usable_cores()
    threads = max(1, parameters // _PARAMETERS_PER_THREAD)
    # Libraries take physical cores, of which there may be half as many.
    return threads if 2 * threads <= max(2, most) else None
