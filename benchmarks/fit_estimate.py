"""What `trajlake estimate` computes with: fits of processor time, memory and bytes, and how well they hold elsewhere.

    python benchmarks/fit_estimate.py [--check] [--write] [--keep FOLDER]

For each workload a file of episodes is written and taken through the jobs by the commands themselves, each in a process
of its own: ingest, score, credit, credit after another round, export, plan and stream of an epoch, compact. What a job
takes is fitted as a sum of what its workload is made of (`pipelines.estimate.model`), each part with a factor that is
not negative, so that the relative errors are least. Processor seconds are fitted and not seconds on the clock, so that
other work on the machine matters little.

--write puts the fits into `pipelines/estimate/fits.json`. --check takes three workloads through the jobs that no fit
has seen, and prints for each figure what was predicted over what was measured: Markdown for docs/lab-log.md.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import orjson  # noqa: E402

from pipelines.estimate.model import (  # noqa: E402
    ACTION_SHARE,
    FITS,
    JOBS,
    TABLE_DRIVERS,
    TOKEN_CHARACTERS,
    Factors,
    Fits,
    Workload,
    compute_drivers,
    predict_amount,
)

FITTED = (
    Workload(episodes=1_000, episode_steps=10, step_tokens=100),
    Workload(episodes=4_000, episode_steps=10, step_tokens=100),
    Workload(episodes=4_000, episode_steps=40, step_tokens=100),
    Workload(episodes=4_000, episode_steps=10, step_tokens=400),
    Workload(episodes=16_000, episode_steps=5, step_tokens=60),
    Workload(episodes=40_000, episode_steps=10, step_tokens=40),
    Workload(episodes=160_000, episode_steps=2, step_tokens=20),
)
CHECKED = (
    Workload(episodes=2_000, episode_steps=25, step_tokens=200),
    Workload(episodes=10_000, episode_steps=8, step_tokens=150),
    Workload(episodes=80_000, episode_steps=8, step_tokens=60),
)
KEYS = (
    Workload(episodes=1_000_000, episode_steps=10, step_tokens=1),
    Workload(episodes=1_000_000, episode_steps=1, step_tokens=775),
)
"""Lakes of keys, and of lengths, for the jobs that read nothing else: small lakes do not tell how they grow."""
ROUND_GROUPS = 8
SCORER = "def answers(messages, **kwargs):\n    return float(len(messages))\n"
_DRIVER = """
import atexit, json, resource
from lake.cli import main

@atexit.register
def tell():
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * 1024.0}))

