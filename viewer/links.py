"""Pages, their addresses, and what people call things: an episode by run, task and rollout, a job by what it ran.

Every page is a deep link, with ids as 13 base32 characters. Parameters, the same on every page: run, task, group,
episode, step, anchor, credit (job or series), job, update, reject, page, and the filters of the lists. Names are
foreign text, as they were recorded: on a page they go through `viewer.plain`.
"""

import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.documents import json_object
from lake.tables import STATUSES
from viewer.queries import Row
from viewer.queries.groups import Signal

NAME = 120
"""Characters of a name in the heading of a page."""

# By the job's kind, the parameter that names it.
_NAMING = {
    "credit": "estimator",
    "score": "scorer",
    "reward": "reward",
    "train": "loss",
    "select": "name",
    "group": "grouping",
    "rescore": "checkpoint",
    "render": "model",
    "ingest": "source",
    "collect": "environment",
    "retract": "reason",
    "restore": "reason",
    "forget": "reason",
}


def episode(facts: Row) -> str:
    """An episode by what is given of it: run, task, rollout, then round and attempt where there are several."""
    names = ("run_id", "task_id", "rollout_index")
    return _named(facts, names, round=facts.get("collection_round"), attempt=facts.get("attempt") or None)


def group(facts: Row) -> str:
    """A group by run and task, then round and seed where it has them."""
    return _named(facts, ("run_id", "task_id"), round=facts.get("collection_round"), seed=facts.get("seed"))


def job(kind: str, parameters: str | None) -> str | None:
    """What a job ran: the estimator, scorer, loss, source, ...; None if its parameters do not say."""
    values = json_object(parameters)
    # The name stands alone, or among the options of what bears it.
    value = values.get(_NAMING.get(kind, ""))
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str) and name:
        return name
    return "ppo, online" if kind == "train" and "ppo" in values else None


def jobs(frame: pl.DataFrame) -> pl.Series:
    """The names of jobs: a column `name` from `kind` and `parameters`."""
    values = [job(*row) for row in frame.select("kind", "parameters").iter_rows()]
    return pl.Series("name", values, dtype=pl.String)


def _named(facts: Row, names: tuple[str, ...], **more: Any) -> str:
    name = " / ".join("\N{EN DASH}" if facts.get(name) is None else str(facts[name]) for name in names)
    return name + "".join(f", {key} {value}" for key, value in more.items() if value is not None)


class Page(StrEnum):
    """Scripts of the pages, relative to `app.py`."""

    RUNS = "screens/runs.py"
    EPISODES = "screens/episodes.py"
    EPISODE = "screens/episode.py"
    GROUPS = "screens/groups.py"
    GROUP = "screens/group.py"
    COMPARE = "screens/compare.py"
    ANCHORS = "screens/anchors.py"
    CHANGE = "screens/change.py"
    TRAINING = "screens/training.py"
    JOBS = "screens/jobs.py"
    JOB = "screens/job.py"
    REJECTS = "screens/rejects.py"
    ANNOTATIONS = "screens/annotations.py"
    SQL = "screens/sql.py"
    SINCE = "screens/since.py"


PARAMETERS = frozenset(
    """
    a_credit a_rounds a_run a_version about anchor as_of average axis b_credit b_rounds b_run b_version beside by
    chart credit definition episode error facets failed flag follow gone group grouping groups job kind list max min
    open opened over page q reason reasoning reject round round_from round_to run score scorer siblings signal since
    sort sql state status step steps steps_from steps_to success tag task text tool tools unlabelled unscored update
    values version version_from version_to
    """.split()  # noqa: SIM905
)
"""Parameters of all pages; the guide says which page has which."""


JOB_STATES = ("succeeded", "failed", "started")
_WHOLE = frozenset(
    (
        *("gone", "groups", "page", "round", "siblings", "step", "steps", "update", "version"),
        *("round_from", "round_to", "steps_from", "steps_to", "version_from", "version_to"),
    )
)
_FINITE = frozenset(("min", "max", "success"))
_ONE_OF: Mapping[str, Collection[str]] = {
    "status": STATUSES,
    "state": JOB_STATES,
    "signal": tuple(Signal),
    "unscored": ("true", "false"),
}


def nonsense() -> list[tuple[str, str, str]]:
    """Parameters of the present address whose value says nothing: name, value, and what it would have to be."""
    found = []
    for name in st.query_params:
        for value in filter(None, st.query_params.get_all(name)):
            if name in _WHOLE and whole(value) is None:
                found.append((name, value, "a whole number from 0"))
            elif name in _FINITE and finite(value) is None:
                found.append((name, value, "a number"))
            elif name in _ONE_OF and value not in _ONE_OF[name]:
                found.append((name, value, "one of " + ", ".join(_ONE_OF[name])))
    return found


def given(name: str) -> str | None:
    """A parameter of the present address; None if it is not there or empty."""
    return st.query_params.get(name) or None


def given_id(name: str) -> int | None:
    """An id of the present address. Raises ValueError: there is text, but no id."""
    text = given(name)
    return None if text is None else ids.from_text(text)


def given_ids(name: str) -> list[int]:
    """All ids of the present address under a name, in order. Raises ValueError: there is text that is no id."""
    return [ids.from_text(text) for text in st.query_params.get_all(name) if text]


def given_int(name: str) -> int | None:
    """A whole number of the present address; None if there is none."""
    return whole(given(name))


def whole(text: str | None) -> int | None:
    """A text as a number 0, 1, 2, ... of at most 18 digits; None if it is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def finite(text: str | None) -> float | None:
    """A text as a finite number; None if it is none."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
