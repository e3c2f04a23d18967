"""Reading a lake of up to a billion steps: seconds and memory by its size, and how they grow with it.

    python benchmarks/bench_scale.py [--steps 1e6 1e7 1e8 1e9] [--keep FOLDER]

The lakes are simulated: log, file lists, episodes, and what a credit job found in each group are real rows of that
number; the steps are one real file of a million of them that the log names again and again, each time with the range of
ids that its episodes have. So everything that decides by keys and lists is as it would be, and nothing that reads all
steps is measured here (credit of everything: bench_credit.py). Episodes of 10 steps in groups of 8, a commit for every
million steps, 16 runs, nothing compacted.

Each question is asked in a process of its own, of the same lake; imports are left out. Prints Markdown for
docs/lab-log.md; the exponent is the slope between the two largest lakes.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import polars as pl  # noqa: E402

import lake  # noqa: E402
from lake import ids  # noqa: E402
from lake.storage.data_files import DataFileWrite, StagedRows  # noqa: E402
from lake.storage.objects import Objects  # noqa: E402
from lake.storage.store import Store  # noqa: E402
from lake.tables import TABLES  # noqa: E402
from lake.tables.contracts import conform  # noqa: E402
from pipelines.credit import GiGPO  # noqa: E402
from pipelines.credit import job as credit_job  # noqa: E402
from pipelines.credit.health import (  # noqa: E402
    DIAGNOSED,
    IntegrityConfig,
)
from pipelines.credit.inputs import (  # noqa: E402
    CreditConfig,
    Sources,
    hash_groups,
    read_inputs,
)

STEPS, SIBLINGS, CHUNK, RUNS = 10, 8, 100_000, 16
ESTIMATOR = GiGPO(step_source="terminal_score")
CONFIG = CreditConfig.resolve(ESTIMATOR, Sources(), IntegrityConfig(), purity=True)
LAST = "last"
"""The run whose steps are really there: the round that was just collected."""


def make(path: Path, steps: int) -> None:
    """A simulated lake."""
    lk, rng, store = lake.open(path, create=True), np.random.default_rng(0), Store(Objects(path))
    chunks = max(1, steps // (CHUNK * STEPS))
    first = _episodes(rng, CHUNK, "run 0", 0)
    shared = store.stage("steps", _steps(rng, first)).written
    _append(path, store, first, shared)
    row = first.select("episode_id", "group_id").row(0)
    (path / "known.json").write_text(json.dumps(row))
    inputs = read_inputs(lk.snapshot(), CONFIG, None)
    # What a credit job found in each group: the next one of its series compares with it.
    with credit_job._open_job(lk, CONFIG, inputs) as job:
        job.write("credit_groups", _found(first))
        for chunk in range(1, chunks):
            episodes = _episodes(rng, CHUNK, f"run {chunk * RUNS // chunks}", chunk)
            _append(path, store, episodes, shared)
            job.write("credit_groups", _found(episodes))
        job.counts |= {"rows_in": 0, "rows_out": 0}
    _round(path, rng)


def _append(path: Path, store: Store, episodes: pl.DataFrame, shared: DataFileWrite) -> None:
    store.append_staged("steps", [StagedRows(None, _named_again(path, shared, episodes))])
    version, _ = store.files("episodes")
    store.append_episodes([store.stage("episodes", episodes)], version)


def _round(path: Path, rng: np.random.Generator) -> None:
    """What a round brings: 64 groups whose credit is not computed yet."""
    store, episodes = Store(Objects(path)), _episodes(rng, 64 * SIBLINGS, LAST, 0)
    store.append("steps", _steps(rng, episodes))
    version, _ = store.files("episodes")
    store.append_episodes([store.stage("episodes", episodes)], version)


def _episodes(rng: np.random.Generator, n: int, run: str, collection_round: int) -> pl.DataFrame:
    groups = rng.integers(0, 2**63, n // SIBLINGS)
    frame = pl.DataFrame(
        {
            "episode_id": rng.integers(0, 2**63, n),
            "group_id": np.repeat(groups, SIBLINGS),
            "rollout_index": np.tile(np.arange(SIBLINGS), n // SIBLINGS),
            "env_return": (rng.random(n) < 0.4).astype(float),
            "content_hash": rng.integers(0, 2**63, n),
            "task_id": [str(task) for task in np.repeat(rng.integers(0, 1000, n // SIBLINGS), SIBLINGS)],
        }
    ).with_columns(
        pl.lit(run).alias("run_id"),
        pl.lit(collection_round).alias("collection_round"),
        pl.lit(0).alias("attempt"),
        pl.lit(ids.fresh_id()).alias("write_id"),
        pl.lit("completed").alias("status"),
        pl.lit(STEPS).alias("num_steps"),
        pl.lit("synthetic").alias("source_format"),
    )
    return conform(frame, TABLES["episodes"]).sort("run_id", "group_id", "episode_id")


def _steps(rng: np.random.Generator, episodes: pl.DataFrame) -> pl.DataFrame:
    n = episodes.height * STEPS
    rows = episodes.select("episode_id", "group_id", "run_id", "write_id")
    frame = rows[np.repeat(np.arange(episodes.height), STEPS)].with_columns(
        pl.Series("step_index", np.tile(np.arange(STEPS), episodes.height)),
        pl.Series("state_hash", rng.integers(0, 30, n)),
        pl.Series("reward", rng.random(n)),
        pl.lit("a state").alias("state"),
        pl.lit("an action").alias("action"),
        pl.lit("[]").alias("context"),
        pl.lit(value=True).alias("is_active"),
        pl.lit(value=True).alias("trainable"),
        pl.lit(value=False).alias("is_copied_context"),
    )
    return conform(frame, TABLES["steps"])


def _named_again(path: Path, shared: DataFileWrite, episodes: pl.DataFrame) -> DataFileWrite:
    """The file of steps under another name, as the log would list the steps of these episodes."""
    report = shared.report()
    name = f"{ids.to_text(ids.fresh_id())}-{report.name.rpartition('-')[2]}"
    os.link(path / "steps" / report.name, path / "steps" / name)
    statistics = json.loads(report.statistics)
    for column in ("episode_id", "group_id", "run_id", "write_id"):
        if column in statistics["minValues"]:
            statistics["minValues"][column] = episodes[column].min()
            statistics["maxValues"][column] = episodes[column].max()
    return DataFileWrite.of(msgspec.structs.replace(report, name=name, statistics=json.dumps(statistics)))


def _found(episodes: pl.DataFrame) -> pl.DataFrame:
    """Rows of `credit_groups` with the hashes that the job itself computes."""
    names = ("episode_id", "group_id", "run_id", "status", "write_id", "num_steps")
    selected = episodes.select(*names, episode_score="env_return", collected_group_id="group_id")
    selected = selected.sort("group_id", "episode_id")
    runs = selected.group_by("group_id").agg(pl.col("run_id").first())
    groups = hash_groups(selected, checks=CONFIG.checks).join(runs, on="group_id")
    groups = groups.with_columns(
        pl.lit(value=False).alias("is_dead"),
        pl.lit("").alias("findings"),
        pl.lit(0.5).alias("score_mean"),
        pl.col("steps").alias("defined_steps"),
        pl.col("episodes").alias("scored"),
    )
    required = [column.name for column in TABLES["credit_groups"].columns if column.required]
    present = {*groups.columns, "job_id", "series_id", "write_id"}
    return groups.with_columns(pl.lit(0).alias(name) for name in {*required, *DIAGNOSED} - present)


def opened(path: Path) -> object:
    """Open the lake and list the files of all tables."""
    snapshot = lake.open(path).snapshot()
    return sum(len(snapshot.files(name)) for name in ("episodes", "steps"))


def point_query(path: Path) -> object:
    """One episode by its id, two columns."""
    lk = lake.open(path)
    return lk.sql("SELECT env_return, num_steps FROM episodes WHERE episode_id = ?", [_known(path)[0]]).rows()


def group(path: Path) -> object:
    """Episodes and steps of one group."""
    lk = lake.open(path)
    return lk.sql("SELECT count(*) FROM steps WHERE group_id = ?", [_known(path)[1]]).rows()


def credit(path: Path) -> object:
    """Credit after a round of 64 groups, everything else unchanged."""
    report = credit_job.run_credit(lake.open(path), ESTIMATOR)
    return report.groups_computed, report.groups_kept


def credit_only(path: Path) -> object:
    """The same, told which groups: `only`, as a loop does."""
    report = credit_job.run_credit(lake.open(path), ESTIMATOR, only=f"run_id = '{LAST}'")
    return report.groups_computed


def compaction(path: Path) -> object:
    """Which files a compaction would merge."""
    from lake.care import maintenance as care
    from lake.read.snapshot import Snapshot

    snapshot = Snapshot(Store(Objects(path)))
    return {
        name: len(list(care._pack_files(snapshot.entries(name), care.TARGET_BYTES, allow_single=False)))
        for name in ("episodes", "steps")
    }


def episode_list(path: Path) -> object:
    """The first page of the viewer's list of episodes, by outcome."""
    from viewer.queries import ListWindow, Sort
    from viewer.queries.episodes import EpisodeFilter, read_page
    from viewer.reader import Reader

    return read_page(
        Reader(lake.open(path).snapshot()), EpisodeFilter(), Sort("outcome", descending=True), ListWindow()
    ).height


