"""Filters of a list of episodes, or of groups with such episodes, and the choice of a run, task, outcome or credit.

On the page of a list every field of the filter has query parameters (`viewer.queries.episodes.FIELDS`). The page of an
episode carries all of them in one parameter, `list`, so that previous and next follow the reader's list. The line above
a list has the search, and further fields behind *Filters*. Each set field has a chip below the line; a click on it
removes the condition.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, urlencode

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from lake import ids
from lake.documents import parse_json_object
from lake.errors import SearchIndexError, TrajlakeError, UsageError
from lake.judgements import outcomes
from lake.judgements.credit import Covering, Credit, describe_outdated
from lake.judgements.scores import ENV_RETURN
from lake.tables import STATUSES
from viewer import changed_data
from viewer.components import FILTER, draw_link, turn_to_first_page, warn_of_missing
from viewer.navigation import (
    Page,
    anchor,
    change_address,
    chip_link,
    get_int,
    get_parameter,
    go,
    href,
    parse_finite,
    parse_whole_number,
)
from viewer.plain import chip, number, one_line, percent, visible
from viewer.queries import Sort, episodes, runs, sql, training
from viewer.queries.episodes import FACETS, FIELDS, ORDERS, EpisodeFilter, FieldKind
from viewer.session import get_session, read
from viewer.transcript.outline import FLAGS

LIST = "list"
"""Query parameter that carries a filter."""
Parameters = dict[str, str | list[str]]


def build_parameters(episode_filter: EpisodeFilter, order: Sort | None = None) -> Parameters:
    """Return the query parameters of the list's page, without those of fields that leave no episode out."""
    texts: Parameters = {}
    lists: Parameters = {}
    for row in FIELDS:
        value = getattr(episode_filter, row.name)
        values = value if value is not None and len(row.parameters) > 1 else (value,)
        for parameter, part in zip(row.parameters, values, strict=False):
            if part is None or part is False or part == () or (row.name == "about" and episode_filter.sql is None):
                continue
            if parameter.kind is FieldKind.STATUSES:
                lists[parameter.name] = list(part)
            elif parameter.kind is FieldKind.ID:
                texts[parameter.name] = ids.to_text(part)
            else:
                texts[parameter.name] = "true" if part is True else str(part)
    return texts | ({} if order is None else {"sort": str(order)}) | lists


def pack_filter(episode_filter: EpisodeFilter, order: Sort | None = None) -> str | None:
    """Return the value of `list`; None for a filter that leaves no episode out."""
    return urlencode(build_parameters(episode_filter, order), doseq=True) or None


def read_carried_filter() -> tuple[EpisodeFilter, Sort | None]:
    """Return the filter that the present address carries in `list`."""
    return unpack_filter(get_parameter(LIST))


def unpack_filter(text: str | None) -> tuple[EpisodeFilter, Sort | None]:
    """Return the filter of a value of `list`, without its invalid parameters."""
    texts = parse_qs(text or "")
    order = Sort.parse(texts.get("sort", [""])[-1])
    return read_filter(texts), order if order is not None and order.column in ORDERS else None


def read_filter(texts: Mapping[str, Sequence[str]]) -> EpisodeFilter:
    """Return the filter of query parameters; a field with an invalid or missing required value is left out."""
    arguments: dict[str, Any] = {}
    for row in FIELDS:
        values = tuple(_parse(parameter.kind, texts.get(parameter.name, ())) for parameter in row.parameters)
        required = [part for part, parameter in zip(values, row.parameters, strict=True) if not parameter.optional_sql]
        if None not in required:
            arguments[row.name] = values if len(values) > 1 else values[0]
    return EpisodeFilter(**arguments)


