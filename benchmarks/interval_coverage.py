"""How often the 95 % intervals of `trajlake eval` hold the truth, by simulation.

    python benchmarks/interval_coverage.py            # about four minutes on one core
    python benchmarks/interval_coverage.py --samples 100

Tasks have success rates drawn from a beta distribution, whose mean success, pass@4 and pass^4 are known. Each data set
goes through `compute_success`, which prints the figures of `trajlake eval`. A cell of the table is the lowest and the
highest coverage over five distributions and over 5 and 8 attempts a task. docs/guides/evaluation.md holds the table.
"""

import argparse
from math import prod

import numpy as np
import polars as pl

from lake.statistics import Floats
from trainer.evaluation.success import compute_success

RATES = ((1.0, 1.0), (0.3, 0.7), (0.1, 0.9), (0.9, 0.1), (2.0, 8.0))
"""Parameters of the beta distributions: flat, uneven, mostly 0, mostly 1, and all tasks hard."""
TASKS = (2, 5, 10, 20, 50, 200)
ATTEMPTS = (5, 8)
MEASURES = ("success", "score", "pass@4", "pass^4")
K = 4


def truths(a: float, b: float) -> dict[str, float]:
    """Return the true value of each measure for rates of Beta(a, b)."""
    mean = a / (a + b)
    every = prod((a + i) / (a + b + i) for i in range(K))
    none = prod((b + i) / (a + b + i) for i in range(K))
    return {"success": mean, "score": mean, "pass@4": 1 - none, "pass^4": every}


def attempts_of(rate_P: Floats, attempts: int, rng: np.random.Generator) -> pl.DataFrame:
    """Return the attempts of one data set, as `compute_success` reads them."""
    score_PA = rng.random((len(rate_P), attempts)) < rate_P[:, None]
    return pl.DataFrame(
        {
            "name": ["policy"] * score_PA.size,
            "task": np.repeat(np.arange(len(rate_P)), attempts),
            "score": score_PA.ravel().astype(np.float64),
            "nested": np.zeros(score_PA.size, np.bool_),
        }
    )


def coverage(tasks: int, attempts: int, rates: tuple[float, float], samples: int) -> dict[str, float]:
    """Return the share of data sets whose interval holds the truth, by measure; one without an interval does not."""
    rng = np.random.default_rng(0)
    truth = truths(*rates)
    held = dict.fromkeys(MEASURES, 0)
    for _ in range(samples):
        frame = compute_success(attempts_of(rng.beta(*rates, tasks), attempts, rng), ks=(1, K))
        for measure, low, high in frame.select("measure", "low", "high").iter_rows():
            if measure in held and low is not None:
                held[measure] += low <= truth[measure] <= high
    return {measure: count / samples for measure, count in held.items()}


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=500, help="data sets per cell")
    samples = parser.parse_args().samples
    print("| measure | " + " | ".join(f"{tasks} tasks" for tasks in TASKS) + " |")
    print("| --- |" + " --- |" * len(TASKS))
    cells: dict[str, list[str]] = {measure: [] for measure in MEASURES}
    for tasks in TASKS:
        shares = [coverage(tasks, attempts, rates, samples) for attempts in ATTEMPTS for rates in RATES]
        for measure in MEASURES:
            values = [100 * share[measure] for share in shares]
            cells[measure].append(f"{min(values):.0f} to {max(values):.0f}")
    for measure in MEASURES:
        print(f"| `{measure}` | " + " | ".join(cells[measure]) + " |")


if __name__ == "__main__":
    main()