QUESTIONS: dict[str, Callable[[Path], object]] = {
    "open": opened,
    "point query": point_query,
    "one group, its steps": group,
    "compaction plan": compaction,
    "viewer's list": episode_list,
    "credit of a round, `only`": credit_only,
    "credit of a round": credit,
}


def _known(path: Path) -> tuple[int, int]:
    episode, group = json.loads((path / "known.json").read_text())
    return episode, group


def asked(question: str, path: Path) -> dict[str, float]:
    """Ask in a process of its own."""
    command = [sys.executable, __file__, "--ask", question, "--lake", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"seconds": math.nan, "cpu": math.nan, "gb": math.nan, "why": done.stderr.strip().splitlines()[-1:]}  # type: ignore[dict-item]
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _ask(question: str, path: Path) -> None:
    import viewer.queries.episodes  # noqa: F401 - imported before the clock starts

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, used = time.perf_counter(), time.process_time()
    answer = QUESTIONS[question](path)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{question}: {str(answer)[:300]}", file=sys.stderr)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "gb": peak / 1e6, "imports_gb": before / 1e6}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--ask", choices=list(QUESTIONS))
    parser.add_argument("--make", type=float)
    parser.add_argument("--lake", type=Path)
    args = parser.parse_args()
    if args.ask:
        _ask(args.ask, args.lake)
        return
    if args.make:
        make(args.lake, int(args.make))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        answers = {int(steps): _answers(folder, int(steps)) for steps in args.steps}
    print("| question | " + " | ".join(f"{steps:,}" for steps in answers) + " | exponent |")
    print("| --- |" + " --- |" * (len(answers) + 1))
    for question in QUESTIONS:
        rows = [found[question] for found in answers.values()]
        cells = " | ".join(f"{row['seconds']:.2f} s, {row['cpu']:.2f} CPU s, {row['gb']:.2f} GB" for row in rows)
        growth = math.nan
        if len(rows) > 1:
            a, b = list(answers)[-2:]
            growth = math.log(rows[-1]["cpu"] / rows[-2]["cpu"]) / math.log(b / a)
        print(f"| {question} | {cells} | {growth:.2f} |")


def _answers(folder: Path, steps: int) -> dict[str, dict[str, float]]:
    path = folder / f"{steps}"
    if not path.exists():
        # In a process of its own: what it takes is not what the questions take.
        subprocess.run([sys.executable, __file__, "--make", str(steps), "--lake", str(path)], check=True)
    found = {}
    for question in QUESTIONS:
        if question == "credit of a round":
            _round(path, np.random.default_rng())  # the question before it has had its round
        found[question] = asked(question, path)
        print(steps, question, found[question], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
