"""What people call things: an episode by run, task and rollout, a job by what it ran. Ids come second, never alone.

Names are foreign text, as they were recorded: on a page they go through `viewer.plain`.
"""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from viewer.queries.base import Row

NAME = 120
"""Characters of a name in the heading of a page."""

# By the job's kind, the parameters that name it: the first that is there.
_NAMING = {
    "credit": ("estimator",),
    "score": ("scorer",),
    "reward": ("reward",),
    "train": ("loss",),
    "select": ("name",),
    "group": ("grouping",),
    "rescore": ("checkpoint",),
    "render": ("model",),
    "ingest": ("source",),
    "collect": ("environment",),
    "retract": ("reason",),
    "forget": ("reason",),
}


def episode(facts: Row) -> str:
    """An episode by what is given of it: run, task, rollout, then round and attempt where there are several."""
    attempt = facts.get("attempt") or None
    return _joined(facts, ("run_id", "task_id", "rollout_index")) + _extra(
        {"round": facts.get("collection_round"), "attempt": attempt}
    )


def group(facts: Row) -> str:
    """A group by run and task, then round and seed where it has them."""
    return _joined(facts, ("run_id", "task_id")) + _extra(
        {"round": facts.get("collection_round"), "seed": facts.get("seed")}
    )


def job(kind: str, parameters: str | None) -> str | None:
    """What a job ran: the estimator, scorer, loss, source, ...; None if its parameters do not say.

    Args:
        kind: of the job.
        parameters: JSON, perhaps cut.
    """
    try:
        values: Any = json.loads(parameters or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, Mapping):
        return None
    found = next((said for name in _NAMING.get(kind, ()) if (said := _name_in(values.get(name)))), None)
    if kind == "train" and found is None and "ppo" in values:
        return "ppo, online"
    return found


def _name_in(value: Any) -> str | None:
    """A name, alone or among the options of what bears it."""
    named = value.get("name") if isinstance(value, Mapping) else value
    return named if isinstance(named, str) and named else None


def jobs(frame: pl.DataFrame) -> pl.Series:
    """The names of jobs: a column `name` from `kind` and `parameters`."""
    values = [job(*row) for row in frame.select("kind", "parameters").iter_rows()]
    return pl.Series("name", values, dtype=pl.String)


def _joined(facts: Row, names: tuple[str, ...]) -> str:
    return " / ".join("\N{EN DASH}" if facts.get(name) is None else str(facts[name]) for name in names)


def _extra(values: dict[str, Any]) -> str:
    return "".join(f", {name} {value}" for name, value in values.items() if value is not None)
