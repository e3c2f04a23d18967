"""One run: an arm trains from its seed's start weights and plays the starts of its part."""

import os
import shutil
import time
from pathlib import Path

from benchmarks.ladder.arms import BY_NAME, Data
from benchmarks.ladder.budget import training
from benchmarks.ladder.data import LIVE, DataSet, lake_of, start_weights
from benchmarks.ladder.play import successes
from benchmarks.ladder.results import Result, Task
from benchmarks.ladder.starts import Part
from pipelines.collect.environments.house import Split
from trainer.config import TrainConfig
from trainer.runs.loop import StepReport
from trainer.runs.offline import make_deterministic, train


def run_task(out: Path, data: DataSet, task: Task) -> Result:
    """Train and measure.

    Args:
        out: the ladder's folder.
        data: its data set.
        task: what to run. Two runs of one task give the same result.
    """
    began = time.perf_counter()
    make_deterministic(TrainConfig(model="", loss="sft", threads=1))
    model = start_weights(out, data.settings, task.seed)
    reports: list[StepReport] = []
    folder = out / "runs" / f"{task.part}-{task.arm}-{task.seed}-{task.knob}-{task.learning_rate}-{os.getpid()}"
    if BY_NAME[task.arm].data is not Data.NOTHING:
        shutil.rmtree(folder, ignore_errors=True)
        config = config_of(data, task, model)
        model = train(lake_of(out), config, folder, run_id=folder.name, on_step=lambda r, _: reports.append(r)).model
    held_out = task.part == Part.HELD_OUT
    seeds_P = data.held_out if held_out else data.validation
    split = Split.HELD_OUT if held_out else Split.TRAIN
    reached = successes(data.settings, model, seeds_P, split=split, run_seed=task.seed)
    shutil.rmtree(folder, ignore_errors=True)
    return Result(
        task,
        reached,
        len(seeds_P),
        tokens=sum(report.step.tokens for report in reports),
        action_tokens=sum(report.step.loss_tokens for report in reports),
        optimizer_steps=len(reports),
        seconds=round(time.perf_counter() - began, 2),
    )


def config_of(data: DataSet, task: Task, model: Path) -> TrainConfig:
    """The training run of a task.

    Args:
        data: the data set.
        task: arm, seed, knob.
        model: start weights.
    """
    arm = BY_NAME[task.arm]
    share = data.shares[arm.data.value]
    fields = training(arm, () if task.knob is None else (task.knob,), data.jobs, LIVE)
    return TrainConfig(
        model=str(model),
        where=share.where,
        epochs=share.passes,
        minibatches=share.minibatches,
        learning_rate=task.learning_rate,
        seed=task.seed,
        checkpoint_every=1_000_000,
        **fields,
    )
