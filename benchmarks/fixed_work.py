"""How fast this machine is: seconds of a fixed piece of work, to be written beside any other figure.

    python benchmarks/fixed_work.py

Sorts 5 million random float64 in Polars, and counts to 5 million in Python; of each the median of 5 runs. CI prints it,
so that the times of two runs on two machines can be compared.
"""

import statistics
import time

ROWS = 5_000_000
REFERENCE_COUNT = 0.19
"""Seconds that the machine counts in on which the budgets of the tests hold; it sorts in 0.14 s."""


def slowness() -> float:
    """How many times longer this machine takes at this moment than the reference, at least 1.

    Counts for 20 ms of CPU time. Other processes of this machine do not show in it, and a neighbour on the same
    processor does.
    """
    began = time.process_time()
    sum(1 for _ in range(ROWS // 10))
    return max(1.0, (time.process_time() - began) / (REFERENCE_COUNT / 10))


def main() -> None:
    """Print one line."""
    # Here: the tests measure `slowness` in processes that do without them.
    import numpy as np
    import polars as pl

    values_N = pl.Series("value", np.random.default_rng(0).random(ROWS))
    sorting, counting = [], []
    for _ in range(5):
        began = time.perf_counter()
        values_N.sort()
        sorting.append(time.perf_counter() - began)
        began = time.perf_counter()
        sum(1 for _ in range(ROWS))
        counting.append(time.perf_counter() - began)
    sort, count = statistics.median(sorting), statistics.median(counting)
    print(f"5 million rows sorted in {sort:.2f} s, counted in {count:.2f} s")


if __name__ == "__main__":
    main()
