"""The data set: checkpoints of different strength, their episodes in a lake, credit, and what each arm trains on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict

import lake
from benchmarks.ladder.arms import CREDITS
from benchmarks.ladder.budget import Share, shares
from benchmarks.ladder.play import policy_of, rollouts
from benchmarks.ladder.settings import LadderSettings
from benchmarks.ladder.starts import Part, Starts
from lake import ids
from lake.lake import Lake
from pipelines.collect.environments.house import HouseScript, Split, list_vocabulary
from pipelines.credit.job import run_credit
from pipelines.select import DeadGroups, Selection, run_select
from trainer.config import TrainConfig
from trainer.online.demo import TinyPolicyConfig, save_policy
from trainer.runs.offline import make_deterministic, train

RUN = "ladder"
"""The run that the data set is."""
LIVE = "ladder-live"
"""The selection of groups with both outcomes."""
_CHECKPOINT_RATE = 4e-3
_TRACE_SEED = 1_000_000
"""Start seeds of a checkpoint's traces begin at a multiple of this."""
_START_SEED = 1000
"""Seeds of fresh start weights lie this far above the ladder's seeds, away from those of the checkpoints."""

Say = Callable[[str], None]


class DataSet(BaseModel):
    """What the arms learn from, and where they are measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: LadderSettings
    jobs: dict[str, str]
    """Credit job of each entry of `CREDITS`."""
    shares: dict[str, Share]
    """What an arm's data is cut to, by `Data`."""
    optimizer_steps: int
    """Of every arm, as near as whole passes allow."""
    held_out: list[int]
    """Start seeds."""
    validation: list[int]
    figures: dict[str, float]
    """About the episodes, for the report."""


def data_set(out: Path, settings: LadderSettings, say: Say) -> DataSet:
    """The data set in a folder, made if it is not there.

    Raises:
        ValueError: the folder holds one that was made with other settings.
    """
    path = out / "data.json"
    if path.exists():
        data_set = DataSet.model_validate_json(path.read_text())
        if data_set.settings != settings:
            msg = f"{path} was made with other settings; name another --out"
            raise ValueError(msg)
        return data_set
    for name in ("lake", "models"):
        shutil.rmtree(out / name, ignore_errors=True)
    data_set = make_data_set(out, settings, say)
    path.write_text(data_set.model_dump_json(indent=1))
    return data_set


def lake_of(out: Path) -> Lake:
    """The ladder's lake."""
    return lake.open(out / "lake", create=True)


def start_weights(out: Path, settings: LadderSettings, seed: int) -> Path:
    """The weights that every arm of a seed starts from: fresh ones of that seed, cloned from all episodes."""
    folder = out / "models" / f"start-{seed}"
    if (folder / "done").exists():
        return folder / "final"
    shutil.rmtree(folder, ignore_errors=True)
    fresh = out / "models" / f"fresh-{seed}"
    save_policy(fresh, list_vocabulary(), TinyPolicyConfig(), _START_SEED + seed)
    config = _cloning(fresh, f"run_id = '{RUN}'", settings.clone_epochs, _START_SEED + seed)
    model = train(lake_of(out), config, folder, run_id=f"start-{seed}").model
    (folder / "done").touch()
    return model


def _cloning(model: Path, where: str, epochs: int, seed: int) -> TrainConfig:
    return TrainConfig(
        model=str(model),
        loss="sft",
        where=where,
        epochs=epochs,
        learning_rate=_CHECKPOINT_RATE,
        seed=seed,
        checkpoint_every=1_000_000,
        threads=1,
    )


