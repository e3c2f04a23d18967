"""Settings of `trajlake train`: their sources (a TOML file, --set, flags, in that order), faults, and stages.

Flags and --set are fields of the section [trainer]. They cannot change a field that every stage sets.

An option that changes nothing is nearly always a mistake in the loss, or in another option that it depends on. The
command line refuses it before anything runs, and says what would have effect. A run started from Python notes it.

A configuration may train several stages in a row, for example sft, then offline RL from its weights:

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

A stage takes from [trainer] what it does not set.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from lake.errors import CheckpointError, UsageError
from lake.settings import leaves, merge, parse_typed_pairs, read_section, validate, value_at
from trainer.config import TrainConfig
from trainer.losses import LOSSES, read_loss_settings
from trainer.losses.base import Aggregation, Unit
from trainer.losses.policy import PolicyLoss


def layer_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings, where `above` wins, section by section; a loss above replaces another loss with its options."""
    below, above = (
        {name: read_loss_settings(setting) if name == "loss" else setting for name, setting in settings.items()}
        for settings in (below, above)
    )
    layered = merge(below, above)
    former, loss = value_at(below, "loss.name"), value_at(above, "loss.name")
    if former is not None and loss is not None and former != loss:
        layered["loss"] = above["loss"]
    return layered


def check_stored_layout(stored: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError where `source` stores a configuration from before losses owned their options.

    In that layout `loss` is a name, and each loss has a section (docs/decisions/0021-loss-options.md).
    """
    if isinstance(stored.get("loss"), str):
        raise CheckpointError(
            f"{source}: its configuration has the layout that trajlake wrote before losses owned their options "
            f'(`loss` is the text "{stored["loss"]}"). The last version that reads it is commit 1e8a324c: resume, '
            f"repeat or rescore there, or train again into another --out"
        )


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the settings of --set, nested. Raises UsageError: a pair is invalid."""
    return layer_settings({}, parse_typed_pairs(pairs, TrainConfig))


def read_settings(config_file: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as in the section [trainer]: those of the file, and `overrides` over them.

    Raises:
        UsageError: the file cannot be read, or its stages set all of `overrides` themselves.
    """
    settings = layer_settings(read_section(config_file, ["trainer"]) if config_file else {}, overrides)
    stages = settings.get("stages")
    if isinstance(stages, list) and stages and all(isinstance(stage, Mapping) for stage in stages):
        layered = [layer_settings({}, stage) for stage in stages]
        effective = {field: (None, value_at(overrides, field)) for field in leaves(overrides)}
        hidden = [
            field for field in effective if all(value_at(stage, field) not in effective[field] for stage in layered)
        ]
        if hidden:
            fields = ", ".join(hidden)
            msg = f"of no effect on the command line: {fields}; every stage of {config_file} sets it for itself"
            raise UsageError(msg)
    return settings


def build_config(settings: Mapping[str, Any], titles: tuple[str, str] = ("--model", "--loss")) -> TrainConfig:
    """Build the configuration of a run without stages from nested settings.

    Args:
        settings: fields of TrainConfig.
        titles: names of model and loss in messages.

    Raises:
        UsageError: a model or a loss is missing, a field is wrong, or an option has no effect.
    """
    settings = layer_settings({}, settings)
    has_loss = value_at(settings, "loss.name") is not None
    is_present = (value_at(settings, "model") is not None, has_loss)
    missing = [title for title, is_set_here in zip(titles, is_present, strict=True) if not is_set_here]
    if missing:
        # Other faults come first: they may explain this one, such as a misspelt `model`.
        present = {name: setting for name, setting in settings.items() if name != "loss" or has_loss}
        validate(TrainConfig, {"model": "", "loss": "sft"} | present)
        raise UsageError(f"{' and '.join(missing)} missing: say which model to train and what to optimise")
    config = validate(TrainConfig, settings)
    check_effect(config)
    return config


IdleOptions = dict[str, str]
"""Dotted option -> what would give it an effect."""


def find_idle_options(config: TrainConfig, settings: Mapping[str, Any] | None = None) -> IdleOptions:
    """Return the options of `settings` that a run never reads; None takes those that differ from their default."""
    settings = config.model_dump(exclude_defaults=True) if settings is None else settings
    return {option: why for rule in _RULES for option, why in rule(config, settings) if is_set(settings, option)}


def check_effect(config: TrainConfig) -> None:
    """Refuse (UsageError) options that were set and have no effect, naming what would give them one."""
    if idle := find_idle_options(config, config.model_dump(exclude_unset=True)):
        raise UsageError(describe_idle(idle))


def describe_idle(idle: IdleOptions) -> str:
    """Return options without effect as one line."""
    return "; ".join(f"`{option}` has no effect: {why}" for option, why in idle.items())


def without_option(settings: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return nested settings without a dotted option."""
    name, _, inner = option.partition(".")
    remaining = dict(settings)
    if not inner:
        remaining.pop(name, None)
    elif isinstance(remaining.get(name), Mapping):
        remaining[name] = without_option(remaining[name], inner)
    return remaining


def is_idle(option: str, idle: IdleOptions) -> bool:
    """Return whether options without effect include this one, by name or with its section."""
    return any(option == name or option.startswith(f"{name}.") for name in idle)


def is_set(settings: Mapping[str, Any], option: str) -> bool:
    """Return whether nested settings have a dotted option."""
    name, _, below = option.partition(".")
    inner = settings.get(name)
    return name in settings and (not below or (isinstance(inner, Mapping) and is_set(inner, below)))


def _check_reference(config: TrainConfig, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a reference policy without a comparison, and options of a KL term with coefficient 0."""
    del settings
    loss = config.loss
    kl = loss.kl if isinstance(loss, PolicyLoss) else None
    if not loss.needs.reference_logprobs:
        pull = "" if kl is None else "set loss.kl.coefficient, or "
        comparing = ", ".join(name for name, loss_class in LOSSES.items() if loss_class.base_needs.reference_logprobs)
        yield "reference", f"{loss.name} compares with none; {pull}choose one of {comparing}"
    if kl is not None and kl.coefficient == 0:
        for name in type(kl).model_fields:
            if name != "coefficient":
                yield f"loss.kl.{name}", "loss.kl.coefficient is 0"
    elif kl is not None and not kl.ratio_weighted:
        yield "loss.kl.max_ratio", "it limits the weight that loss.kl.ratio_weighted = true adds"


def _check_data(config: TrainConfig, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield credit that is not read, and details of limits that are not set."""
    if not (config.loss.needs.credit or config.live_only):
        yield "advantages", f"{config.loss.name} reads no credit; live_only = true would read it, to find dead groups"
    if config.max_staleness is None:
        yield "unknown_staleness", "set max_staleness, which it is about"
    if config.minibatches is not None and is_set(settings, "minibatches"):
        yield "episodes_per_step", "minibatches says how many optimizer steps an epoch has: leave one of them out"


def _check_averages(config: TrainConfig, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield options of the average of tokens that change nothing."""
    del settings
    needs = config.loss.needs
    if needs.aggregation is not Aggregation.UNIT_MEAN_TOKEN_SUM_NORM:
        why = f"loss.aggregation is {needs.aggregation}; unit_mean_token_sum_norm divides by it"
        yield "loss.aggregation_constant", why
    plain = needs.aggregation is Aggregation.TOKEN_MEAN and needs.unit is not Unit.TOKEN
    if plain and not needs.unit_above_token:
        modes = ", ".join(mode for mode in Aggregation if mode is not Aggregation.TOKEN_MEAN)
        why = f"loss.aggregation token_mean averages over tokens for every unit; set loss.aggregation to {modes}"
        yield "loss.unit", why


def _check_course(config: TrainConfig, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield options of loss scale, learning rate and validation that change nothing."""
    del settings
    if config.dtype != "float16":
        yield "optimizer.loss_scale", f"dtype is {config.dtype}; float16 scales the loss"
    if config.schedule.shape == "constant":
        yield "schedule.final_fraction", "schedule.shape is constant; cosine and linear fall to it"
    options = config.validation
    if options is not None and options.patience is None and not options.export and config.keep_last is None:
        yield "validation.min_improvement", "set validation.patience, validation.export or keep_last, which ask for it"


_Rule = Callable[[TrainConfig, Mapping[str, Any]], Iterator[tuple[str, str]]]
_RULES: tuple[_Rule, ...] = (_check_reference, _check_data, _check_averages, _check_course)


_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several trainings in a row."""

    name: str
    """Name of the stage and of its folder."""
    config: TrainConfig
    """Its configuration. `model` is the run's for stages that follow another, until that stage has ended."""
    follows: bool
    """Whether it starts from the weights of the stage before."""


def read_stages(settings: Mapping[str, Any]) -> list[Stage]:
    """Read the stages of the section [trainer]; empty if it has none.

    Raises:
        UsageError: a stage has no name or a repeated one, a field is unknown, or an option has no effect.
    """
    common = {name: setting for name, setting in settings.items() if name != "stages"}
    tables = settings.get("stages", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError("stages are tables: write [[trainer.stages]] above each")
    stages: list[Stage] = []
    for position, table in enumerate(tables):
        stage_settings = dict(table)
        name = stage_settings.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {stage.name for stage in stages}:
            raise UsageError(
                f"stage {position + 1}: name is {name!r}; each stage needs a separate name of small letters, digits, "
                "_ and -"
            )
        config = validate(TrainConfig, layer_settings(common, stage_settings), f"stage {name}: ")
        stages.append(Stage(name, config, follows=position > 0 and "model" not in stage_settings))
    losses, layered = [stage.config.loss.name for stage in stages], layer_settings({}, common)
    loss = value_at(layered, "loss.name")
    options = [f"`{field}`" for field in leaves(layered) if field.startswith("loss.") and field != "loss.name"]
    if losses and loss is not None and loss not in losses and options:
        raise UsageError(
            f"{', '.join(options)} of loss {loss} in [trainer]: no stage has this loss, they have {', '.join(losses)}"
        )
    return _drop_idle_options(stages, tables)


def _drop_idle_options(stages: list[Stage], tables: list[Mapping[str, Any]]) -> list[Stage]:
    """Return the stages without options of [trainer] that have no effect on them, but on another stage.

    Raises:
        UsageError: an option has no effect on the stage that sets it, or an option of [trainer] on no stage.
    """
    dumps = [stage.config.model_dump(exclude_unset=True) for stage in stages]
    idle = [find_idle_options(stage.config, settings) for stage, settings in zip(stages, dumps, strict=True)]
    remaining: list[Stage] = []
    for stage, settings, options, table in zip(stages, dumps, idle, tables, strict=True):
        wrong = {option: why for option, why in options.items() if is_set(table, option)}
        wrong |= {option: why for option, why in options.items() if all(map(partial(is_idle, option), idle))}
        if wrong:
            raise UsageError(f"stage {stage.name}: {describe_idle(wrong)}")
        config = TrainConfig.model_validate(reduce(without_option, options, settings))
        remaining.append(replace(stage, config=config))
    return remaining
