"""Episodes: the filtered, server-paged list. Every filter is in the address."""

import re
from collections.abc import Callable

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.errors import UsageError
from lake.tables import STATUSES
from viewer import choices, tables, taking
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import href
from viewer.pinned import read
from viewer.pinned import search as search_for
from viewer.plain import chip, number, percent, visible
from viewer.queries import episodes, search
from viewer.queries.episodes import ORDERS, EpisodeFilter

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
    "episode_id": tables.ident("Episode"),
    "group_id": tables.ident("Group"),
}


def show() -> None:
    """The page."""
    ui.header("Episodes")
    if not read(episodes.totals, EpisodeFilter())["episodes"]:
        ui.empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    wanted, order = _filter(), tables.ordered_by()
    if wanted.text is not None:
        _search(wanted.text)
    totals = read(episodes.totals, wanted, order)
    if not totals["episodes"]:
        st.info("No episode matches these filters.", icon=":material/filter_alt_off:")
        return
    taking.offered(wanted, order, totals["episodes"])
    window = ui.pager(
        totals["episodes"],
        f"episodes in {number(totals['groups'])} groups, mean outcome {number(totals['mean_return'])} "
        f"({number(totals['scored'])} scored), mean steps {number(totals['mean_steps'], 1)}",
    )
    frame = read(episodes.page, wanted, order, window)
    columns = _COLUMNS
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


def _search(text: str) -> None:
    """Look a text up while its progress is shown; a reader who goes elsewhere or changes it ends that."""
    shown = st.empty()

    def report(done: int, of: int) -> None:
        share = done / of if of else 0.0
        shown.progress(share, f"Reading the texts that are new to the search: {percent(share)}" if of else "Searching")

    try:
        search_for(text, report)
    except UsageError as error:
        ui.missing(visible(str(error)))
        st.stop()
    finally:
        shown.empty()


def _found(hits: re.Pattern[str]) -> dict[str, tables.Column]:
    """Columns that say where a text was found."""
    return {
        "found_step": tables.value("Step", "The first step that holds it; a dash: messages of the episode."),
        "found_steps": tables.value("Hits", "Steps that hold it, and messages of the episode."),
        "found_in": tables.text("In"),
        "excerpt": tables.wide("Excerpt", hits=hits),
    }


def _filter() -> EpisodeFilter:
    """The filter widgets, bound to the address."""
    with st.container(border=True):
        first = st.columns([2, 2, 2.2, 3])
        with first[0]:
            run = choices.run()
        with first[1]:
            task = choices.task()
        with first[2]:
            status = st.multiselect("Status", STATUSES, key="status", placeholder="any", **ui.FILTER)
        with first[3]:
            text = st.text_input(
                "Text",
                key="text",
                placeholder='words, or "a text as it stands"',
                icon=":material/search:",
                help="In actions, tool calls, reasoning, states and messages, whatever the case: words and parts of "
                'words that one step holds, in any order; "in quotes" as it stands.',
                **ui.FILTER,
            )
        second = st.columns([1.6, 1.1, 1.1, 1, 1.1, 1.6, 1.4], vertical_alignment="bottom")
        with second[0]:
            score = choices.outcome(run)
        low = _number(second[1].number_input, "Outcome from", "min")
        high = _number(second[2].number_input, "Outcome to", "max")
        round_ = _number(second[3].number_input, "Round", "round", step=1)
        version = _number(second[4].number_input, "Policy version", "version", step=1)
        group = _group(second[5].text_input)
        unscored = second[6].toggle("Unscored only", key="unscored", **ui.FILTER)
    return EpisodeFilter(
        run=run,
        task=task,
        status=tuple(status),
        group=group,
        score=score,
        low=low,
        high=high,
        unscored=unscored,
        text=(text or "").strip() or None,
        collection_round=None if round_ is None else int(round_),
        policy_version=None if version is None else int(version),
        update=_update(),
    )


def _number(widget: Callable[..., float | None], label: str, key: str, step: float = 0.1) -> float | None:
    return widget(label, value=None, step=step, key=key, placeholder="any", **ui.FILTER)


def _group(widget: Callable[..., str | None]) -> int | None:
    text = (widget("Group", key="group", placeholder="id", **ui.FILTER) or "").strip()
    if text and not ids.is_text(text):
        ui.missing(f"{chip(text)} is not an id: ids have 13 characters of base32.")
    return ids.from_text(text) if ids.is_text(text) else None


def _update() -> tuple[int, int] | None:
    """The optimizer step whose batch is shown, if the address names one; it can be taken off the filter."""
    try:
        update = choices.update_from_address()
    except ValueError:
        ui.missing(f"{chip(given('job'))} is not the id of a job.")
        return None
    if update is None:
        return None
    with st.container(horizontal=True, vertical_alignment="center"):
        job = ids.to_text(update[0])
        ui.link(Page.TRAINING, f"Batch of update {update[1]}", "model_training", job=job, update=update[1])
        if st.button("Show all episodes", icon=":material/close:", type="tertiary"):
            for name in ("job", "update"):
                st.query_params.pop(name, None)
            st.rerun()
    return update


show()
