"""Choices that several pages offer: a run, a task, and which credit job's advantages to show."""

import json
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer.components import first_page
from viewer.links import given
from viewer.pinned import read
from viewer.plain import chip, number, one_line
from viewer.queries import runs
from viewer.queries.credit import Credit

MOST_RUNS = 1000
"""Runs that a choice lists; of more, a name can be typed."""


def run() -> str | None:
    """The run to show; None for all."""
    names = read(runs.names, MOST_RUNS)
    asked = given("run")
    if asked is not None and asked not in names and len(names) < MOST_RUNS:
        st.warning(f"There is no run {chip(asked)} in this lake; showing all runs.", icon=":material/search_off:")
    chosen = st.selectbox(
        "Run",
        names,
        index=None,
        key="run",
        bind="query-params",
        placeholder="all runs",
        on_change=first_page,
        accept_new_options=len(names) >= MOST_RUNS,
    )
    return None if chosen is None else str(chosen)


def task() -> str | None:
    """The task to show; None for all."""
    text = st.text_input(
        "Task",
        key="task",
        bind="query-params",
        placeholder="exact, or with *",
        help="The task's name as the source gives it. `*` stands for anything: `web*`.",
        on_change=first_page,
    )
    return (text or "").strip() or None


def credit(jobs: pl.DataFrame, subject: str) -> Credit | None:
    """Whose advantages to show: the job or series of the address if it covers the subject, else the newest.

    Args:
        jobs: credit jobs that cover the subject, newest first: job_id, series_id, ended_at, parameters.
        subject: what they cover, as part of the widget's key.
    """
    if jobs.is_empty():
        st.selectbox(
            "Credit",
            ["No credit job has covered this yet: trajlake credit gigpo"],
            disabled=True,
            key=f"credit-{subject}",
        )
        return None
    options = [ids.to_text(job) for job in jobs["job_id"]]
    labels = dict(zip(options, map(_label, jobs.iter_rows(named=True)), strict=True))
    key = f"credit-{subject}"
    index = _asked(jobs)
    if index is None:
        st.warning(f"Credit {chip(given('credit'))} does not cover this; showing the newest.", icon=":material/info:")

    def remember() -> None:
        st.query_params["credit"] = st.session_state[key]

    chosen = st.selectbox(
        "Credit",
        options,
        index=index or 0,
        key=key,
        format_func=lambda option: labels[option],
        on_change=remember,
        help="Credit jobs that gave advantages to this, newest first.",
    )
    return Credit(ids.from_text(chosen))


def describe(parameters: str | None, limit: int = 150) -> str:
    """Parameters of a job in one line: the estimator, what it read, its numbers, its words."""
    try:
        values: Any = json.loads(parameters or "{}")
    except (ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    config = values.pop("config", {})
    config = config if isinstance(config, dict) else {}
    name = str(values.pop("estimator", ""))
    # Numbers are what people turn, words are mostly as they come.
    options = sorted((values | config).items(), key=lambda option: (option[0] in config, isinstance(option[1], str)))
    plain = [f"{k} {number(v) if isinstance(v, int | float) else v}" for k, v in options if _is_plain(v)]
    return one_line(", ".join(([name] if name else []) + plain), limit)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _label(job: dict[str, Any]) -> str:
    return f"{job['ended_at']:%d %b %H:%M:%S}  {describe(job['parameters'])}  {ids.to_text(job['job_id'])}"


def _asked(jobs: pl.DataFrame) -> int | None:
    """Position of the job (or the newest of the series) that the address names; 0 if it names none, None if unknown."""
    text = given("credit")
    if text is None:
        return 0
    if not ids.is_text(text):
        return None
    wanted = ids.from_text(text)
    for column in ("job_id", "series_id"):
        positions = jobs[column].index_of(wanted)
        if positions is not None:
            return positions
    return None