def _parse(kind: FieldKind, texts: Sequence[str]) -> Any:
    """Return the value of a parameter; None if it is missing or invalid."""
    if kind is FieldKind.STATUSES:
        return tuple(status for status in texts if status in STATUSES)
    text = texts[-1] if texts else None
    if not text:
        return None
    if kind is FieldKind.ID:
        return ids.from_text(text) if ids.is_text(text) else None
    if kind is FieldKind.FLAG:
        return text == "true"
    parsers: dict[FieldKind, Callable[[str], Any]] = {
        FieldKind.COUNT: parse_whole_number,
        FieldKind.NUMBER: parse_finite,
    }
    return parsers.get(kind, str)(text)


MAX_RUNS = 1000
"""Maximum number of runs in a choice; with more, the reader can type a name."""


def choose_run(container: DeltaGenerator, label: str = "Run", key: str = "run") -> str | None:
    """Draw the choice of a run, which the address has under the key; return None for all runs.

    A message about the address is outside the container, which may be closed.
    """
    names = read(runs.list_names, MAX_RUNS)
    name, is_cut = get_parameter(key), len(names) >= MAX_RUNS
    if name is not None and name not in names and not is_cut:
        warn_of_missing(f"This lake has no run {chip(name)}; showing all runs.")
    labels = dict(read(runs.read_labels).drop_nulls("name").select("run_id", "name").iter_rows())
    options: dict[str, Any] = {"placeholder": "all runs", "accept_new_options": is_cut, **FILTER}
    options["format_func"] = lambda name: labels.get(name, name)
    run = container.selectbox(label, names, index=None, key=key, **options)
    return None if run is None else str(run)


def choose_outcome(container: DeltaGenerator, run: str | None) -> str | None:
    """Draw the choice of the score that episodes of a run, or of all runs, are compared by; None: the usual one.

    A message about the address is outside the container.
    """
    names = read(outcomes.list_choices)
    of_credit = read(outcomes.find_score_of_credit)
    scorer = get_parameter("score")
    if scorer is not None and scorer not in (*names, of_credit):
        warn_of_missing(f"No scorer {chip(scorer)} scored an episode of this lake; showing the usual outcome.")
        scorer = None
    if scorer is not None and scorer not in names:
        scorer = None  # the choice of the current credit stands for the version that the credit names
    scorers = {} if of_credit is not None else read(outcomes.find_scorers_of_runs)
    usual = "each run's own" if run is None and scorers else f"{scorers.get(run or '', ENV_RETURN)} (usual)"
    if of_credit is not None:
        usual = f"{of_credit} (of the current credit)"
    # The choice is part of the key, so that the address alone decides: several pages and links write it.
    key = f"score-{scorer}"
    options = [None, *names]
    container.selectbox(
        "Outcome",
        options,
        index=options.index(scorer),
        key=key,
        format_func=lambda name: one_line(usual if name is None else name),
        on_change=lambda: go(score=st.session_state[key], page=None),
        help="The score behind outcomes, success and dead groups: `env_return`, which the environment recorded, or "
        "that of a scorer. The usual one is the score of the current credit. Without credit each run has its own: "
        "env_return if an episode of it has one, else the first scorer that had values for most of its episodes.",
    )
    return scorer


def select_credit(covering: list[Covering], named: Credit | None) -> Credit | None:
    """Return the credit of an address if it covers the subject, else the current one; None if neither does."""
    if named is not None and named.series_id in {series.credit.series_id for series in covering}:
        return named
    return next((series.credit for series in covering if series.is_current), None)


