"""Settings of `trajlake train`: where they come from (a TOML file, --set, flags, in that order), and faults in them.

Flags and --set stand for the section [trainer]: with stages, what every stage sets for itself they cannot change.

An option that changes nothing is nearly always a mistake: of the loss, or of another option that it depends on. The
command line refuses it, with what would have effect, before anything runs; a run started from Python notes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lake.errors import UsageError
from lake.settings import from_file, leaves, merged, typed_pairs, validated, value_at
from trainer.config import TrainConfig
from trainer.data.stream.aggregation import Aggregation, Unit
from trainer.former_layout import renewed
from trainer.losses import LOSSES, by_name
from trainer.losses.policy import PolicyLoss


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings, section by section; another loss than the one below begins with its own defaults."""
    below, above = _loss_as_table(below), _loss_as_table(above)
    both = merged(below, above)
    was, named = value_at(below, "loss.name"), value_at(above, "loss.name")
    if was is not None and named is not None and was != named:
        both["loss"] = above["loss"]
    return both


def _loss_as_table(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: by_name(value) if name == "loss" else value for name, value in settings.items()}


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
    """What the command line sets, as nested settings; `flags` are by field, dotted.

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


def configured(settings: Mapping[str, Any], named: tuple[str, str] = ("--model", "--loss")) -> TrainConfig:
    """The configuration of a run without stages.

    Args:
        settings: nested.
        named: how model and loss are called where they are given.

    Raises:
        UsageError: a model or a loss is missing, a field is wrong, or an option has no effect.
    """
    settings = layered({}, settings)
    has_loss = value_at(settings, "loss.name") is not None
    given = (value_at(settings, "model") is not None, has_loss)
    missing = [name for name, is_given in zip(named, given, strict=True) if not is_given]
    if missing:
        # What else is wrong comes first: a misspelt `model` is such a thing.
        others = {name: value for name, value in settings.items() if name != "loss" or has_loss}
        validated(TrainConfig, {"model": "", "loss": "sft"} | others)
        raise UsageError(f"{' and '.join(missing)} missing: say which model to train and what to optimise")
    config = validated(TrainConfig, settings)
    check_effect(config)
    return config


Idle = dict[str, str]
"""Option, dotted -> what would have effect."""


def idle_options(config: TrainConfig, given: Mapping[str, Any] | None = None) -> Idle:
    """The options that a run never reads, of those `given` (nested; None: what differs from its default)."""
    told = config.model_dump(exclude_defaults=True) if given is None else given
    return {option: why for rule in _RULES for option, why in rule(config, told) if is_set(told, option)}


def check_effect(config: TrainConfig, place: str = "") -> None:
    """Refuse (UsageError) options without effect among those that were given, naming what would have effect."""
    if idle := idle_options(config, config.model_dump(exclude_unset=True)):
        raise UsageError(place + describe_idle(idle))


def describe_idle(idle: Idle) -> str:
    """Options without effect as one line."""
    return "; ".join(f"`{option}` has no effect: {why}" for option, why in idle.items())


def without_option(settings: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Nested settings without one option, whose name is dotted."""
    name, _, rest = option.partition(".")
    left = dict(settings)
    if not rest:
        left.pop(name, None)
    elif isinstance(left.get(name), Mapping):
        left[name] = without_option(left[name], rest)
    return left


def is_idle(option: str, idle: Idle) -> bool:
    """Whether options without effect include this one, by name or with its section."""
    return any(option == one or option.startswith(f"{one}.") for one in idle)


def is_set(settings: Mapping[str, Any], option: str) -> bool:
    """Whether nested settings say something of an option, whose name is dotted."""
    name, _, rest = option.partition(".")
    inner = settings.get(name)
    return name in settings and (not rest or (isinstance(inner, Mapping) and is_set(inner, rest)))


def _reference(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A reference policy that nothing is compared with, and the shape of a pull that is not there."""
    del given
    loss = config.loss
    kl = loss.kl if isinstance(loss, PolicyLoss) else None
    if not loss.needs.reference_logprobs:
        pull = "" if kl is None else "set loss.kl.coefficient, or "
        comparing = ", ".join(name for name, one in LOSSES.items() if one.always.reference_logprobs)
        yield "reference", f"{loss.name} compares with none; {pull}choose one of {comparing}"
    if kl is not None and kl.coefficient == 0:
        for name in type(kl).model_fields:
            if name != "coefficient":
                yield f"loss.kl.{name}", "loss.kl.coefficient is 0"
    elif kl is not None and not kl.ratio_weighted:
        yield "loss.kl.max_ratio", "it limits the weight that loss.kl.ratio_weighted = true adds"


def _data(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Credit that is not read, and limits on what is not limited."""
    if not (config.loss.needs.credit or config.live_only):
        yield "advantages", f"{config.loss.name} reads no credit; live_only = true would, for which groups are dead"
    if config.max_staleness is None:
        yield "unknown_staleness", "set max_staleness, which it is about"
    if config.minibatches is not None and is_set(given, "minibatches"):
        yield "episodes_per_step", "minibatches says how many optimizer steps an epoch has: leave one of them out"


def _averages(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How tokens are averaged, where there is nothing to choose."""
    del given
    needs = config.loss.needs
    if needs.aggregation is not Aggregation.UNIT_MEAN_TOKEN_SUM_NORM:
        why = f"loss.aggregation is {needs.aggregation}; unit_mean_token_sum_norm divides by it"
        yield "loss.aggregation_constant", why
    plain = needs.aggregation is Aggregation.TOKEN_MEAN and needs.unit is not Unit.TOKEN
    if plain and not needs.unit_above_token:
        others = ", ".join(mode for mode in Aggregation if mode is not Aggregation.TOKEN_MEAN)
        why = f"loss.aggregation token_mean averages over tokens whatever the unit; set loss.aggregation to {others}"
        yield "loss.unit", why


def _course(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The learning rate, and validation."""
    del given
    if config.schedule.shape == "constant":
        yield "schedule.final_fraction", "schedule.shape is constant; cosine and linear fall to it"
    options = config.validation
    if options is not None and options.patience is None and not options.export and config.keep_last is None:
        yield "validation.min_improvement", "set validation.patience, validation.export or keep_last, which ask for it"


_Rule = Callable[[TrainConfig, Mapping[str, Any]], Iterator[tuple[str, str]]]
_RULES: tuple[_Rule, ...] = (_reference, _data, _averages, _course)
