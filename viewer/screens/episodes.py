"""Episodes: the filtered, server-paged list. Every filter is in the address."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from lake import ids
from lake.errors import SearchIndexError, TrajlakeError, UsageError
from lake.tables import STATUSES
from viewer import choices, labelling, tables, taking
from viewer import components as ui
from viewer.links import Page, given, given_int
from viewer.navigation import anchor, changed, chip_link, href
from viewer.pinned import read
from viewer.pinned import search as search_for
from viewer.plain import chip, number, one_line, percent, visible
from viewer.queries import episodes, facets, runs, search, sql
from viewer.queries.episodes import FACETS, ORDERS, EpisodeFilter
from viewer.transcript.ledger import FLAGS

SCORERS = 6
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
    (wanted, aside), order = _filter(), tables.ordered_by()
    if wanted.text is not None:
        _search(wanted.text)
    if wanted.sql is not None:
        _ask(wanted.sql)
    if given("facets"):
        _facets(wanted)
    totals = read(episodes.totals, wanted)
    if not totals["episodes"]:
        st.info("No episode matches these filters.", icon=":material/filter_alt_off:")
        return
    with aside:
        taking.offered(wanted, order, totals["episodes"])
        labelling.offered(wanted, order)
    groups = f"{number(totals['groups'])} group{'' if totals['groups'] == 1 else 's'}"
    window = ui.pager(
        totals["episodes"],
        f"episodes in {groups}, mean outcome {number(totals['mean_return'])} "
        f"({number(totals['scored'])} scored), mean steps {number(totals['mean_steps'], 1)}",
    )
    frame = read(episodes.page, wanted, order, window)
    frame, scored = _with_scores(frame, wanted)
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


def _with_scores(frame: pl.DataFrame, wanted: EpisodeFilter) -> tuple[pl.DataFrame, dict[str, tables.Column]]:
    """The page with a column for each scorer but the one that the outcome is of."""
    scores = read(episodes.scores_of, tuple(frame["episode_id"]))
    names = [name for name in scores["scorer"].unique().sort() if name != wanted.score]
    if len(names) > SCORERS:
        st.caption(f"Columns of {SCORERS} of {number(len(names))} scorers; an episode's page has all of its scores.")
    columns = {}
    for number_, name in enumerate(names[:SCORERS]):
        column = f"score-{number_}"
        values = scores.filter(pl.col("scorer") == name).select("episode_id", pl.col("value").alias(column))
        frame = frame.join(values, on="episode_id", how="left", maintain_order="left")
        columns[column] = tables.value(one_line(name, 24), f"What the scorer {name} says.")
    return frame, columns


def _search(text: str) -> None:
    """Look a text up while its progress is shown; a reader who goes elsewhere or changes it ends that."""
    shown = st.empty()

    def report(done: int, of: int) -> None:
        share = done / of if of else 0.0
        shown.progress(share, f"Reading the texts that are new to the search: {percent(share)}" if of else "Searching")

    try:
        search_for(text, report)
    except (UsageError, SearchIndexError) as error:
        ui.missing(chip(error, 400))
        st.stop()
    finally:
        shown.empty()


def _ask(query: str) -> None:
    """Run the query that names the episodes; what is wrong with it ends the page."""
    try:
        read(sql.named, query)
    except TrajlakeError as error:
        ui.missing("The query of this list has no result.")
        st.code(visible(str(error)), language=None, wrap_lines=True)
        st.stop()


def _found(hits: re.Pattern[str]) -> dict[str, tables.Column]:
    """Columns that say where a text was found."""
    return {
        "found_step": tables.value("Step", "The first step that holds it; a dash: messages of the episode."),
        "found_steps": tables.value("Hits", "Steps that hold it, and messages of the episode."),
        "found_in": tables.text("In"),
        "excerpt": tables.wide("Excerpt", hits=hits),
    }


def _filter() -> tuple[EpisodeFilter, DeltaGenerator]:
    """The search line and the other filters, all bound to the address; what is set stands below as chips.

    Returns:
        The filter, and room beside it.
    """
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input(
            "Text",
            key="text",
            placeholder='words, or "a text as it stands"',
            icon=":material/search:",
            help="In actions, tool calls, reasoning, states, messages, reasons of scorers and annotations, whatever "
            'the case: words and parts of words that one step holds, in any order; "in quotes" as it stands.',
            width="stretch",
            **ui.FILTER,
        )
        with st.popover("Filters", icon=":material/filter_list:", width="content"):
            wanted = _others()
        st.toggle(
            "Facets",
            key="facets",
            help="Tools, failed calls, errors, scorers, flags and tags, with counts.",
            **ui.FILTER,
        )
        aside = st.container(horizontal=True, width="content")
    wanted = replace(wanted, text=(text or "").strip() or None, update=_update())
    _chips(wanted)
    return wanted, aside


def _others() -> EpisodeFilter:
    """What is set less often."""
    run, task = choices.run(), choices.task()
    status = st.multiselect("Status", STATUSES, key="status", placeholder="any", **ui.FILTER)
    score = choices.outcome(run)
    left, right = st.columns(2, vertical_alignment="bottom")
    low = _number(left.number_input, "Outcome from", "min")
    high = _number(right.number_input, "Outcome to", "max")
    round_ = _number(left.number_input, "Round", "round", step=1, min_value=0)
    version = _number(right.number_input, "Policy version", "version", step=1, min_value=0)
    _number(left.number_input, "Steps from", "steps_from", step=1, min_value=0)
    _number(right.number_input, "Steps to", "steps_to", step=1, min_value=0)
    ends: dict[str, Any] = {end: given_int(end) for end in choices.ENDS}
    group = _group(left.text_input)
    unscored = right.toggle("Unscored only", key="unscored", **ui.FILTER)
    return EpisodeFilter(
        run=run,
        task=task,
        status=tuple(status),
        group=group,
        score=score,
        low=low,
        high=high,
        unscored=unscored,
        collection_round=None if round_ is None else int(round_),
        policy_version=None if version is None else int(version),
        tool=given("tool"),
        failed=given("failed"),
        error=given("error"),
        scorer=given("scorer"),
        flag=given("flag"),
        tag=given("tag"),
        unlabelled=choices.unlabelled(given("unlabelled"), given("by")),
        sql=given("sql"),
        about=given("about"),
        **ends,
    )


_CALLED = {end: end.replace("_", " ") for end in choices.ENDS} | {
    "min": "outcome from",
    "max": "outcome to",
    "score": "outcome",
    "version": "policy version",
    "failed": "failed call",
    "unlabelled": "without label",
    "by": "label by",
    "about": "query",
}
# What values of a filter are called. (A string here would be printed, as a stray expression.)
_WORDS = {
    "error": {"rollout": "failed rollout", "state": "error text as state", "action": "malformed action"},
    "flag": {flag: words for flag, (words, _, _) in FLAGS.items()},
}


def _chips(wanted: EpisodeFilter) -> None:
    """A link for each filter that takes it off."""
    links = []
    for name, values in choices.parameters(wanted).items():
        if name == "job" or (name == "sql" and wanted.about is not None):  # goes with the update, or what it is about
            continue
        for value in values if isinstance(values, list) else [values]:
            left = [one for one in values if one != value] if isinstance(values, list) else None
            goes_with = {"update": {"job": None}, "unlabelled": {"by": None}, "about": {"sql": None}}.get(name, {})
            off = {name: left or None, "page": None} | goes_with
            called = _WORDS.get(name, {}).get(value, value)
            links.append(chip_link(f"{_CALLED.get(name, name)}: {called} \N{MULTIPLICATION SIGN}", changed(**off)))
    if len(links) > 1:
        every = dict.fromkeys((*choices.parameters(wanted), "page"))
        links.append(chip_link("clear all", changed(**every)))
    if links:
        st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')


def _facets(wanted: EpisodeFilter) -> None:
    """Values of each facet with their counts; a click narrows the list to one, another one takes it off."""
    for facet in FACETS:
        is_whole = given("values") == facet
        found = read(facets.values, facet, wanted, facets.ALL if is_whole else facets.MOST)
        if not found.total:
            continue
        links = []
        for value, episodes_ in found.frame.iter_rows():
            is_chosen = getattr(wanted, facet) == value
            called = _WORDS.get(facet, {}).get(value, value)
            target = changed(**{facet: None if is_chosen else value, "page": None})
            links.append(chip_link(f"{called} {episodes_:,}", target, chosen=is_chosen))
        if is_whole and found.total > len(links):
            links.append(f"and {found.total - len(links):,} more")
        elif found.total > len(links):
            links.append(anchor(f"and {found.total - len(links):,} more", changed(values=facet)))
        elif is_whole and len(links) > facets.MOST:
            links.append(anchor("fewer", changed(values=None)))
        st.html(f'<div class="trajlake-chips"><span>{_CALLED.get(facet, facet)}</span>{"".join(links)}</div>')


def _number(
    widget: Callable[..., float | None], label: str, key: str, step: float = 0.1, min_value: int | None = None
) -> float | None:
    return widget(label, min_value, value=None, step=step, key=key, placeholder="any", **ui.FILTER)


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
        if (alone := given_int("update")) is not None:
            ui.missing(f"`update={alone}` of the address was left out: the list takes `job` and `update` together.")
        return None
    job = ids.to_text(update[0])
    ui.link(Page.TRAINING, f"Batch of update {update[1]}", "model_training", job=job, update=update[1])
    return update


show()
