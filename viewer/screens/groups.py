"""Groups: the server-paged list, with what tells a live group from a dead one."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from viewer import choices, tables, taking
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import chip
from viewer.queries import groups
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
    "group_id": tables.ident("Group"),
}


def show() -> None:
    """The page."""
    ui.header("Groups")
    if not read(groups.total, GroupFilter()):
        ui.empty("This lake holds no groups yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    wanted = _filter()
    total = read(groups.total, wanted)
    if not total:
        st.info("No group matches these filters.", icon=":material/filter_alt_off:")
        return
    order = tables.ordered_by()
    frame = read(groups.page, wanted, ui.pager(total, "groups"), order)
    tables.table(
        frame,
        tables.known(frame, _COLUMNS, order),
        label="Groups",
        href=lambda row: href(Page.GROUP, group=row["group_id"], score=wanted.score),
        key="group_id",
        sortable=groups.ORDERS,
    )
    taking.rows(
        "groups",
        order,
        run=wanted.run,
        task=wanted.task,
        signal=wanted.signal,
        round=wanted.collection_round,
        score=wanted.score,
        grouping=wanted.grouping,
    )


def _filter() -> GroupFilter:
    with st.container(border=True):
        names = read(groups.groupings)
        widths = [2, 2, 2, 1.2, 2.5, *([1.6] if names else [])]
        columns = st.columns(widths, vertical_alignment="bottom")
        with columns[0]:
            run = choices.run()
        with columns[1]:
            task = choices.task()
        with columns[2]:
            score = choices.outcome(run)
        with columns[3]:
            round_ = st.number_input("Round", 0, value=None, step=1, key="round", placeholder="any", **ui.FILTER)
        with columns[4]:
            signal = st.segmented_control("Signal", list(map(str, Signal)), key="signal", **ui.FILTER)
        grouping = _grouping(names, columns[5]) if names else None
    return GroupFilter(
        run, task, Signal(signal) if signal else None, None if round_ is None else int(round_), score, grouping
    )


def _grouping(names: list[str], place: DeltaGenerator) -> str | None:
    asked = given("grouping")
    if asked is not None and asked not in names:
        ui.missing(f"There is no grouping {chip(asked)} in this lake; showing groups as they were collected.")
    meaning = "Groups as `trajlake group` formed them, by the name they were given."
    chosen = place.selectbox(
        "Grouping", names, index=None, key="grouping", placeholder="as collected", help=meaning, **ui.FILTER
    )
    return None if chosen is None else str(chosen)


show()