def choose_credit(covering: list[Covering], subject: str) -> Credit | None:
    """Draw the choice of a credit that covers the subject: that of the address, else the current one, is selected."""
    key = f"credit-{subject}"
    if not covering:
        if credit_name := get_parameter("credit"):
            st.warning(f"Credit {chip(credit_name)} does not cover this.", icon=":material/info:")
        return None
    options, labels = {}, {}
    for series in covering:
        # The filter of the newest job says nothing of this subject, which another job may have computed.
        settings = {name: setting for name, setting in series.credit.parameters.items() if name != "only"}
        name, parameters = series.credit.text, describe_parameters(json.dumps(settings))
        options[name] = series.credit
        labels[name] = f"{'current: ' if series.is_current else ''}{parameters}  {series.ended_at:%d %b %H:%M}  {name}"
    credit_name = get_parameter("credit")
    named = None if credit_name is None else read(training.look_up_credit, credit_name)
    selected = select_credit(covering, named)
    current = None if selected is None else selected.text
    if named is not None and selected is named:
        options, labels = {named.text: named} | options, {named.text: named.title} | labels
    elif credit_name is not None:
        st.warning(f"Credit {chip(credit_name)} does not cover this.", icon=":material/info:")
    if current is None and credit_name is None and (usual := read(training.look_up_credit)) is not None:
        st.warning(f"The current credit, {chip(usual.title)}, does not cover this.", icon=":material/info:")
    credit_text = st.selectbox(
        "Credit",
        list(options),
        index=None if current is None else list(options).index(current),
        key=key,
        format_func=labels.__getitem__,
        on_change=lambda: go(credit=st.session_state[key]),
        placeholder="choose whose advantages to show",
        help="Series with advantages of this, the one that ran last first. Training takes the current one by default.",
    )
    return None if credit_text is None else options[credit_text]


def read_credit_input(key: str) -> Credit | None:
    """Draw a field for a credit; return None for the current one."""
    meaning = "An estimator's name, or the id of a series or of a credit job."
    text = st.text_input("Credit", key=key, placeholder="current", help=meaning, width=160, **FILTER)
    credit = read(training.look_up_credit, text) if text else None
    if text and credit is None:
        warn_of_missing(f"{chip(text)} names no credit: write an estimator's name, or the id of a series or job.")
    return credit


def explain_credit(credit: Credit | None, **subject: int) -> None:
    """Say whose advantages the page shows, and what of an episode or group (`outdated`) changed since."""
    if credit is not None:
        jobs = read(training.find_covering_jobs, credit, **subject) if subject else pl.DataFrame()
        sentences = [f"Advantages by {chip(credit.title, 300)}."]
        for job, at, only in jobs.iter_rows():
            job_link = f"[{chip(ids.to_text(job))}]({href(Page.JOB, job=ids.to_text(job))})"
            of_episodes = f", of episodes where {chip(only, 200)}" if only else ""
            sentences.append(f"Job {job_link} computed them at {at:%Y-%m-%d %H:%M} UTC{of_episodes}.")
        st.caption(" ".join(sentences))
        if (changed := read(describe_outdated, credit, **subject)) is not None:
            changed_data.draw_stale_warning(changed)
            if not subject:
                changed_data.list_changed_groups(credit)


def describe_parameters(parameters: str | None, limit: int = 150) -> str:
    """Return parameters of a job in one line: estimator, inputs, numbers, then texts."""
    settings = parse_json_object(parameters)
    config = settings.pop("config", {})
    config = config if isinstance(config, dict) else {}
    name = str(settings.pop("estimator", ""))
    # Numbers first: people change them, while texts mostly keep their defaults.
    options = sorted((settings | config).items(), key=lambda option: (option[0] in config, isinstance(option[1], str)))
    plain = [
        f"{option} {number(setting) if isinstance(setting, int | float) else setting}"
        for option, setting in options
        if isinstance(setting, str | int | float) and not isinstance(setting, bool)
    ]
    return one_line(", ".join(([name] if name else []) + plain), limit)


@dataclass(frozen=True, slots=True)
class FilterLine:
    """The line above a list."""

    episode_filter: EpisodeFilter
    popover: DeltaGenerator
    """The popover *Filters*, to which a page adds fields."""
    aside: DeltaGenerator
    """The end of the line."""


