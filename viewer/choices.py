"""Choices that several pages offer (a run, a task, an outcome, whose advantages), and the list's filter in an address.

On the list's own page every part of the filter is a query parameter. The episode page carries the whole of it in one,
`list`, so that previous and next follow the list that the reader came from.
"""

import json
from typing import Any
from urllib.parse import parse_qs, urlencode

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.documents import json_object
from lake.judgements.credit import Covering, Credit, outdated
from lake.judgements.scores import ENV_RETURN
from lake.tables import STATUSES
from viewer import stale
from viewer.components import FILTER, missing
from viewer.links import finite, given, given_id, given_int, whole
from viewer.navigation import go
from viewer.pinned import read
from viewer.plain import chip, number, one_line
from viewer.queries import Sort, outcomes, runs, training
from viewer.queries.episodes import FACETS, ORDERS, RANGES, EpisodeFilter

LIST = "list"
"""The query parameter that carries a filter."""
ENDS = tuple(f"{name}_{end}" for name in RANGES for end in ("from", "to"))
"""Parameters of ranges, which are named as in the filter."""
Parameters = dict[str, str | list[str]]


def parameters(wanted: EpisodeFilter, order: Sort | None = None) -> Parameters:
    """Query parameters of the list's page; what filters nothing is left out."""
    job, update = wanted.update or (None, None)
    label, author = wanted.unlabelled or (None, None)
    values = {
        "run": wanted.run,
        "task": wanted.task,
        "group": None if wanted.group is None else ids.to_text(wanted.group),
        "score": wanted.score,
        "min": wanted.low,
        "max": wanted.high,
        "unscored": "true" if wanted.unscored else None,
        "text": wanted.text,
        "round": wanted.collection_round,
        "version": wanted.policy_version,
        **{facet: getattr(wanted, facet) for facet in FACETS},
        **{end: getattr(wanted, end) for end in ENDS},
        "job": None if job is None else ids.to_text(job),
        "update": update,
        "unlabelled": label,
        "by": author,
        "sql": wanted.sql,
        "about": None if wanted.sql is None else wanted.about,
        "sort": order,
    }
    found: Parameters = {name: str(value) for name, value in values.items() if value is not None}
    return found | ({"status": list(wanted.status)} if wanted.status else {})


def packed(wanted: EpisodeFilter, order: Sort | None = None) -> str | None:
    """The value of `list`; None of a filter that filters nothing."""
    return urlencode(parameters(wanted, order), doseq=True) or None


def carried() -> tuple[EpisodeFilter, Sort | None]:
    """The filter that the present address carries in `list`."""
    return unpacked(given(LIST))


def unpacked(text: str | None) -> tuple[EpisodeFilter, Sort | None]:
    """The filter of a value of `list`; what makes no sense in it is left out."""
    values = parse_qs(text or "")
    one = {name: found[-1] for name, found in values.items()}
    order = Sort.named(one.get("sort"))
    if order is not None and order.column not in ORDERS:
        order = None
    job, update = _id(one.get("job")), whole(one.get("update"))
    named: dict[str, Any] = {facet: one.get(facet) for facet in FACETS} | {end: whole(one.get(end)) for end in ENDS}
    wanted = EpisodeFilter(
        run=one.get("run"),
        task=one.get("task"),
        status=tuple(status for status in values.get("status", ()) if status in STATUSES),
        group=_id(one.get("group")),
        score=one.get("score"),
        low=finite(one.get("min")),
        high=finite(one.get("max")),
        unscored=one.get("unscored") == "true",
        text=one.get("text"),
        collection_round=whole(one.get("round")),
        policy_version=whole(one.get("version")),
        update=None if job is None or update is None else (job, update),
        unlabelled=unlabelled(one.get("unlabelled"), one.get("by")),
        sql=one.get("sql"),
        about=one.get("about"),
        **named,
    )
    return wanted, order


def unlabelled(label: str | None, author: str | None) -> tuple[str, str | None] | None:
    """The part of a filter that two parameters of an address make: an author alone says nothing."""
    return None if label is None else (label, author)


def update_from_address() -> tuple[int, int] | None:
    """Training job and optimizer step of the list's address, if both are there. Raises ValueError: no job's id."""
    job, update = given_id("job"), given_int("update")
    return None if job is None or update is None else (job, update)


def _id(text: str | None) -> int | None:
    return ids.from_text(text) if text is not None and ids.is_text(text) else None


MOST_RUNS = 1000
"""Runs that a choice lists; of more, a name can be typed."""


def run() -> str | None:
    """The run to show; None for all."""
    return one_run("Run", "run")


def one_run(label: str, key: str) -> str | None:
    """A run, which stands in the address under the key; None for all."""
    names = read(runs.names, MOST_RUNS)
    asked, is_cut = given(key), len(names) >= MOST_RUNS
    if asked is not None and asked not in names and not is_cut:
        missing(f"There is no run {chip(asked)} in this lake; showing all runs.")
    chosen = st.selectbox(
        label, names, index=None, key=key, placeholder="all runs", accept_new_options=is_cut, **FILTER
    )
    return None if chosen is None else str(chosen)


