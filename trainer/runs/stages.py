"""Several trainings in a row from one configuration: sft, then offline RL from its weights.

    [trainer]
    model = "smollm2"
    episodes_per_step = 16

    [[trainer.stages]]
    name = "sft"
    loss = "sft"
    where = "env_return > 0"

    [[trainer.stages]]
    name = "rl"
    loss = "awr"

A stage is an ordinary run in a folder of its own below --out: a job with its checkpoints, resumed where it was. What
a stage does not set it takes from [trainer]; a stage without a model of its own starts from the weights of the one
before.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lake.errors import UsageError
from lake.lake import Lake
from lake.settings import leaves, validated, value_at
from trainer.backends.ranks import join_ranks
from trainer.config import TrainConfig
from trainer.data.select.selection import select_episodes
from trainer.runs.offline import OnPlan, resume, train
from trainer.runs.progress import counted
from trainer.runs.runs import RunFolder, check_unchanged
from trainer.train_settings import describe_idle, idle_options, is_idle, is_set, layered, without_option

if TYPE_CHECKING:
    from trainer.runs.training_run import Progress, TrainResult

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the trainings."""

    name: str
    """Also the name of its folder."""
    config: TrainConfig
    """What it trains; `model` is the run's for stages that follow another, until that one has ended."""
    follows: bool
    """It starts from the weights of the stage before."""


def read_stages(settings: Mapping[str, Any]) -> list[Stage]:
    """The stages of the section [trainer]; empty if it has none.

    Raises:
        UsageError: a stage without name or with one that was used, a field that TrainConfig does not know, or an
            option without effect.
    """
    common = {name: value for name, value in settings.items() if name != "stages"}
    found = settings.get("stages", [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UsageError("stages are tables: write [[trainer.stages]] above each")
    stages: list[Stage] = []
    for position, entry in enumerate(found):
        own = dict(entry)
        name = own.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {stage.name for stage in stages}:
            raise UsageError(
                f"stage {position + 1}: name is {name!r}; each stage needs a name of its own, of small letters, "
                "digits, _ and -"
            )
        config = validated(TrainConfig, layered(common, own), f"stage {name}: ")
        stages.append(Stage(name, config, follows=position > 0 and "model" not in own))
    _check_common_loss(common, [stage.config.loss.name for stage in stages])
    return _effective(stages, [{key: value for key, value in entry.items() if key != "name"} for entry in found])


def _check_common_loss(common: Mapping[str, Any], losses: list[str]) -> None:
    """Refuse (UsageError) options of a loss in [trainer] if no stage has this loss."""
    settings = layered({}, common)
    name, options = value_at(settings, "loss.name"), [one for one in leaves(settings) if one.startswith("loss.")]
    if losses and name is not None and name not in losses and len(options) > 1:
        told = ", ".join(f"`{one}`" for one in options if one != "loss.name")
        raise UsageError(f"{told} of loss {name} in [trainer]: no stage has this loss, they have {', '.join(losses)}")


def _effective(stages: list[Stage], own: list[Mapping[str, Any]]) -> list[Stage]:
    """The stages without what they took from [trainer] and have no use for, as long as another stage has.

    A UsageError names an option that has no effect on the stage that sets it, or one of [trainer] without any.
    """
    given = [stage.config.model_dump(exclude_unset=True) for stage in stages]
    idle = [idle_options(stage.config, settings) for stage, settings in zip(stages, given, strict=True)]
    left: list[Stage] = []
    for stage, settings, useless, mine in zip(stages, given, idle, own, strict=True):
        wrong = {option: why for option, why in useless.items() if is_set(mine, option)}
        wrong |= {option: why for option, why in useless.items() if all(map(partial(is_idle, option), idle))}
        if wrong:
            raise UsageError(f"stage {stage.name}: {describe_idle(wrong)}")
        left.append(replace(stage, config=TrainConfig.model_validate(reduce(without_option, useless, settings))))
    return left


def train_stages(
    lk: Lake,
    stages: list[Stage],
    out: Path,
    *,
    run_id: str,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
) -> "TrainResult":
    """Train the stages in their order, each resumed if it was started before; the last result, with the notes of all.

    A stage's run is called run_id/name, and has a folder of its own in `out`.

    Raises:
        UsageError, DataRefusedError, CheckpointError: of a stage; the ones before it stand.
    """
    notes: list[str] = []
    result: TrainResult | None = None
    join_ranks(stages[0].config.device).on_rank_zero(lambda: _check_episodes(lk, stages, out))
    for stage in stages:
        folder, config = out / stage.name, stage.config
        if stage.follows and result is not None:
            config = config.model_copy(update={"model": str(result.model.resolve())})
        ranks = join_ranks(config.device)
        record = ranks.on_rank_zero(RunFolder(folder).read)
        if record is None:
            name = f"{run_id}/{stage.name}"
            result = train(lk, config, folder, run_id=name, on_step=on_step, on_plan=on_plan)
        else:
            check_unchanged(config.model_dump(mode="json", exclude_unset=True), record.config)
            result = resume(lk, folder, on_step=on_step, on_plan=on_plan)
        notes += [f"stage {stage.name}: {note}" for note in result.notes]
        digest = result.weights_sha256[:16]
        notes.append(f"stage {stage.name}: {counted(result.optimizer_steps, 'optimizer step')}, weights {digest}")
    assert result is not None
    return replace(result, notes=notes)


def _check_episodes(lk: Lake, stages: list[Stage], out: Path) -> None:
    """Refuse at once what a later stage would not find, and not after hours of the ones before it.

    A UsageError or DataRefusedError of a stage that has not been started.
    """
    snapshot = lk.snapshot()
    for stage in stages:
        if RunFolder(out / stage.name).read() is None:
            select_episodes(snapshot, stage.config.where, place=f"stage {stage.name}: where")
            if stage.config.validation is not None:
                select_episodes(snapshot, stage.config.validation.where, place=f"stage {stage.name}: validation.where")