def draw_filter_line() -> FilterLine:
    """Draw the line above a list and return it; its filter is that of the address."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input(
            "Text",
            key="text",
            placeholder='words, or "an exact phrase"',
            icon=":material/search:",
            help="Searches actions, tool calls, reasoning, states, messages, reasons of scorers and annotations, "
            'without regard to case. One step must hold all words or parts of words, in any order; "quotes" search '
            "for an exact phrase.",
            width="stretch",
            **FILTER,
        )
        # A choice is one click: the popover is a new one, and closed, once it is made. Typed values leave it open.
        choices = hash(tuple(map(get_parameter, ("run", "score", "unscored"))))
        popover = st.popover("Filters", icon=":material/filter_list:", width="content", key=f"filters-{choices}")
        st.toggle(
            "Facets", key="facets", help="Tools, failed calls, errors, scorers, flags and tags, with counts.", **FILTER
        )
        aside = st.container(horizontal=True, width="content")
    episode_filter = _draw_fields(popover)
    job, update = get_parameter("job"), get_int("update")
    if job is not None and not ids.is_text(job):
        warn_of_missing(f"{chip(job)} is not the id of a job.")
    elif episode_filter.update is not None:
        draw_link(Page.TRAINING, f"Batch of update {update}", "model_training", job=job, update=update)
    elif update is not None:
        warn_of_missing(f"`update={update}` of the address was left out: the list takes `job` and `update` together.")
    return FilterLine(replace(episode_filter, text=(text or "").strip() or None), popover, aside)


def _draw_fields(popover: DeltaGenerator) -> EpisodeFilter:
    """Draw the fields behind *Filters* and return the filter. Fields without a widget come from the address."""
    run = choose_run(popover)
    meaning = "The task's name as the source gives it. `*` stands for anything: `web*`."
    task = popover.text_input("Task", key="task", placeholder="exact, or with *", help=meaning, **FILTER)
    task = (task or "").strip() or None
    status = popover.multiselect("Status", STATUSES, key="status", placeholder="any", **FILTER)
    score = choose_outcome(popover, run)
    columns = popover.columns(2)
    numbers: dict[str, Any] = {}
    for position, row in enumerate(row for row in FIELDS if row.has_input):
        (parameter,) = row.parameters
        is_count = parameter.kind is FieldKind.COUNT
        number = columns[position % 2].number_input(
            (parameter.label or parameter.name).capitalize(),
            0 if is_count else None,
            value=None,
            step=1 if is_count else 0.1,
            key=parameter.name,
            placeholder="any",
            **FILTER,
        )
        numbers[row.name] = int(number) if is_count and number is not None else number
    left_column, right_column = popover.columns(2, vertical_alignment="bottom")
    group = _choose_group(left_column)
    unscored = right_column.toggle("Unscored only", key="unscored", **FILTER)
    return replace(
        read_filter({name: st.query_params.get_all(name) for name in st.query_params}),
        run=run,
        task=task,
        status=tuple(status),
        group=group,
        score=score,
        unscored=unscored,
        **numbers,
    )


def _choose_group(column: DeltaGenerator) -> int | None:
    # The widget is not bound to the address: Streamlit would then take the parameter away from the page of a group.
    address_group = get_parameter("group")
    key = f"group-{address_group}"

    def remember() -> None:
        turn_to_first_page()
        st.query_params.pop("group", None)
        if text := st.session_state[key].strip():
            st.query_params["group"] = text

    text = column.text_input("Group", address_group or "", key=key, placeholder="id", on_change=remember).strip()
    if text and not ids.is_text(text):
        warn_of_missing(f"{chip(text)} is not an id: ids have 13 characters of base32.")
    return ids.from_text(text) if ids.is_text(text) else None


_PARAMETERS = {parameter.name: (row, parameter) for row in FIELDS for parameter in row.parameters}
# Labels of a filter's values.
_WORDS = {
    "error": {"rollout": "failed rollout", "state": "error text as state", "action": "malformed action"},
    "flag": {flag: words for flag, (words, _, _) in FLAGS.items()},
}


def draw_filter_chips(parameters: Parameters) -> None:
    """Draw a link for each filter of a list that removes it; `parameters` are those of the list's address."""
    links = []
    for name, values in parameters.items():
        row, parameter = _PARAMETERS.get(name, (None, None))
        if (parameter is not None and parameter.label is None) or (name == "sql" and "about" in parameters):
            continue  # the chip of the update, or of the query's subject, removes it too
        # Removing a required parameter removes the others of its field, and a subject its query.
        with_it = [] if row is None or (parameter and parameter.optional_sql) else [p.name for p in row.parameters]
        with_it += ["sql"] if name == "about" else []
        label = _get_label(name)
        for value in values if isinstance(values, list) else [values]:
            rest = [text for text in values if text != value] if isinstance(values, list) else None
            target = change_address(**dict.fromkeys([*with_it, "page"]) | {name: rest or None})
            links.append(chip_link(f"{label}: {_get_value_label(name, value)} \N{MULTIPLICATION SIGN}", target))
    if len(links) > 1:
        links.append(chip_link("clear all", change_address(**dict.fromkeys((*parameters, "page")))))
    if links:
        st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')