def task() -> str | None:
    """The task to show; None for all."""
    meaning = "The task's name as the source gives it. `*` stands for anything: `web*`."
    text = st.text_input("Task", key="task", placeholder="exact, or with *", help=meaning, **FILTER)
    return (text or "").strip() or None


def outcome(run: str | None) -> str | None:
    """By which score episodes are compared: `env_return` or a scorer; None for the usual one. `run`: the one shown."""
    names = read(outcomes.names)
    of_credit = read(outcomes.of_credit)
    asked = given("score")
    if asked is not None and asked not in (*names, of_credit):
        missing(f"No scorer {chip(asked)} scored an episode of this lake; showing the usual outcome.")
        asked = None
    if asked is not None and asked not in names:
        asked = None  # a version that the credit names is no choice of its own
    own = {} if of_credit is not None else read(outcomes.own)
    usual = "each run's own" if run is None and own else f"{own.get(run or '', ENV_RETURN)} (usual)"
    if of_credit is not None:
        usual = f"{of_credit} (of the current credit)"
    # Several pages and links choose it: the choice shown is part of the key, so that the address alone decides.
    key = f"score-{asked}"

    def remember() -> None:
        go(score=st.session_state[key], page=None)

    options = [None, *names]
    st.selectbox(
        "Outcome",
        options,
        index=options.index(asked),
        key=key,
        format_func=lambda name: one_line(usual if name is None else name),
        on_change=remember,
        help="What outcomes, success and dead groups are of: `env_return`, which the environment recorded, or what a "
        "scorer says. The usual one is the score of the current credit. Without credit it is each run's own: "
        "env_return if an episode of it has one, else the first scorer that had values for most of its episodes.",
    )
    return asked


def credit(found: list[Covering], subject: str) -> Credit | None:
    """Whose advantages to show: those that the address names, else the current ones. `subject` is part of the key."""
    key = f"credit-{subject}"
    if not found:
        st.selectbox("Credit", ["No credit job has covered this yet: trajlake credit gigpo"], disabled=True, key=key)
        return None
    options = {one.credit.text: one.credit for one in found}
    labels = {
        one.credit.text: f"{'current: ' if one.is_current else ''}{describe(json.dumps(one.credit.parameters))}  "
        f"{one.ended_at:%d %b %H:%M}  {one.credit.text}"
        for one in found
    }
    current = next((one.credit.text for one in found if one.is_current), None)
    asked = given("credit")
    named = None if asked is None else read(training.credit_named, asked)
    if named is not None and named.series_id in {one.credit.series_id for one in found}:
        options, labels = {named.text: named} | options, {named.text: named.title} | labels
        current = named.text
    elif asked is not None:
        st.warning(f"Credit {chip(asked)} does not cover this.", icon=":material/info:")
    if current is None and asked is None and (usual := read(training.credit_named)) is not None:
        st.warning(f"The current credit, {chip(usual.title)}, does not cover this.", icon=":material/info:")

    def remember() -> None:
        go(credit=st.session_state[key])

    chosen = st.selectbox(
        "Credit",
        list(options),
        index=None if current is None else list(options).index(current),
        key=key,
        format_func=labels.__getitem__,
        on_change=remember,
        placeholder="choose whose advantages to show",
        help="Series with advantages of this, the one that ran last first. Training takes the current one by default.",
    )
    return None if chosen is None else options[chosen]


def named_credit(key: str) -> Credit | None:
    """The credit that the reader names; None for the current one."""
    meaning = "An estimator's name, or the id of a series or of a credit job."
    text = st.text_input("Credit", key=key, placeholder="current", help=meaning, width=160, **FILTER)
    found = read(training.credit_named, text) if text else None
    if text and found is None:
        missing(f"{chip(text)} names no credit: write an estimator's name, or the id of a series or job.")
    return found


def explain(chosen: Credit | None, **of: int) -> None:
    """Say whose advantages are shown, and what of an episode or group (`outdated`) changed since."""
    if chosen is not None:
        st.caption(f"Advantages by {chip(chosen.title, 300)}.")
        if (changed := read(outdated, chosen, **of)) is not None:
            stale.warning(changed)
            if not of:
                stale.groups(chosen)


def describe(parameters: str | None, limit: int = 150) -> str:
    """Parameters of a job in one line: the estimator, what it read, its numbers, its words."""
    values = json_object(parameters)
    config = values.pop("config", {})
    config = config if isinstance(config, dict) else {}
    name = str(values.pop("estimator", ""))
    # Numbers are what people turn, words are mostly as they come.
    options = sorted((values | config).items(), key=lambda option: (option[0] in config, isinstance(option[1], str)))
    plain = [
        f"{k} {number(v) if isinstance(v, int | float) else v}"
        for k, v in options
        if isinstance(v, str | int | float) and not isinstance(v, bool)
    ]
    return one_line(", ".join(([name] if name else []) + plain), limit)
