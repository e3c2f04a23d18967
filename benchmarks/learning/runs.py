"""One run: `trajlake loop` in this process, from its seed's start weights to the end of its budget, and its measure."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import lake
from benchmarks.learning.arms import BY_NAME, START
from benchmarks.learning.play import play, player_options
from benchmarks.learning.results import Result, Round, Task
from benchmarks.learning.settings import ENVIRONMENTS
from benchmarks.learning.start import start_weights
from lake.lake import Lake
from trainer.online.settings import CollectConfig, CreditConfig, LoopConfig, OnlineConfig
from trainer.online.start import run_loop

WORLDS = 1_000_000
"""Seeds of the worlds that are trained on."""
_MOST_ROUNDS = 10_000
_ROUNDS = """
SELECT
    e.collection_round,
    avg((e.env_return >= 1)::INT) AS success,
    avg(e.num_steps) AS steps,
    sum((SELECT sum(len(context_ids) + len(action_ids)) FROM tokens AS t WHERE t.episode_id = e.episode_id)) AS tokens
FROM episodes AS e WHERE e.run_id = ? GROUP BY 1 ORDER BY 1
"""
_LIVE = "SELECT step, value FROM run_metrics WHERE kind = 'loop' AND run_id = ? AND name = 'loop/live_groups'"
_ENTROPY = """
SELECT first.collection_round, m.value
FROM (
    SELECT e.collection_round, min(b.optimizer_step) AS step
    FROM trained_batches AS b JOIN episodes AS e USING (episode_id) WHERE e.run_id = ? GROUP BY 1
) AS first JOIN run_metrics AS m USING (step) WHERE m.kind = 'train' AND m.run_id = ? AND m.name = 'entropy'
"""


def run_task(out: Path, task: Task, say: Callable[[str], None]) -> Result:
    """Train and measure. A killed run resumes until `remove_run` deletes its folder.

    Args:
        out: the study's folder.
        task: the run. Two undisturbed runs of one task give the same result.
        say: takes a line of progress.
    """
    began, cpu = time.perf_counter(), time.process_time()
    environment = ENVIRONMENTS[task.environment]
    regime = environment.regime(task.changes)
    model = start_weights(out, environment, regime, task.seed)
    folder = out / "runs" / task.name
    lk = lake.open(folder / "lake", create=True)
    rounds, updates = [], 0
    if task.arm != START:
        config = config_of(task, model)
        done = run_loop(lk, lake.open(folder / "lake"), config, folder / "run", task.name, resumes=True, say=say)
        model, updates, rounds = done.model, done.optimizer_steps, rounds_of(lk, task.name)

    def measure(run: str, temperature: float) -> int:
        worlds, seed = regime.held_out, task.seed
        play(
            lk, environment, model, run, split=task.split, worlds=worlds, siblings=1, seed=seed, temperature=temperature
        )
        return count_successes(lk, run)

    cold = regime.cold_temperature
    return Result(
        task=task,
        successes=measure(f"{task.name}-held-out", 1.0),
        cold_successes=None if cold is None else measure(f"{task.name}-cold", cold),
        worlds=regime.held_out,
        rounds=rounds,
        optimizer_steps=updates,
        seconds=round(time.perf_counter() - began, 1),
        cpu_seconds=round(time.process_time() - cpu, 1),
    )


def remove_run(out: Path, task: Task) -> None:
    """Delete a run's lake and weights, if any. Call it after its result is stored: a kill before loses nothing."""
    folder = out / "runs" / task.name
    if folder.exists():
        shutil.rmtree(folder)


def count_successes(lk: Lake, run: str) -> int:
    """Return the number of episodes of a run that reached the goal."""
    return int(lk.sql("SELECT count(*) FROM episodes WHERE run_id = ? AND env_return >= 1", [run]).item())


def rounds_of(lk: Lake, run: str) -> list[Round]:
    """Return what a run collected, round by round, rounds without an update included."""
    live_groups = dict(lk.sql(_LIVE, [run]).iter_rows())
    entropies = dict(lk.sql(_ENTROPY, [run, run]).iter_rows())
    return [
        Round(
            tokens=row["tokens"],
            success=row["success"],
            steps=round(row["steps"], 2),
            live_groups=int(live_groups[row["collection_round"]]),
            entropy=None if (entropy := entropies.get(row["collection_round"])) is None else round(entropy, 4),
        )
        for row in lk.sql(_ROUNDS, [run]).iter_rows(named=True)
    ]


def config_of(task: Task, model: Path) -> OnlineConfig:
    """Return the document of a run.

    Args:
        task: arm, environment, seed, learning rate.
        model: start weights.
    """
    environment, arm = ENVIRONMENTS[task.environment], BY_NAME[task.arm]
    regime = environment.regime(task.changes)
    return OnlineConfig(
        loop=LoopConfig(
            rounds=_MOST_ROUNDS,
            tokens=regime.tokens,
            collect=CollectConfig(
                player=player_options(environment, "train"),
                groups=regime.groups,
                group_size=regime.group_size,
                tasks=WORLDS,
            ),
            credit=CreditConfig(estimator=arm.estimator, options=arm.options),
        ),
        trainer=regime.training(str(model), task.learning_rate, task.seed, arm),
    )