def _get_label(name: str) -> str:
    parameter = _PARAMETERS[name][1] if name in _PARAMETERS else None
    return name if parameter is None or parameter.label is None else parameter.label


def _get_value_label(name: str, value: str) -> str:
    return _WORDS.get(name, {}).get(value, value)


def run_searches(episode_filter: EpisodeFilter) -> None:
    """Run the search and the query of a filter; an error in them ends the page."""
    if episode_filter.text is not None:
        # The search ends when the reader leaves the page or changes the text.
        progress = st.empty()

        def report(done: int, of: int) -> None:
            share = done / of if of else 0.0
            progress.progress(
                share, f"Reading the texts that are new to the search: {percent(share)}" if of else "Searching"
            )

        try:
            get_session().reader.holding(episode_filter.text, report)
        except (UsageError, SearchIndexError) as error:
            warn_of_missing(chip(error, 400))
            st.stop()
        finally:
            progress.empty()
    if episode_filter.sql is not None:
        try:
            read(sql.list_named_episodes, episode_filter.sql)
        except TrajlakeError as error:
            warn_of_missing("The query of this list has no result.")
            st.code(visible(str(error)), language=None, wrap_lines=True)
            st.stop()


def draw_facets(episode_filter: EpisodeFilter, count_values: Callable[[str, int], episodes.FacetValues]) -> None:
    """Draw the values of each facet with counts, if the address asks for them; a click sets or removes a value.

    Args:
        episode_filter: the filter of the list.
        count_values: a function from a facet and a limit to its counted values.
    """
    if not get_parameter("facets"):
        return
    for facet in FACETS:
        is_expanded = get_parameter("values") == facet
        counts = count_values(facet, episodes.ALL_VALUES if is_expanded else episodes.FIRST_VALUES)
        if not counts.total:
            continue
        links = []
        for value, count in counts.frame.iter_rows():
            is_chosen = getattr(episode_filter, facet) == value
            value_label = _get_value_label(facet, value)
            target = change_address(**{facet: None if is_chosen else value, "page": None})
            links.append(chip_link(f"{value_label} {count:,}", target, is_chosen=is_chosen))
        if is_expanded and counts.total > len(links):
            links.append(f"and {counts.total - len(links):,} more")
        elif counts.total > len(links):
            links.append(anchor(f"and {counts.total - len(links):,} more", change_address(values=facet)))
        elif is_expanded and len(links) > episodes.FIRST_VALUES:
            links.append(anchor("fewer", change_address(values=None)))
        st.html(f'<div class="trajlake-chips"><span>{_get_label(facet)}</span>{"".join(links)}</div>')
