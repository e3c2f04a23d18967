"""Credit from scan to commit: how long, how much memory, how it grows, and what an update costs.

    python benchmarks/bench_credit.py [sizes|loop|text|update|ray] [--steps 1000000 5000000 ...] [--repeat 3] [--all]

sizes   GiGPO over states of about 300 bytes with their hash stored, with and without --purity, and the exponent of
        growth. As ratios to two baselines: a raw Polars scan and sort of the same columns; and the floor, which also
        writes a result of the same columns, encoded as the job's. --all adds 100M steps, without state texts, without
        a baseline, once.
loop    the same against loops in Python over the same steps, which read them and keep the advantages in memory.
text    5M steps with states of 600 characters under a regular-expression anchor, which reads the texts.
update  one changed group among the steps of the last size: seconds and bytes, as fractions of the full job's.
ray     two Ray workers against local threads, on the last size.

Without a name, all five. Each run is a process of its own, so that peak memory is its own; what is compared
alternates, so that a drifting machine hits both. Seconds depend on what else runs; CPU seconds do less. Prints Markdown
tables; the measurement is that of the largest size, with purity.
"""

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

SIZES = [1_000_000, 5_000_000, 20_000_000]
LARGEST = 100_000_000
BASELINES = ("scan_and_sort", "floor")
COLUMNS = ["group_id", "episode_id", "step_index", "state_hash", "reward", "is_active", "is_action_valid"]
NORMALISED = {"kind": "substitutions", "substitutions": [{"pattern": r"[0-9]+", "replacement": "#"}]}
DISTINCT_TEXTS = 500_000


# ---------------------------------------------------------------- what is measured, each in a process of its own


def scan_and_sort(path: Path) -> None:
    """The first baseline: read the columns that credit reads and put them into canonical order."""
    _sorted_steps(path)


def floor(path: Path) -> None:
    """The second baseline, below which no credit is: scan, sort, and write advantages that cost no arithmetic.

    Two files a core, several at once, as the job's ranges. The values compress about as well as the job's.
    """
    import polars as pl

    from lake import ids
    from lake.storage.encoding import to_arrow, write_parquet
    from lake.tables import TABLES
    from lake.tables.contracts import conform

    table = TABLES["advantages"]
    state, of_step = pl.col("state_hash"), pl.col("step_index") + 7
    a_episode, a_step = pl.col("episode_id").hash() / 2.0**64, pl.col("state_hash") / of_step
    rows = _sorted_steps(path).select(
        *("episode_id", "step_index", "group_id"),
        **{name: pl.lit(ids.fresh_id()) for name in ("job_id", "series_id", "write_id")},
        run_id=pl.lit("synthetic"),
        defined=pl.lit(value=True),
        anchor_key=state,
        return_to_go=pl.col("reward").cum_sum() / of_step,
        a_episode=a_episode,
        a_step=a_step,
        advantage=a_episode + a_step,
        group_size=pl.lit(8),
        anchor_size=state % 8,
        anchor_episodes=state % 7,
        flags=pl.lit(""),
    )
    workers = os.cpu_count() or 1
    length = -(-rows.height // (2 * workers))

    def write_part(first: int) -> None:
        part = conform(rows.slice(first, length), table)
        write_parquet(str(path / f"floor-{first}.parquet"), iter([to_arrow(part, table)]), table)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(write_part, range(0, rows.height, length)))


def python_loop(path: Path) -> None:
    """The baseline of `loop`: the advantages of GiGPO's defaults, by dictionaries and loops."""
    import lake

    opened, columns = lake.open(path), ["group_id", "episode_id", "state_hash", "reward", "is_action_valid"]
    score_of = dict(opened.scan("episodes").select("episode_id", "env_return").collect().rows())
    order = ["group_id", "episode_id", "step_index"]
    rows = opened.scan("steps").sort(order).select(columns).collect().rows()
    compute_advantages(rows, score_of)


