"""Settings of versions before losses owned their options (docs/decisions/0021-loss-options.md), as they stand now.

    loss = "awr"                      [loss]
    unit = "turn"                     name = "awr"
    [awr]                             unit = "turn"
    beta = 0.5                        beta = 0.5

Each loss had a section of its name; how it is averaged and what it compares stood beside them. Files are read through
`renewed`, and what runs, checkpoints and jobs have stored, every option of every loss, through `renewed_record`.
"""

from collections.abc import Mapping
from typing import Any

from lake.settings import merged, value_at
from trainer.losses import LOSSES, by_name
from trainer.losses.base import PairsConfig

_AVERAGES = ("aggregation", "unit", "aggregation_constant")
_FORMER = (*LOSSES, *_AVERAGES, "pairs")
"""Fields that there were."""


def renewed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of [trainer] in a file. A former field that no loss of them reads stays, and validation refuses it."""
    stages = settings.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        return _moved(settings, {})[0]
    former = {name: settings[name] for name in _FORMER if name in settings}
    unread, found = dict(former), []
    for stage in stages:
        own: Mapping[str, Any] = stage
        if "loss" in settings and (former or any(name in stage for name in _FORMER)):
            own = {"loss": settings["loss"]} | stage
        own, left = _moved(own, former)
        unread = {name: left[name] for name in unread if name in left}
        found.append(own)
    return {name: value for name, value in settings.items() if name not in former} | unread | {"stages": found}


def renewed_record(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A whole configuration as it was stored. What its loss never read is left out."""
    if not isinstance(stored.get("loss"), str):
        return dict(stored)
    return {name: value for name, value in _moved(stored, {})[0].items() if name not in _FORMER}


def _moved(settings: Mapping[str, Any], below: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of one run, with the former fields that its loss reads among the loss's options.

    `below` are former fields that hold for several runs; also returned is what the loss does not read of them.
    """
    own = {name: settings[name] for name in _FORMER if name in settings}
    table = by_name(settings.get("loss"))
    name = value_at({"loss": table}, "loss.name")
    if not isinstance(name, str) or name not in LOSSES or not (own or below):
        return dict(settings), dict(below)
    options, left = _split(merged(below, own), name)
    kept = {key: value for key, value in settings.items() if key not in own or key in left}
    return kept | {"loss": merged(options, table)}, {key: left[key] for key in below if key in left}


def _split(former: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a loss reads of former fields, as its options, and the rest."""
    fields = LOSSES[name].model_fields
    options: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for key, value in former.items():
        if key == "pairs" and isinstance(value, Mapping):
            read = {one: value[one] for one in value if one in (PairsConfig.model_fields if key in fields else fields)}
            options |= {"pairs": read} if key in fields else read
            left |= {"pairs": value} if len(read) < len(value) else {}
        elif key == name and isinstance(value, Mapping):
            options |= value
        elif key in fields and key in _AVERAGES:
            options |= {} if value is None else {key: value}
        else:
            left[key] = value
    return options, left
