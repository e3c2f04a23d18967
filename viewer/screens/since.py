"""What changed since: new and retracted episodes, scores that are other, advantages that changed their sign."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake.errors import TrajlakeError
from viewer import components as ui
from viewer import pinned, tables
from viewer.links import Page, given
from viewer.navigation import href
from viewer.plain import chip, number
from viewer.queries import Row

# Series that are listed. (A string here would be printed: Streamlit shows stray expressions of its scripts.)
_MOST = 100
_EPISODES = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "rollout_index": tables.value("Rollout"),
    "status": tables.text("Status"),
    "episode_id": tables.ident("Episode"),
}
_TABLES = {
    "table": tables.text("Table"),
    "before": tables.value("Rows then", "Those of retracted episodes too."),
    "after": tables.value("Rows now", "Those of retracted episodes too."),
}
_SERIES = {
    "scorer": tables.text("Scorer"),
    "new": tables.value("New"),
    "gone": tables.value("Gone"),
    "other": tables.value("Another value"),
    "series_id": tables.ident("Series"),
}
_FLIPS = {
    "steps": tables.value("Steps", "Whose advantage has another sign."),
    "episodes": tables.value("Episodes"),
    "series_id": tables.ident("Credit series"),
}


def show() -> None:
    """The page."""
    if not given(pinned.AS_OF):
        # Up to now, whatever the session looked at before.
        pinned.refresh()
    ui.header("What changed since")
    since = given("since")
    if since is None:
        ui.not_found("The address names no state (`?since=...`): a snapshot, a time or a version.", Page.RUNS, "Runs")
    try:
        found = pinned.changes(since)
    except TrajlakeError as error:
        ui.not_found(chip(error, 400), Page.RUNS, "Runs")
    episodes = found.episodes
    st.caption(f"From {chip(since)} to the state above; `trajlake diff` says the same.")
    ui.facts(
        ("New episodes", number(episodes.added.height)),
        ("Retracted or replaced", number(episodes.removed.height), "An older state still shows them."),
        ("Scores that differ", number(episodes.scores.height)),
        ("Advantages with another sign", number(episodes.flips.height), "Of both states, within a series."),
    )
    if found.tables.height:
        tables.table(found.tables, _TABLES, label="Tables")
    for title, frame, page in (("New", episodes.added, "page"), ("Gone", episodes.removed, "gone")):
        if frame.height:
            st.subheader(f"{title} episodes", anchor=False)
            window = ui.pager(frame.height, "episodes", name=page)
            part = frame.slice(window.offset, window.limit)
            tables.table(part, _EPISODES, label=f"{title} episodes", href=_episode, key="episode_id")
    if found.series.height:
        st.subheader("Scores", anchor=False)
        tables.table(ui.first(found.series, _MOST, "series"), _SERIES, label="Scores by series")
    if found.flips.height:
        st.subheader("Signs of advantages", anchor=False)
        tables.table(ui.first(found.flips, _MOST, "series"), _FLIPS, label="Advantages by series")


def _episode(row: Row) -> str:
    return href(Page.EPISODE, episode=row["episode_id"])


show()