def compute_advantages(
    rows: list[tuple[int, int, int, float, bool]], score_of: dict[int, float], gamma: float = 0.95, penalty: float = 0.1
) -> list[float]:
    """GiGPO's advantages of steps in order, each of a group, an episode, a state, a reward, and whether it is valid."""
    rewards_of, scores_of = dict[int, list[float]](), dict[int, list[float]]()
    for group, episode, _, reward, _ in rows:
        if episode not in rewards_of:
            rewards_of[episode] = []
            scores_of.setdefault(group, []).append(score_of[episode])
        rewards_of[episode].append(reward)
    returns: list[float] = []
    for rewards in rewards_of.values():
        following, backwards = 0.0, []
        for reward in reversed(rewards):
            following = reward + gamma * following
            backwards.append(following)
        returns += reversed(backwards)
    step_scores = [ret - (0.0 if row[4] else penalty) for row, ret in zip(rows, returns, strict=True)]
    anchor_scores = dict[tuple[int, int], list[float]]()
    for (group, _, state, _, _), score in zip(rows, step_scores, strict=True):
        anchor_scores.setdefault((group, state), []).append(score)
    groups = {group: _mean_and_deviation(scores) for group, scores in scores_of.items()}
    anchors = {anchor: _mean_and_deviation(scores) for anchor, scores in anchor_scores.items()}
    advantages = []
    for (group, episode, state, _, is_valid), score in zip(rows, step_scores, strict=True):
        mean, deviation = groups[group]
        episode_side = (score_of[episode] - mean) / (deviation + 1e-6)
        episode_side -= 0.0 if is_valid else penalty / max(deviation, penalty)
        mean, deviation = anchors[group, state]
        advantages.append(episode_side + (score - mean) / (deviation + 1e-6))
    return advantages


def _mean_and_deviation(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _sorted_steps(path: Path) -> "pl.DataFrame":
    import lake

    return lake.open(path).scan("steps").select(COLUMNS).sort("group_id", "episode_id", "step_index").collect()


def credit(path: Path, **options: Any) -> None:
    """The job: episodes and steps in, advantages committed."""
    import lake
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    run_credit(lake.open(path), GiGPO(), **options)


def credit_all(path: Path) -> None:
    """The job over everything."""
    credit(path, force=True)


def credit_bare(path: Path) -> None:
    """The job over everything, without a look at what shared anchors are worth."""
    credit(path, force=True, purity=False)


def credit_on_ray(path: Path) -> float:
    """The same on two Ray workers; when they were there, for their start is not in the figure."""
    from lake.execution import make_executor

    executor = make_executor("ray", 2)
    began = time.perf_counter()
    credit(path, force=True, executor=executor)
    return began


def credit_texts(path: Path) -> None:
    """The job under an anchor that normalises the texts."""
    import lake
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    run_credit(lake.open(path), GiGPO.model_validate({"anchors": NORMALISED}), force=True)


def change_a_group(path: Path) -> None:
    """An episode is taken back; not measured."""
    import lake

    lk = lake.open(path)
    lk.retract([lk.scan("episodes").select("episode_id").head(1).collect().item()])


TASKS: dict[str, Callable[[Path], float | None]] = {
    "scan_and_sort": scan_and_sort,
    "floor": floor,
    "python_loop": python_loop,
    "credit": credit,
    "credit_all": credit_all,
    "credit_bare": credit_bare,
    "credit_on_ray": credit_on_ray,
    "credit_texts": credit_texts,
    "change_a_group": change_a_group,
}


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process: seconds and CPU seconds (imports left out), peak GB, bytes moved."""
    import duckdb  # noqa: F401 - imported before the clock starts, like the rest
    import polars  # noqa: F401

    import lake.storage.encoding  # noqa: F401
    import pipelines.credit.job  # noqa: F401

    moved, worked = _moved(), time.process_time()
    called = time.perf_counter()
    began = TASKS[task](path) or called
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_gb": peak_gb, "bytes": _moved() - moved}))


def _moved() -> int:
    """Bytes this process has read and written by system calls, and mapped files apart."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"]) + int(counters["wchar"])