main()
"""
_VOCABULARY = 32_000
_POOL_TOKENS = 2_000_000
Measures = dict[str, dict[str, float]]
"""Figure, e.g. `credit`, -> {"cpu": processor seconds, "memory": bytes at the peak} or {"bytes": of a table}."""


def write_episodes(path: Path, work: Workload, *, collection_round: int, episodes: int) -> None:
    """A file of the lake's own JSONL: words by Zipf's law, a token a word, groups whole."""
    rng = np.random.default_rng(collection_round)
    ids_N = np.minimum(rng.zipf(1.3, _POOL_TOKENS), _VOCABULARY - 1)
    words = [f"{token:x}".rjust(TOKEN_CHARACTERS - 1, "w")[: TOKEN_CHARACTERS - 1] for token in range(_VOCABULARY)]
    logprobs_N = np.round(-rng.exponential(1.0, _POOL_TOKENS), 6)
    action = max(1, round(work.step_tokens * ACTION_SHARE))
    context = max(1, round(work.step_tokens) - action)

    def cut(n: int) -> tuple[list[int], str, list[float]]:
        at = int(rng.integers(0, _POOL_TOKENS - n))
        ids = ids_N[at : at + n].tolist()
        return ids, " ".join([words[token] for token in ids]), logprobs_N[at : at + n].tolist()

    with path.open("wb") as file:
        for episode in range(episodes):
            # Half of the states of a group are shared, as at the beginning of siblings' rollouts.
            task, index = divmod(episode, work.group_size)
            steps = []
            for step in range(work.episode_steps):
                seen, said = cut(context), cut(action)
                state = f"task {task} room {step}" if step % 2 == 0 else seen[1]
                tokens = {"context_ids": seen[0], "action_ids": said[0], "action_logprobs": said[2]}
                steps.append({"state": state + seen[1], "action": said[1], "tokens": tokens})
            row = {"task_id": str(task), "rollout_index": index, "run_id": "estimate", "steps": steps}
            row |= {"collection_round": collection_round, "env_return": float(rng.random() < 0.4)}
            file.write(orjson.dumps(row) + b"\n")


def command(*words: str) -> dict[str, float]:
    """Processor seconds and peak memory of one `trajlake` command, the processes that it starts included."""
    return _child([sys.executable, "-c", "from lake.cli import main; main()", *words])


def driver(*words: str) -> dict[str, float]:
    """The same of the process of a command alone, without those of its workers."""
    spread = [sys.executable, "-c", _DRIVER, *words, "--executor", "processes", "--workers", "2"]
    place = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(spread, env=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def task(name: str, lake: Path) -> dict[str, float]:
    """The same of a task of this file."""
    return _child([sys.executable, __file__, "--task", name, "--lake", str(lake)])


def _child(words: Sequence[str]) -> dict[str, float]:
    process = subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{said}")
    return {"cpu": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss * 1024.0}


def measured(work: Workload, folder: Path) -> Measures:
    """Take one workload through the jobs."""
    folder.mkdir(parents=True)
    rows, more, lake, scorer = folder / "episodes.jsonl", folder / "more.jsonl", folder / "lake", folder / "scorer.py"
    write_episodes(rows, work, collection_round=0, episodes=work.episodes)
    write_episodes(more, work, collection_round=1, episodes=ROUND_GROUPS * work.group_size)
    scorer.write_text(SCORER)
    place = ("--lake", str(lake))
    found: Measures = {
        "ingest": command("ingest", str(rows), *place),
        "commits of ingest": driver("ingest", str(rows), "--lake", str(folder / "other")),
        "score": command("score", f"{scorer}:answers", *place),
        "credit": command("credit", "gigpo", "--set", "step_source=terminal_score", *place),
        "export": command("export", *place, "--format", "jsonl", "--out", str(folder / "out")),
    }
    import lake as lakes

    found |= {name: {"bytes": float(lakes.open(lake).snapshot().size(name)[2])} for name in TABLE_DRIVERS}
    found |= {name: task(name, lake) for name in TASKS}
    command("ingest", str(more), *place)
    found["credit of a round"] = command("credit", "gigpo", "--set", "step_source=terminal_score", *place)
    found["compact"] = command("compact", *place)
    shutil.rmtree(folder)
    return found


def measured_of_keys(work: Workload, folder: Path) -> Measures:
    """One of `KEYS`: credit and ingest of a round in a simulated lake, or the plan of an epoch over lengths."""
    if work.episode_steps == 1:
        import bench_plan
        from synthetic import lengths_lake

        lengths_lake(folder, int(work.episodes))
        planned = bench_plan.measured(folder)
        return {"plan": {"cpu": planned["cpu"], "memory": planned["peak_gb"] * 1e9}}
    # In a process of its own: a child's peak begins with what its parent holds.
    make = "import pathlib, sys, bench_scale as b; b.make(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    subprocess.run([sys.executable, "-c", make, str(folder), str(int(work.steps))], env=environment, check=True)
    place, more = ("--lake", str(folder)), folder.with_suffix(".jsonl")
    found = {"credit of a round": command("credit", "gigpo", "--set", "step_source=terminal_score", *place)}
    write_episodes(more, FITTED[0], collection_round=0, episodes=ROUND_GROUPS * work.group_size)
    # Its time is that of a round; the keys that it holds are those of the lake.
    found["commits of ingest"] = {"memory": driver("ingest", str(more), *place)["memory"]}
    return found


def plan(lake: Path) -> None:
    """The plan of an epoch."""
    _plan(lake)


def stream(lake: Path) -> None:
    """The plan and every batch of an epoch."""
    from trainer.data.stream import Stream

    snapshot, made, config = _plan(lake)
    with Stream(snapshot, made, config.loss.needs, config) as batches:
        for _, micro_batches in batches.steps():
            assert micro_batches


def _plan(path: Path):  # noqa: ANN202
    import lake
    from lake.judgements.credit import find_credit
    from trainer.config import TrainConfig
    from trainer.data.plan import Plan
    from trainer.data.selection import select

    snapshot = lake.open(path).snapshot()
    config = TrainConfig(model="none", loss="ppo", episodes_per_step=64, token_budget=16_384, live_only=False)
    return (
        snapshot,
        Plan(select(snapshot, config, config.loss.needs, source=find_credit(snapshot, None)), config),
        config,
    )


TASKS: dict[str, Callable[[Path], None]] = {"plan": plan, "stream": stream}


def fitted(points: Sequence[tuple[Workload, float]], drivers: Sequence[str]) -> dict[str, float]:
    """Factors that are not negative, of least relative squared error: the best of every subset of the drivers."""
    values_PD = np.array([[compute_drivers(work)[name] for name in drivers] for work, _ in points])
    targets_P = np.array([value for _, value in points])
    best, least = np.zeros(len(drivers)), np.inf
    for size in range(1, len(drivers) + 1):
        for chosen in itertools.combinations(range(len(drivers)), size):
            scaled_PD = values_PD[:, chosen] / targets_P[:, None]
            factors, *_ = np.linalg.lstsq(scaled_PD, np.ones(len(points)), rcond=None)
            error = float(((scaled_PD @ factors - 1) ** 2).sum())
            if (factors >= 0).all() and error < least:
                best, least = np.zeros(len(drivers)), error
                best[list(chosen)] = factors
    return {name: float(f"{factor:.4g}") for name, factor in zip(drivers, best, strict=True) if factor}


def fits_of(points: Sequence[tuple[Workload, Measures]]) -> Fits:
    """The fits of all figures."""

    def fit(name: str, what: str, drivers: Sequence[str]) -> dict[str, float]:
        return fitted([(work, found[name][what]) for work, found in points if what in found.get(name, ())], drivers)

    jobs = {
        name: {"cpu": fit(name, "cpu", job.drivers), "memory": fit(name, "memory", job.memory)}
        for name, job in JOBS.items()
    }
    tables = {name: fit(name, "bytes", drivers) for name, drivers in TABLE_DRIVERS.items()}
    return Fits(machine=_machine(), jobs=jobs, tables=tables)


def _machine() -> str:
    began = time.process_time()
    sum(1 for _ in range(5_000_000))
    counted = time.process_time() - began
    return f"{os.cpu_count()} virtual cores, counts to 5 million in {counted:.2f} s, {time.strftime('%B %Y')}"


def main() -> None:
    """Measure, then fit or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path, default=None, help="folder for what was measured; read if it is there")
    parser.add_argument("--task", choices=list(TASKS))
    parser.add_argument("--lake", type=Path)
    args = parser.parse_args()
    if args.task:
        TASKS[args.task](args.lake)
        return
    points = [(work, _kept(work, args.keep)) for work in (CHECKED if args.check else FITTED + KEYS)]
    if args.check:
        _print_check(points, Fits.load())
        return
    fits = fits_of(points)
    _print_check(points, fits)
    if args.write:
        FITS.write_text(json.dumps(asdict(fits), indent=1) + "\n")


