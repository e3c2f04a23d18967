"""SQL over a lake as a ratio to DuckDB on the same Parquet files, and the time of a point query over 1,000 files.

    python benchmarks/bench_sql.py [--steps 5000000] [--files 1000] [--repeat 5]

A lake's side opens the lake and its snapshot, so visibility is paid for; DuckDB's side is told the files. Each
measurement is a process of its own, imports left out; the two alternate, so that a drifting machine hits both. Prints
Markdown tables; the measurement is the first query over a whole table, with the waits of point queries.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

QUERIES = {
    "group by": "SELECT group_id, count(*) AS n, avg(reward) AS mean FROM {steps} GROUP BY group_id",
    "group by a 300-byte text": "SELECT state, count(*) AS n, avg(reward) AS mean FROM {steps} GROUP BY state",
    "window": """
        SELECT count(*) AS n, sum(a) AS total FROM (
            SELECT reward - avg(reward) OVER (PARTITION BY group_id, state_hash) AS a FROM {steps}
        )
        """,
}
SHAPES = {
    "one episode, two columns": "SELECT step_index, reward FROM steps WHERE episode_id = $id ORDER BY step_index",
    "one episode, all columns": "SELECT * FROM steps WHERE episode_id = $id ORDER BY step_index",
    "one group, all columns": "SELECT * FROM steps WHERE group_id = $group",
    "one trajectory": "SELECT * FROM trajectory WHERE episode_id = $id ORDER BY step_index",
}


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def of_lake(path: Path, name: str) -> float:
    """Opening the lake, and the query."""
    import lake

    # Commands import what they need when they need it: all of that before the clock starts.
    with tempfile.TemporaryDirectory() as folder:
        lake.open(Path(folder, "small"), create=True).sql("SELECT count(*) FROM steps")
    return timed(lambda: lake.open(path).sql(QUERIES[name].format(steps="steps")))


def of_duckdb(path: Path, name: str) -> float:
    """The query over the files as they lie in the folder."""
    import duckdb
    import polars as pl

    steps = f"read_parquet({[str(file) for file in sorted(Path(path, 'steps').glob('*.parquet'))]})"
    query = QUERIES[name].format(steps=steps)
    pl.from_arrow(duckdb.connect().sql("SELECT 1").to_arrow_table())
    return timed(lambda: pl.from_arrow(duckdb.connect().sql(query).to_arrow_table()))


def measure(side: str, path: Path, name: str) -> float:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--side", side, "--lake", str(path), "--query", name]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def ratios(steps: int, repeat: int, waits_ms: dict[str, float]) -> Measurement:
    """Print the table of whole-table queries; the figures of the first."""
    from synthetic import steps_lake

    print(f"| {steps:,} steps | DuckDB, s | lake, s | ratio |\n| --- | --- | --- | --- |")
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lake")
        steps_lake(path, steps)
        for name in QUERIES:
            pairs = [(measure("duckdb", path, name), measure("lake", path, name)) for _ in range(repeat)]
            base, lake_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            ratio = statistics.median(mine / theirs for theirs, mine in pairs)
            print(f"| {name} | {base:.3f} | {lake_s:.3f} | {ratio:.2f} |", flush=True)
            measurement = Measurement(
                job=f"SQL, {name}",
                size=f"{steps:,} steps",
                seconds=lake_s,
                clock="wall",
                throughput=steps / lake_s,
                unit="steps/s",
                peak_gb=None,
                baseline="DuckDB reads the Parquet files",
                baseline_seconds=base,
                ratio=ratio,
                waits_ms=waits_ms,
                aims={"ratio": 1.2} | dict.fromkeys(waits_ms, 100.0),
            )
            measurements.append(measurement)
    return measurements[0]


def many_files_lake(path: Path, files: int, seed: int = 0) -> tuple[Any, list[tuple[int, int]]]:
    """A lake of so many writes of one group each, nothing compacted, and its (episode_id, group_id) pairs.

    Ids are spread over 63 bits as real ones are, so that no file's range of them says anything.
    """
    import numpy as np
    import polars as pl
    from synthetic import GROUP_SIZE, _episodes, _steps, _texts

    import lake
    from lake import ids
    from lake.storage.objects import Objects
    from lake.storage.store import Store

    lake.open(path, create=True)
    store = Store(Objects(path))
    rng = np.random.default_rng(seed)
    pool = _texts(rng, 2_000, 300)
    hashes = np.array([ids.text_hash(text) for text in pool.to_list()])
    pairs = []
    for number in range(files):
        episodes_E = np.arange(number * GROUP_SIZE, (number + 1) * GROUP_SIZE)
        groups_E = np.full(GROUP_SIZE, number)
        write_id = ids.fresh_id()
        of_episode = {int(n): ids.key_hash("episode", int(n)) for n in episodes_E}
        spread = (
            pl.col("episode_id").replace_strict(of_episode, return_dtype=pl.Int64),
            pl.lit(ids.key_hash("group", number)).alias("group_id"),
        )
        store.append("steps", _steps(rng, episodes_E, groups_E, write_id, pool, hashes).with_columns(spread))
        version, _ = store.files("episodes")
        rows = _episodes(rng, episodes_E, groups_E, write_id).with_columns(spread)
        store.append_episodes([store.stage("episodes", rows)], version)
        pairs += [(episode, ids.key_hash("group", number)) for episode in of_episode.values()]
    return lake.open(path), pairs


def points(files: int, repeat: int) -> dict[str, float]:
    """Print the table of point queries; the milliseconds of an episode, first and next."""
    import lake
    from lake.read.query_pruning import get_planner

    waits_ms: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        lk, episodes = many_files_lake(Path(folder, "lake"), files)
        get_planner()
        opening = statistics.median(timed(lambda: lake.open(lk.uri).snapshot()) for _ in range(repeat))
        print(f"\n{files:,} files; opening the lake and its snapshot: {opening:.3f} s\n")
        print("| point query | first, s | next ones, s |\n| --- | --- | --- |")
        for name, query in SHAPES.items():
            first, later = [], []
            for number in range(repeat):
                with lake.open(lk.uri).snapshot().session() as session:
                    session.query("SELECT 1 AS warm")
                    for turn in range(3):
                        episode, group = episodes[(7919 * number + 13 * turn) % len(episodes)]
                        params = {"id": episode} if "$id" in query else {"group": group}
                        seconds = timed(lambda query=query, params=params: session.query(query, params))
                        (later if turn else first).append(seconds)
            print(f"| {name} | {statistics.median(first):.3f} | {statistics.median(later):.3f} |", flush=True)
            if name == "one episode, all columns":
                waits = {"first": first, "next": later}
                waits_ms = {
                    f"SQL, {when} episode, {files:,} files": 1e3 * statistics.median(times)
                    for when, times in waits.items()
                }
    return waits_ms


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_000_000)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--side", choices=["lake", "duckdb"])
    parser.add_argument("--lake", type=Path)
    parser.add_argument("--query", choices=list(QUERIES))
    add_measurement_option(parser)
    options = parser.parse_args()
    if options.side:
        print(json.dumps((of_lake if options.side == "lake" else of_duckdb)(options.lake, options.query)))
        return
    waits_ms = points(options.files, options.repeat)
    write_measurement(options.measurement, ratios(options.steps, options.repeat, waits_ms))


if __name__ == "__main__":
    main()