def measure(task: str, path: Path) -> dict[str, float]:
    """One run of a task in a fresh process."""
    command = [sys.executable, __file__, "--task", task, "--lake", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# ---------------------------------------------------------------- tables


@contextmanager
def fresh_lake(kept: Path, num_steps: int, **options: Any) -> Iterator[Path]:
    """A lake that nobody has written to: made once, and its files linked for everyone who wants it.

    Args:
        kept: folder of the lakes that have been made.
        num_steps: of the lake.
        options: of `synthetic.steps_lake`.
    """
    from synthetic import steps_lake

    made = kept / f"{num_steps}-{json.dumps(options, sort_keys=True)}"
    if not made.exists():
        steps_lake(made, num_steps, **options)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        yield Path(shutil.copytree(made, Path(folder, "lake"), copy_function=os.link))


def sizes(kept: Path, steps: list[int], repeat: int) -> Measurement | None:
    """The table of sizes, and how seconds grow; the figures of the last size that has a baseline."""
    measurement = None
    print(
        "| steps | scan + sort, s | floor, s | credit, s | to scan + sort | to the floor | of CPU | without purity, s "
        "| to the floor | of CPU | peak of the floor, GB | peak of credit, GB |"
    )
    print("| --- " * 12 + "|")
    found: dict[str, list[tuple[int, float]]] = {"credit_all": [], "credit_bare": []}
    for number in steps:
        base = BASELINES if number < LARGEST else ()
        with fresh_lake(kept, number, text=number < LARGEST) as path:
            rounds = range(repeat if base else 1)
            runs = [{task: measure(task, path) for task in (*base, *found)} for _ in rounds]
        cells = [f"{_median(runs, task, 'seconds'):.2f}" if base else "-" for task in BASELINES]
        for task, points in found.items():
            seconds = _median(runs, task, "seconds")
            points.append((number, seconds))
            cells.append(f"{seconds:.2f}")
            if task == "credit_all":
                cells.append(_ratio(runs, task, "scan_and_sort", "seconds"))
            cells += [_ratio(runs, task, "floor", unit) for unit in ("seconds", "cpu")]
        peaks = [[run[task]["peak_gb"] for run in runs for task in group] for group in (base, found)]
        cells += [f"{max(peak):.2f}" if peak else "-" for peak in peaks]
        print(f"| {number:,} | {' | '.join(cells)} |", flush=True)
        if base:
            measurement = summarise(number, runs, "floor", "scan, sort and write as many rows", {"ratio": 1.25})
    if len(steps) > 1:
        with_purity, without = (_exponent(points) for points in found.values())
        print(f"\nExponent of growth: {with_purity:.2f}; without purity: {without:.2f}")
    return measurement


def loop(kept: Path, steps: int, repeat: int) -> Measurement:
    """The job against a loop in Python."""
    with fresh_lake(kept, steps, text=True) as path:
        runs = [{task: measure(task, path) for task in ("python_loop", "credit_all")} for _ in range(repeat)]
    seconds = [f"{_median(runs, task, 'seconds'):.2f}" for task in ("python_loop", "credit_all")]
    print("| steps | loop in Python, s | credit, s | ratio |\n| --- | --- | --- | --- |")
    print(f"| {steps:,} | {' | '.join(seconds)} | {_ratio(runs, 'credit_all', 'python_loop', 'seconds')} |")
    return summarise(steps, runs, "python_loop", "loops in Python, in memory", {})


def summarise(
    steps: int, runs: list[dict[str, dict[str, float]]], task: str, baseline: str, aims: dict[str, float]
) -> Measurement:
    """Return the figures of the whole job against one of its baselines."""
    seconds = _median(runs, "credit_all", "seconds")
    return Measurement(
        job="credit, GiGPO",
        size=f"{steps:,} steps",
        seconds=seconds,
        clock="wall",
        throughput=steps / seconds,
        unit="steps/s",
        peak_gb=max(run["credit_all"]["peak_gb"] for run in runs),
        baseline=baseline,
        baseline_seconds=_median(runs, task, "seconds"),
        ratio=statistics.median(run["credit_all"]["seconds"] / run[task]["seconds"] for run in runs),
        aims=aims,
    )


def _median(runs: list[dict[str, dict[str, float]]], task: str, unit: str) -> float:
    return statistics.median(run[task][unit] for run in runs)


def _ratio(runs: list[dict[str, dict[str, float]]], task: str, base: str, unit: str) -> str:
    """A task to a baseline of its round; a dash where that was not measured."""
    return f"{statistics.median(run[task][unit] / run[base][unit] for run in runs):.2f}" if base in runs[0] else "-"


def _exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log seconds over log steps, by least squares."""
    logs = [(math.log(steps), math.log(seconds)) for steps, seconds in points]
    mean_x, mean_y = (statistics.mean(axis) for axis in zip(*logs, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope


def text(kept: Path, repeat: int) -> None:
    """5M steps of 600 characters under a regular expression."""
    with fresh_lake(kept, 5_000_000, state_bytes=600, distinct=DISTINCT_TEXTS) as path:
        runs = [measure("credit_texts", path) for _ in range(repeat)]
    print("| steps | characters | distinct texts | credit to commit, s | peak, GB |")
    print("| --- | --- | --- | --- | --- |")
    seconds, peak = statistics.median(run["seconds"] for run in runs), max(run["peak_gb"] for run in runs)
    print(f"| 5,000,000 | 600 | {DISTINCT_TEXTS:,} | {seconds:.2f} | {peak:.2f} |")


def update(kept: Path, steps: int, repeat: int) -> None:
    """One changed group among many."""
    with fresh_lake(kept, steps, text=True) as path:
        full = measure("credit_all", path)
        parts = []
        for _ in range(repeat):
            measure("change_a_group", path)
            parts.append(measure("credit", path))
    print("| steps | what | s | MB moved | of the full job's time | of its bytes |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| {steps:,} | everything | {full['seconds']:.2f} | {full['bytes'] / 1e6:,.0f} | 1 | 1 |")
    seconds = statistics.median(part["seconds"] for part in parts)
    moved = statistics.median(part["bytes"] for part in parts)
    fractions = f"{seconds / full['seconds']:.3f} | {moved / full['bytes']:.4f}"
    print(f"| {steps:,} | one group changed | {seconds:.2f} | {moved / 1e6:,.1f} | {fractions} |")


def ray(kept: Path, steps: int, repeat: int) -> None:
    """Two Ray workers against threads."""
    with fresh_lake(kept, steps, text=True) as path:
        runs = [[measure(task, path) for task in ("credit_all", "credit_on_ray")] for _ in range(repeat)]
    local, far = (statistics.median(run[i]["seconds"] for run in runs) for i in (0, 1))
    ratio = statistics.median(run[1]["seconds"] / run[0]["seconds"] for run in runs)
    print("| steps | local, s | Ray, 2 workers, s | ratio |")
    print("| --- | --- | --- | --- |")
    print(f"| {steps:,} | {local:.2f} | {far:.2f} | {ratio:.2f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=["sizes", "loop", "text", "update", "ray", "everything"], default="everything"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="100M steps too")
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--lake", type=Path)
    add_measurement_option(parser)
    options = parser.parse_args()
    if options.task:
        run_task(options.task, options.lake)
        return
    chosen = options.what
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder)
        if chosen in ("sizes", "everything"):
            measurement = sizes(kept, options.steps + [LARGEST] * options.all, options.repeat)
            if measurement is not None:
                write_measurement(options.measurement, measurement)
        if chosen in ("loop", "everything"):
            measurement = loop(kept, options.steps[0], options.repeat)
            if chosen == "loop":
                write_measurement(options.measurement, measurement)
        if chosen in ("update", "everything"):
            update(kept, options.steps[-1], options.repeat)
        if chosen in ("ray", "everything"):
            ray(kept, options.steps[-1], options.repeat)
        if chosen in ("text", "everything"):
            text(kept, options.repeat)


if __name__ == "__main__":
    main()