def make_data_set(out: Path, settings: LadderSettings, say: Say) -> DataSet:
    lk = lake_of(out)
    make_deterministic(TrainConfig(model="", loss="sft", threads=1))
    checkpoints = [_checkpoint(lk, out, settings, number, say) for number in range(len(settings.noises))]
    starts = Starts(settings, Part.TRAIN)
    figures: dict[str, float] = {}
    for number, model in enumerate(checkpoints):
        name = f"success of checkpoint {number + 1}"
        figures[name] = _play(lk, settings, number, model, starts.take(settings.starts))
        say(f"{name}: {figures[name]:.3f}")
    figures |= _figures(lk, starts.optima)
    jobs = {}
    for name, make in CREDITS.items():
        jobs[name] = ids.to_text(run_credit(lk, make(settings.gamma), where=f"run_id = '{RUN}'").job_id)
    run_select(lk, Selection(name=LIVE, filters=(DeadGroups(),)), where=f"run_id = '{RUN}'")
    cut, optimizer_steps = shares(lk, checkpoints[0], RUN, LIVE, jobs, settings)
    for name, share in cut.items():
        say(f"{name}: {share}")
    return DataSet(
        settings=settings,
        jobs=jobs,
        shares=cut,
        optimizer_steps=optimizer_steps,
        held_out=Starts(settings, Part.HELD_OUT).take(settings.held_out),
        validation=Starts(settings, Part.VALIDATION).take(settings.validation),
        figures=figures,
    )


def _checkpoint(lk: Lake, out: Path, settings: LadderSettings, number: int, say: Say) -> Path:
    """A policy that cloned a script with some noise, on starts from seeds of its own."""
    noise, name = settings.noises[number], f"checkpoint-{number + 1}"
    seeds_P = Starts(settings, Part.TRAIN, _TRACE_SEED * (1 + number)).take(settings.traces)
    traces = rollouts(settings, HouseScript(noise), seeds_P, split=Split.TRAIN, siblings=1, run_seed=number)
    with lk.job(kind="collect", run_id=f"{name}-traces", parameters={"noise": noise}) as job:
        job.record(traces)
    say(f"{name}: script with noise {noise}, success {fmean(record.env_return or 0.0 for record in traces):.3f}")
    fresh = out / "models" / f"{name}-fresh"
    save_policy(fresh, list_vocabulary(), TinyPolicyConfig(), number)
    config = _cloning(fresh, f"run_id = '{name}-traces'", 2, number)
    return train(lk, config, out / "models" / name, run_id=name).model


def _play(lk: Lake, settings: LadderSettings, number: int, model: Path, seeds_P: list[int]) -> float:
    """Record a checkpoint's groups; its success."""
    records = rollouts(
        settings,
        policy_of(model, f"checkpoint-{number + 1}"),
        seeds_P,
        split=Split.TRAIN,
        siblings=settings.siblings,
        run_seed=number,
        number=number,
    )
    with lk.job(kind="collect", run_id=RUN, parameters={"checkpoint": number + 1}) as job:
        job.record(records)
    return fmean(record.env_return or 0.0 for record in records)


_EPISODES = f"""
SELECT count(*) AS episodes, count(DISTINCT group_id) AS groups, avg(env_return) AS success, avg(num_steps) AS steps
FROM episodes WHERE run_id = '{RUN}'
"""
_GROUPS = f"""
SELECT count(*) FILTER (low < high) AS mixed, count(*) FILTER (high = 0) AS lost, count(*) FILTER (low = 1) AS won
FROM (SELECT min(env_return) AS low, max(env_return) AS high FROM episodes WHERE run_id = '{RUN}' GROUP BY group_id)
"""


def _figures(lk: Lake, optima_P: list[int]) -> dict[str, float]:
    """What the episodes are like."""
    rows = lk.sql(_EPISODES).row(0, named=True) | lk.sql(_GROUPS).row(0, named=True)
    return {
        "episodes": rows["episodes"],
        "groups": rows["groups"],
        "success": rows["success"],
        "actions an episode": rows["steps"],
        "groups with both outcomes": rows["mixed"],
        "groups without success": rows["lost"],
        "groups without failure": rows["won"],
        "least optimum": min(optima_P),
        "mean optimum": fmean(optima_P),
    }
