"""The filters of a list of episodes, or of groups that have such episodes: a line, chips and facets.

All of it is in the address. The line has what is searched for, and the rest behind *Filters*; what is set stands below
as chips, each a link that takes it off.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from lake import ids
from lake.errors import SearchIndexError, TrajlakeError, UsageError
from lake.tables import STATUSES
from viewer import choices
from viewer import components as ui
from viewer.links import Page, given, given_int
from viewer.navigation import anchor, changed, chip_link
from viewer.pinned import read
from viewer.pinned import search as search_for
from viewer.plain import chip, percent, visible
from viewer.queries import facets as counted
from viewer.queries import sql
from viewer.queries.episodes import FACETS, EpisodeFilter
from viewer.transcript.ledger import FLAGS


@dataclass(frozen=True, slots=True)
class Line:
    """The line above a list."""

    wanted: EpisodeFilter
    more: DeltaGenerator
    """Room for what else *Filters* holds on a page."""
    aside: DeltaGenerator
    """Room at the end of the line."""


def line() -> Line:
    """Draw the line; its filter is that of the address."""
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
        more = st.popover("Filters", icon=":material/filter_list:", width="content")
        with more:
            wanted = _others()
        st.toggle(
            "Facets",
            key="facets",
            help="Tools, failed calls, errors, scorers, flags and tags, with counts.",
            **ui.FILTER,
        )
        aside = st.container(horizontal=True, width="content")
    wanted = replace(wanted, text=(text or "").strip() or None, update=_update())
    return Line(wanted, more, aside)


def _others() -> EpisodeFilter:
    """What is set less often."""
    run, task = choices.run(), choices.task()
    status = st.multiselect("Status", STATUSES, key="status", placeholder="any", **ui.FILTER)
    score = choices.outcome(run)
    left, right = st.columns(2)
    low = _number(left.number_input, "Outcome from", "min")
    high = _number(right.number_input, "Outcome to", "max")
    round_ = _number(left.number_input, "Round", "round", step=1, min_value=0)
    version = _number(right.number_input, "Policy version", "version", step=1, min_value=0)
    _number(left.number_input, "Steps from", "steps_from", step=1, min_value=0)
    _number(right.number_input, "Steps to", "steps_to", step=1, min_value=0)
    ends: dict[str, Any] = {end: given_int(end) for end in choices.ENDS}
    left, right = st.columns(2, vertical_alignment="bottom")
    group = _group(left)
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


def _number(
    widget: Callable[..., float | None], label: str, key: str, step: float = 0.1, min_value: int | None = None
) -> float | None:
    return widget(label, min_value, value=None, step=step, key=key, placeholder="any", **ui.FILTER)


def _group(place: DeltaGenerator) -> int | None:
    # Not bound to the address: a widget that is takes the parameter away from the page of a group, which has it, too.
    asked = given("group")
    key = f"group-{asked}"

    def remember() -> None:
        ui.first_page()
        st.query_params.pop("group", None)
        if text := st.session_state[key].strip():
            st.query_params["group"] = text

    text = place.text_input("Group", asked or "", key=key, placeholder="id", on_change=remember).strip()
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


def chips(parameters: choices.Parameters) -> None:
    """A link for each filter of a list that takes it off; `parameters` are those of its address."""
    links = []
    for name, values in parameters.items():
        if name == "job" or (name == "sql" and "about" in parameters):  # goes with the update, or what it is about
            continue
        for value in values if isinstance(values, list) else [values]:
            left = [one for one in values if one != value] if isinstance(values, list) else None
            goes_with = {"update": {"job": None}, "unlabelled": {"by": None}, "about": {"sql": None}}.get(name, {})
            off = {name: left or None, "page": None} | goes_with
            called = _WORDS.get(name, {}).get(value, value)
            links.append(chip_link(f"{_CALLED.get(name, name)}: {called} \N{MULTIPLICATION SIGN}", changed(**off)))
    if len(links) > 1:
        every = dict.fromkeys((*parameters, "page"))
        links.append(chip_link("clear all", changed(**every)))
    if links:
        st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')


def look_up(wanted: EpisodeFilter) -> None:
    """Find what no SQL over the lake's tables finds, a text and the rows of a query; what is wrong ends the page."""
    if wanted.text is not None:
        _search(wanted.text)
    if wanted.sql is not None:
        _ask(wanted.sql)


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


def facets(wanted: EpisodeFilter, values: Callable[[str, int], counted.Values]) -> None:
    """Values of each facet with their counts, if the address asks for them; a click narrows to one, or takes it off.

    Args:
        wanted: the filter of the list.
        values: those of a facet, `most` of them (`viewer.queries.facets`).
    """
    if not given("facets"):
        return
    for facet in FACETS:
        is_whole = given("values") == facet
        found = values(facet, counted.ALL if is_whole else counted.MOST)
        if not found.total:
            continue
        links = []
        for value, number in found.frame.iter_rows():
            is_chosen = getattr(wanted, facet) == value
            called = _WORDS.get(facet, {}).get(value, value)
            target = changed(**{facet: None if is_chosen else value, "page": None})
            links.append(chip_link(f"{called} {number:,}", target, chosen=is_chosen))
        if is_whole and found.total > len(links):
            links.append(f"and {found.total - len(links):,} more")
        elif found.total > len(links):
            links.append(anchor(f"and {found.total - len(links):,} more", changed(values=facet)))
        elif is_whole and len(links) > counted.MOST:
            links.append(anchor("fewer", changed(values=None)))
        st.html(f'<div class="trajlake-chips"><span>{_CALLED.get(facet, facet)}</span>{"".join(links)}</div>')
