"""Groups: the filtered, server-paged list, with what tells a live group from a dead one."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from viewer import choices, filters, score_columns, tables, taking
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import chip
from viewer.queries import facets, groups, runs
from viewer.queries.groups import GroupFilter, Signal

_COLUMNS = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "collection_round": tables.value("Round"),
    "signal": tables.text("Signal", "live: outcomes differ. dead: all the same. unjudged: < 2 scored."),
    "size": tables.value("Siblings"),
    "scored": tables.value("Scored"),
    "mean_return": tables.value("Mean outcome"),
    "sd_return": tables.value("Std", "Sample standard deviation."),
    "lowest": tables.value("Lowest"),
    "highest": tables.value("Highest"),
    "mean_steps": tables.value("Mean steps", digits=1),
    "shared_share": tables.share("Shared steps", "By the current credit: taken from a state that siblings share."),
    "error_share": tables.share("In error texts", "Of the shared steps: what is compared there is no one situation."),
    "empty_share": tables.share(
        "In empty states", "Of the shared steps: anything may lead there. A dash: not counted."
    ),
    "ways_in": tables.value("Ways in", "Mean number of distinct actions that led to a shared state.", digits=1),
}
_IDS = {"group_id": tables.ident("Group")}


def show() -> None:
    """The page."""
    ui.header("Groups")
    if not read(runs.total):
        ui.empty("This lake holds no groups yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    line, order = filters.line(), tables.ordered_by()
    wanted = GroupFilter(line.wanted, _signal(line.aside), _grouping(line.more))
    own = {"signal": wanted.signal, "grouping": wanted.grouping}
    filters.chips(choices.parameters(wanted.having) | {name: value for name, value in own.items() if value})
    filters.look_up(wanted.having)
    filters.facets(wanted.having, lambda facet, most: read(facets.of_groups, facet, wanted, most))
    total = read(groups.total, wanted, order)
    if not total:
        st.info("No group matches these filters.", icon=":material/filter_alt_off:")
        return
    frame = read(groups.page, wanted, ui.pager(total, "groups"), order)
    scores = read(groups.scores_of, wanted, tuple(frame["group_id"]))
    frame, scored = score_columns.beside(frame, scores, wanted.having.score, means=True)
    tables.table(
        frame,
        tables.known(frame, _COLUMNS | scored | _IDS, order),
        label="Groups",
        href=lambda row: href(Page.GROUP, group=row["group_id"], score=wanted.having.score),
        key="group_id",
        sortable=groups.ORDERS,
    )
    taking.rows("groups", order, list=choices.packed(wanted.having), **own)


def _signal(place: DeltaGenerator) -> Signal | None:
    chosen = place.segmented_control(
        "Signal", list(map(str, Signal)), key="signal", label_visibility="collapsed", **ui.FILTER
    )
    return Signal(chosen) if chosen else None


def _grouping(place: DeltaGenerator) -> str | None:
    names, asked = read(groups.groupings), given("grouping")
    if asked is not None and asked not in names:
        ui.missing(f"There is no grouping {chip(asked)} in this lake; showing groups as they were collected.")
    if not names:
        return None
    meaning = "Groups as `trajlake group` formed them, by the name they were given."
    chosen = place.selectbox(
        "Grouping", names, index=None, key="grouping", placeholder="as collected", help=meaning, **ui.FILTER
    )
    return None if chosen is None else str(chosen)


show()
