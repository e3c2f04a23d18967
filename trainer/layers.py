"""Settings of a run over settings: a preset's under keyword arguments, a file's under the command line's."""

from collections.abc import Mapping
from typing import Any

from lake.settings import merged, value_at
from trainer.losses.registry import by_name


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