def _kept(work: Workload, keep: Path | None) -> Measures:
    name = f"{work.episodes}-{work.episode_steps}-{work.step_tokens:g}.json"
    if keep is not None and (keep / name).exists():
        found: Measures = json.loads((keep / name).read_text())
        return found
    with tempfile.TemporaryDirectory() as folder:
        found = (measured_of_keys if work in KEYS else measured)(work, Path(folder, "work"))
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / name).write_text(json.dumps(found))
    print(name, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, file=sys.stderr)
    return found


def _print_check(points: Sequence[tuple[Workload, Measures]], fits: Fits) -> None:
    titles = [f"{work.episodes:,} x {work.episode_steps} x {work.step_tokens:g}" for work, _ in points]
    print("| figure | " + " | ".join(titles) + " |")
    print("| --- |" + " --- |" * len(titles))
    for name in JOBS:
        for what, unit, scale in (("cpu", "CPU s", 1.0), ("memory", "GB", 1e9)):
            print(f"| {name}, {unit} | {_cells(points, name, what, fits.jobs[name][what], scale)} |")
    for name in TABLE_DRIVERS:
        print(f"| `{name}`, MB | {_cells(points, name, 'bytes', fits.tables[name], 1e6)} |")


def _cells(points: Sequence[tuple[Workload, Measures]], name: str, what: str, factors: Factors, scale: float) -> str:
    """Predicted over measured, and what was measured."""
    return " | ".join(
        f"{predict_amount(factors, work) / found[name][what]:.2f} ({found[name][what] / scale:.2f})"
        if what in found.get(name, ())
        else ""
        for work, found in points
    )


if __name__ == "__main__":
    main()
