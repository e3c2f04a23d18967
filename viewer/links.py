"""Pages and their addresses: every page is a deep link, with ids as 13 base32 characters.

Parameters, the same on every page: run, task, group, episode, step, anchor, credit (job or series), job, update,
reject, and the filters of the lists.
"""

from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import urlencode

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

    @property
    def path(self) -> str:
        """The page's path in the address; Runs is the front page."""
        return "" if self is Page.RUNS else self.value.removeprefix("screens/").removesuffix(".py")


Values = Mapping[str, str | int | float | bool | None]
_TRUE = "true"


def parameters(**values: str | int | float | bool | None) -> dict[str, str]:
    """Query parameters without those that are not set. Ids are given as text (`lake.ids.to_text`)."""
    return {k: (_TRUE if v is True else str(v)) for k, v in values.items() if v not in (None, "", False)}


def url(page: Page, **values: str | int | float | bool | None) -> str:
    """The address of a page, relative to the viewer's root."""
    query = urlencode(parameters(**values))
    return f"/{page.path}?{query}" if query else f"/{page.path}"


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
    text = given(name)
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def given_float(name: str) -> float | None:
    """A finite number of the present address; None if there is none."""
    try:
        value = float(given(name) or "nan")
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
