"""Groups: the server-paged list, with what tells a live group from a dead one."""

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from viewer import choices
from viewer import components as ui
from viewer.links import Page
from viewer.pinned import read
from viewer.queries import groups
from viewer.queries.groups import GroupFilter, Signal

_COLUMNS = {
    "run_id": "Run",
    "task_id": "Task",
    "collection_round": ui.count_column("Round"),
    "signal": st.column_config.TextColumn(
        "Signal", help="live: outcomes differ. dead: all the same. unjudged: < 2 scored."
    ),
    "size": ui.count_column("Siblings"),
    "scored": ui.count_column("Scored"),
    "mean_return": ui.number_column("Mean outcome"),
    "sd_return": ui.number_column("Std", "Sample standard deviation."),
    "lowest": ui.number_column("Lowest"),
    "highest": ui.number_column("Highest"),
    "mean_steps": ui.number_column("Mean steps", format="%.1f"),
    "group_id": ui.id_column("Group"),
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
    frame = read(groups.page, wanted, ui.pager(total, "groups"))
    clicked = ui.table(frame, "groups", _COLUMNS, opens="Open the group")
    if clicked is not None:
        ui.go(Page.GROUP, group=ids.to_text(frame["group_id"][clicked]), score=wanted.score)


def _filter() -> GroupFilter:
    with st.container(border=True):
        columns = st.columns([2, 2, 2, 1.2, 2.5], vertical_alignment="bottom")
        with columns[0]:
            run = choices.run()
        with columns[1]:
            task = choices.task()
        with columns[2]:
            score = choices.outcome(run)
        with columns[3]:
            round_ = st.number_input("Round", value=None, step=1, key="round", placeholder="any", **ui.FILTER)
        with columns[4]:
            signal = st.segmented_control("Signal", list(map(str, Signal)), key="signal", **ui.FILTER)
    return GroupFilter(run, task, Signal(signal) if signal else None, None if round_ is None else int(round_), score)


show()
