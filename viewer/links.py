"""Pages and their addresses: every page is a deep link, with ids as 13 base32 characters.

Parameters, the same on every page: run, task, group, episode, step, anchor, credit (job or series), job, update,
reject, page, and the filters of the lists.
"""

import math
from enum import StrEnum

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids


class Page(StrEnum):
    """Scripts of the pages, relative to `app.py`."""

    RUNS = "screens/runs.py"
    EPISODES = "screens/episodes.py"
    EPISODE = "screens/episode.py"
    GROUPS = "screens/groups.py"
    GROUP = "screens/group.py"
    TRAINING = "screens/training.py"
    JOBS = "screens/jobs.py"
    JOB = "screens/job.py"
    REJECTS = "screens/rejects.py"


def parameters(**values: str | int | None) -> dict[str, str]:
    """Query parameters without those that are not set. Ids are given as text (`lake.ids.to_text`)."""
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def given(name: str) -> str | None:
    """A parameter of the present address; None if it is not there or empty."""
    return st.query_params.get(name) or None


def given_id(name: str) -> int | None:
    """An id of the present address.

    Raises:
        ValueError: there is text, but no id.
    """
    text = given(name)
    return None if text is None else ids.from_text(text)


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
