"""Episodes: the filtered, server-paged list. Every filter is in the address."""

import re

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from viewer import choices, filters, labelling, score_columns, tables, taking
from viewer import components as ui
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import number
from viewer.queries import episodes, facets, runs, search
from viewer.queries.episodes import ORDERS

_WHO = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "rollout_index": tables.value("Rollout"),
}
_COLUMNS = _WHO | {
    "collection_round": tables.value("Round"),
    "policy_version": tables.value("Policy version"),
    "status": tables.text("Status"),
    "outcome": tables.value("Outcome", "A dash means not scored, which is not 0."),
    "num_steps": tables.value("Steps"),
    "stop_reason": tables.text("Stopped by"),
}
_IDS = {"episode_id": tables.ident("Episode"), "group_id": tables.ident("Group")}


def show() -> None:
    """The page."""
    ui.header("Episodes")
    if not read(runs.total):
        ui.empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    line, order = filters.line(), tables.ordered_by()
    wanted = line.wanted
    filters.chips(choices.parameters(wanted))
    filters.look_up(wanted)
    filters.facets(wanted, lambda facet, most: read(facets.values, facet, wanted, most))
    totals = read(episodes.totals, wanted)
    if not totals["episodes"]:
        st.info("No episode matches these filters.", icon=":material/filter_alt_off:")
        return
    with line.aside:
        taking.offered(wanted, order, totals["episodes"])
        labelling.offered(wanted, order)
    groups = f"{number(totals['groups'])} group{'' if totals['groups'] == 1 else 's'}"
    window = ui.pager(
        totals["episodes"],
        f"episodes in {groups}, mean outcome {number(totals['mean_return'])} "
        f"({number(totals['scored'])} scored), mean steps {number(totals['mean_steps'], 1)}",
    )
    frame = read(episodes.page, wanted, order, window)
    scores = read(episodes.scores_of, tuple(frame["episode_id"]))
    frame, scored = score_columns.beside(frame, scores, wanted.score)
    known = read(episodes.known)
    columns = {name: column for name, column in _COLUMNS.items() if name in known} | scored | _IDS
    if wanted.text is not None:
        found = read(search.excerpts, wanted.text, frame.select("episode_id", "found_step"))
        frame = frame.join(found, on="episode_id", how="left", maintain_order="left")
        columns = _WHO | _found(search.hits(wanted.text)) | columns
    here = choices.packed(wanted, order)
    tables.table(
        frame,
        columns,
        label="Episodes",
        href=lambda row: href(Page.EPISODE, episode=row["episode_id"], step=row.get("found_step"), list=here),
        key="episode_id",
        sortable=ORDERS,
    )


def _found(hits: re.Pattern[str]) -> dict[str, tables.Column]:
    """Columns that say where a text was found."""
    return {
        "found_step": tables.value("Step", "The first step that holds it; a dash: messages of the episode."),
        "found_steps": tables.value("Hits", "Steps that hold it, and messages of the episode."),
        "found_in": tables.text("In"),
        "excerpt": tables.wide("Excerpt", hits=hits),
    }


show()
