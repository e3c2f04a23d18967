"""Similarity anchors against the reference's loop, and regular-expression anchors on many long states.

    python benchmarks/bench_anchors.py [--rows 1000] [--characters 600] [--threshold 0.9] [--steps 1000000]

Similarity: the reference compares every row with the first member of every cluster of its group, by difflib. Texts are
pages of English words (this repository's documentation), seen with small edits, in small groups and in one large group;
`strangers` never match. Both run in this process, one after the other, CPU time; the partitions must be equal.
Substitutions: CPU time for the keys of a batch in which each distinct state occurs ten times.
Prints Markdown tables; the measurement is the case with the highest ratio. `--steps 0` leaves substitutions out.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "tests")]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

Groups = list[list[str]]


def ours(texts: Sequence[str], threshold: float) -> list[str]:
    """The same by the package."""
    from pipelines.credit.anchors.similar import find_representatives

    found = find_representatives(texts, threshold)
    return [found[text] for text in texts]


class Pages:
    """Texts of a given length made of English words, and edits of them."""

    def __init__(self, characters: int) -> None:
        docs = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
        self._words = " ".join(path.read_text("utf-8") for path in docs).split()
        self._characters = characters
        self._rng = random.Random(0)

    def page(self) -> str:
        """A page of random words."""
        return " ".join(self._rng.choices(self._words, k=self._characters))[: self._characters]

    def seen(self, page: str) -> str:
        """A page with up to 1 % of its characters replaced."""
        characters = list(page)
        for _ in range(self._rng.randint(0, self._characters // 100)):
            characters[self._rng.randrange(len(characters))] = self._rng.choice("0123456789abc")
        return "".join(characters)

    def groups(self, rows: int, siblings: int, pages: int) -> Groups:
        """Groups of siblings who each see one of a few pages; 0 pages: everyone sees another one."""
        found = []
        for _ in range(rows // siblings):
            few = [self.page() for _ in range(pages)]
            found.append([self.seen(self._rng.choice(few)) if few else self.page() for _ in range(siblings)])
        return found


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of the faster of two runs, and the result."""
    best = float("inf")
    for _ in range(2):
        began = time.process_time()
        result = function()
        best = min(best, time.process_time() - began)
    return best, result


def compare(name: str, groups: Groups, threshold: float) -> Measurement:
    """Print a line of the table, and return its figures."""
    from testkit.anchor_keys import naive_clusters

    slow, expected = cpu_seconds(lambda: [naive_clusters(texts, threshold) for texts in groups])
    fast, found = cpu_seconds(lambda: [ours(texts, threshold) for texts in groups])
    if found != expected:
        msg = f"{name}: another partition than the reference's"
        raise AssertionError(msg)
    rows = sum(map(len, groups))
    joined = 1 - sum(len(set(firsts)) for firsts in expected) / rows
    print(f"| {name} | {rows} | {joined:.0%} | {slow:.2f} | {fast:.3f} | {slow / fast:.1f} |", flush=True)
    return Measurement(
        job="similarity anchors",
        size=f"{rows:,} texts, {name}",
        seconds=fast,
        clock="CPU",
        throughput=rows / fast,
        unit="texts/s",
        peak_gb=None,
        baseline="the reference's loop",
        baseline_seconds=slow,
        ratio=fast / slow,
        aims={"ratio": 0.2},
    )


def substitutions(steps: int, characters: int) -> None:
    """CPU time for the keys of steps of which each distinct state occurs ten times."""
    import numpy as np
    import polars as pl

    from lake.ids import text_hash
    from pipelines.credit.anchors.definitions import Substitution, Substitutions
    from pipelines.credit.steps import InputNeeds, StepBatch, select_inputs

    pages = Pages(characters - 12)
    views = [pages.page() for _ in range(1000)]
    states = [f"Move {n // len(views):6d}. {views[n % len(views)]}" for n in range(steps // 10)]
    chosen = np.random.default_rng(0).integers(0, len(states), steps)
    distinct = pl.DataFrame({"state": states, "state_hash": [text_hash(state) for state in states]})
    frame = distinct[chosen].with_columns(
        pl.Series("group_id", np.arange(steps) // 160),
        pl.Series("episode_id", np.arange(steps) // 20),
        pl.Series("step_index", np.arange(steps) % 20),
    )
    definition = Substitutions(substitutions=(Substitution(pattern=r"^Move +[0-9]+\. "),))
    needs = InputNeeds(anchor_columns=definition.columns(frame.columns))
    batch = StepBatch.of(select_inputs(frame.lazy(), needs).collect(), needs)
    if batch is None:
        return
    seconds, keys = cpu_seconds(lambda: definition.keys(batch, np.ones(steps, np.bool_)))
    print(f"| {steps:,} | {len(states):,} | {keys.n_unique():,} | {seconds:.2f} | {steps / seconds:,.0f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--characters", type=int, default=600)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=1_000_000)
    add_measurement_option(parser)
    options = parser.parse_args()
    pages = Pages(options.characters)
    print("| texts | rows | joined | reference, CPU s | ours, CPU s | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    kinds = [("8 siblings, 3 pages", 8, 3), ("8 siblings, strangers", 8, 0), ("16 siblings, 6 pages", 16, 6)]
    kinds.append(("one group, 10 pages", options.rows, 10))
    measurements = [
        compare(name, pages.groups(options.rows, siblings, few), options.threshold) for name, siblings, few in kinds
    ]
    write_measurement(options.measurement, max(measurements, key=lambda measurement: measurement.ratio))
    if not options.steps:
        return
    print("\n| steps | distinct states | keys | CPU s | steps/s |")
    print("| --- | --- | --- | --- | --- |")
    substitutions(options.steps, options.characters)


if __name__ == "__main__":
    main()
