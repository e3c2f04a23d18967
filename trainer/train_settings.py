"""Where the settings of `trajlake train` come from: a TOML file, then --set, then flags; and what is wrong with them.

Flags and --set stand for the section [trainer]: with stages, what every stage sets for itself they cannot change.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lake.errors import UsageError
from lake.settings import from_file, leaves, typed_pairs, validated, value_at
from trainer.config import TrainConfig
from trainer.effect import check_effect
from trainer.former_layout import renewed
from trainer.layers import layered

FLAGS = {
    "learning_rate": "--lr",
    "live_only": "--live-only",
    "validation.where": "--validate",
    "loss.name": "--loss",
    "loss.aggregation": "--aggregation",
    "loss.unit": "--unit",
}
"""Fields whose flag has another name than they."""


def flag_of(field: str) -> str:
    """The flag that sets a field."""
    return FLAGS.get(field, f"--{field.replace('_', '-')}")


def given_settings(pairs: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line sets, as nested settings.

    Args:
        flags: field, dotted -> value.

    Raises:
        UsageError: a pair that is none, or a field that is set twice.
    """
    given = layered({}, typed_pairs(pairs, TrainConfig))
    for field, value in flags.items():
        if value_at(given, field) is not None:
            raise UsageError(f"{flag_of(field)} and --set {field} say the same thing twice: leave one of them out")
        nested = value
        for name in reversed(field.split(".")):
            nested = {name: nested}
        given = layered(given, nested)
    return given


def read_settings(config_file: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, as they would stand in [trainer].

    Raises:
        UsageError: the file cannot be read, or its stages leave nothing of what was given.
    """
    settings = renewed(layered(from_file(config_file, ["trainer"]) if config_file else {}, given))
    stages = settings.get("stages")
    if isinstance(stages, list) and stages and all(isinstance(stage, Mapping) for stage in stages):
        told = [layered({}, stage) for stage in stages]
        heard = {field: (None, value_at(given, field)) for field in leaves(given)}
        unheard = [field for field in heard if all(value_at(stage, field) not in heard[field] for stage in told)]
        if unheard:
            fields = ", ".join(unheard)
            msg = f"of no effect on the command line: {fields}; every stage of {config_file} sets it for itself"
            raise UsageError(msg)
    return settings


def configured(settings: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run without stages.

    Raises:
        UsageError: a model or a loss is missing, a field is wrong, or an option has no effect.
    """
    settings = layered({}, settings)
    needed = {"--model": value_at(settings, "model"), "--loss": value_at(settings, "loss.name")}
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        # What else is wrong comes first: a misspelt `model` is such a thing.
        others = {name: value for name, value in settings.items() if name != "loss" or "--loss" not in missing}
        validated(TrainConfig, {"model": "", "loss": "sft"} | others)
        raise UsageError(f"{' and '.join(missing)} missing: say which model to train and what to optimise")
    config = validated(TrainConfig, settings)
    check_effect(config)
    return config
