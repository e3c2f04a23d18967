"""Pages, their addresses and links to them, and the names of episodes, groups and jobs.

Every page is a deep link, with ids as 13 base32 characters. Parameters mean the same on every page: run, task, group,
episode, step, anchor, credit (job or series), job, update, reject, page, and the filters of the lists. Links keep the
browser session (`navigation.js`). Names are foreign text, as they were recorded: on a page they go through
`viewer.plain`.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.runtime.state import get_session_state  # noqa: TID253

from lake import ids
from lake.documents import parse_json_object
from lake.tables import STATUSES
from viewer import session
from viewer.plain import name_rollout, one_line
from viewer.queries import Row
from viewer.queries.episodes import FIELDS, FieldKind
from viewer.queries.groups import Signal

MAX_NAME = 120
"""Maximum number of characters of a name in the heading of a page."""

# By the job's kind, the parameter that names it.
_NAMING = {
    "credit": "estimator",
    "score": "scorer",
    "reward": "reward",
    "train": "loss",
    "select": "name",
    "group": "grouping",
    "rescore": "checkpoint",
    "render": "model",
    "ingest": "source",
    "collect": "environment",
    "retract": "reason",
    "restore": "reason",
    "forget": "reason",
}


def name_episode(facts: Row) -> str:
    """Name an episode by run, task and rollout, then round and attempt where there are several."""
    names = ("run_id", "task_id", "rollout_index")
    return _join_names(facts, names, round=facts.get("collection_round"), attempt=facts.get("attempt") or None)


def name_sibling(facts: Row) -> str:
    """Name an episode among its siblings: `rollout 3`, with the attempt if it was retried."""
    return "rollout " + _join_names(facts, ("rollout_index",), attempt=facts["attempt"] or None)


def name_group(facts: Row) -> str:
    """Name a group by run and task, then round and seed where it has them."""
    return _join_names(facts, ("run_id", "task_id"), round=facts.get("collection_round"), seed=facts.get("seed"))


def name_job(kind: str, parameters: str | None) -> str | None:
    """Name a job by what it ran: its estimator, scorer, loss, source, ...; None if its parameters do not say."""
    settings = parse_json_object(parameters)
    # The name stands alone, or among the options of what bears it.
    value = settings.get(_NAMING.get(kind, ""))
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str) and name:
        return name
    return "ppo, online" if kind == "train" and "ppo" in settings else None


def name_jobs(frame: pl.DataFrame) -> pl.Series:
    """Return the names of jobs: a column `name` from `kind` and `parameters`."""
    names = [name_job(*row) for row in frame.select("kind", "parameters").iter_rows()]
    return pl.Series("name", names, dtype=pl.String)


def _join_names(facts: Row, names: tuple[str, ...], **details: Any) -> str:
    facts = facts | {"rollout_index": name_rollout(facts.get("rollout_index"))}
    name = " / ".join("\N{EN DASH}" if facts.get(name) is None else str(facts[name]) for name in names)
    return name + "".join(f", {key} {value}" for key, value in details.items() if value is not None)


class Page(StrEnum):
    """Pages of the viewer, with their names in URLs."""

    RUNS = "runs"
    EPISODES = "episodes"
    EPISODE = "episode"
    GROUPS = "groups"
    GROUP = "group"
    COMPARE = "compare"
    ANCHORS = "anchors"
    CHANGE = "change"
    TRAINING = "training"
    JOBS = "jobs"
    JOB = "job"
    REJECTS = "rejects"
    ANNOTATIONS = "annotations"
    SQL = "sql"
    SINCE = "since"


PARAMETERS = frozenset(
    """
    a_credit a_rounds a_run a_version anchor as_of average axis b_credit b_rounds b_run b_version beside chart credit
    definition episode facets follow gone grouping groups kind list open opened over page q reason reasoning reject
    siblings signal since sort state step steps success tools values view
    """.split()  # noqa: SIM905
).union(parameter.name for row in FIELDS for parameter in row.parameters)
"""Query parameters of all pages; the guide says which page has which."""


JOB_STATES = ("succeeded", "failed", "started")
_WHOLE = frozenset(("gone", "groups", "page", "siblings", "step", "steps")).union(
    parameter.name for row in FIELDS for parameter in row.parameters if parameter.kind is FieldKind.COUNT
)
_FINITE = frozenset(("success",)).union(
    parameter.name for row in FIELDS for parameter in row.parameters if parameter.kind is FieldKind.NUMBER
)
_ONE_OF: Mapping[str, Collection[str]] = {
    "status": STATUSES,
    "state": JOB_STATES,
    "signal": tuple(Signal),
    "unscored": ("true", "false"),
}


def list_invalid_parameters() -> list[tuple[str, str, str]]:
    """Return the parameters of the present address with invalid values: name, value, and the valid values."""
    faults = []
    for name in st.query_params:
        for value in filter(None, st.query_params.get_all(name)):
            if name in _WHOLE and parse_whole_number(value) is None:
                faults.append((name, value, "a whole number from 0"))
            elif name in _FINITE and parse_finite(value) is None:
                faults.append((name, value, "a number"))
            elif name in _ONE_OF and value not in _ONE_OF[name]:
                faults.append((name, value, "one of " + ", ".join(_ONE_OF[name])))
    return faults


def get_parameter(name: str) -> str | None:
    """Return a parameter of the present address; None if it is missing or empty."""
    return st.query_params.get(name) or None


def get_id(name: str) -> int | None:
    """Return an id of the present address, None without one. Raises ValueError: the text is not an id."""
    text = get_parameter(name)
    return None if text is None else ids.from_text(text)


def get_ids(name: str) -> list[int]:
    """Return all ids of the present address under a name, in order. Raises ValueError: a text is not an id."""
    return [ids.from_text(text) for text in st.query_params.get_all(name) if text]


def get_int(name: str) -> int | None:
    """Return a whole number of the present address; None if it is missing or invalid."""
    return parse_whole_number(get_parameter(name))


def parse_whole_number(text: str | None) -> int | None:
    """Return a text as a number 0, 1, 2, ... of at most 18 digits; None for other texts."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def parse_finite(text: str | None) -> float | None:
    """Return a text as a finite number; None for other texts."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


_VISIT, _VISITS, _HERE, _RUN = "navigation-visit", "navigation-visits", "here", "looked-at-run"
Value = str | int | float | Sequence[str] | None

_SCRIPT = st.components.v2.component("trajlake_navigation", js=Path(__file__).with_name("navigation.js").read_text())


def install(path: str) -> None:
    """Make plain clicks on links keep the browser session; `path` is that of the page, without the slash."""
    st.session_state[_HERE] = f"/{path}"
    if (run := get_parameter("run")) is not None:
        remember_run(run)
    data: dict[str, Any] = {"pages": [_build_path(page) for page in Page], "run": str(time.time_ns())}
    data["episode"] = get_parameter("episode")
    data["command"] = f"trajlake view {session.format_lake_option()}"
    if (target := st.session_state.pop(_VISIT, None)) is not None:
        st.session_state[_VISITS] = number = st.session_state.get(_VISITS, 0) + 1
        data["visit"] = {"target": target, "number": number}
    with st.container(key="navigation"):
        _SCRIPT(key="navigation-script", data=data)


@contextmanager
def unbind_parameters() -> Iterator[None]:
    """Run a page, then unbind its widgets from the parameters of the address; the next run binds them again.

    Streamlit removes from the address of another page each parameter that a widget of this page is bound to. A link, or
    Back, from the list of episodes would then lead to groups of all runs, and to the page of a group without the group.
    """
    try:
        yield
    finally:
        with get_session_state().query_params() as parameters:
            for name in PARAMETERS:
                if (binding := parameters.get_binding_for_param(name)) is not None:
                    parameters.unbind_widget(binding.widget_id)


def visit(target: str) -> None:
    """Make the browser follow an address that cannot be a link, such as a point of a chart; only within a callback."""
    st.session_state[_VISIT] = target


def get_path() -> str:
    """Return the path of the page that is drawn."""
    return str(st.session_state.get(_HERE, "/"))


def remember_run(run: str) -> None:
    """Remember the run that the reader looks at: links of the menu bar carry no parameters."""
    st.session_state[_RUN] = run


def get_last_run() -> str | None:
    """Return the run that the reader looked at last in this session, if any."""
    run: str | None = st.session_state.get(_RUN)
    return run


def scroll_into_view(name: str) -> None:
    """Make the browser scroll here, once for each name, because the reader has just asked for this part."""
    with st.container(key="into-view"):
        _SCRIPT(key=f"into-view-{name}", data={"here": name})


def href(page: Page, /, **parameters: Value) -> str:
    """Return the address of a page with the query parameters that are set; ids are text (`lake.ids.to_text`)."""
    return build_address(session.get_older_state(), page, **parameters)


def build_address(older: str | None, page: Page, /, **parameters: Value) -> str:
    """Return the address of a page in an older state (`session.get_older_state`), or in the newest for None."""
    return _build_path(page) + _encode_query(parameters, older)


def build_query(**parameters: Value) -> str:
    """Return the query parameters that are set as the end of an address.

    If the session shows an older state, the link leads to that state too, also in another tab.
    """
    return _encode_query(parameters, session.get_older_state())


def _encode_query(values: Mapping[str, Value], older: str | None) -> str:
    parameters = {name: value for name, value in values.items() if value not in (None, "", ())}
    if older is not None:
        parameters[session.AS_OF] = older
    return f"?{urlencode(parameters, doseq=True)}" if parameters else ""


def change_address(present: Mapping[str, list[str]] | None = None, /, **parameters: Value) -> str:
    """Return the present address, or that of other parameters, with some set, or removed (None)."""
    return f"?{urlencode(_change_parameters(parameters, present), doseq=True)}"


def go(**parameters: Value) -> None:
    """Go to `change_address` in one entry of the browser's history; only within a callback."""
    st.query_params.from_dict(_change_parameters(parameters))


def _change_parameters(changes: Mapping[str, Value], present: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    if present is None:
        present = {name: st.query_params.get_all(name) for name in st.query_params}
    return {name: value for name, value in {**present, **changes}.items() if value not in (None, "", [])}


def anchor(text: str, target: str, *, key: str | None = None, title: str | None = None) -> str:
    """Return HTML of a link with a plain text, and with what the pointer shows; the key `key` follows it."""
    follows = f' data-key="{escape(key)}" title="key {escape(key)}"' if key else ""
    follows += f' title="{escape(title)}"' if title else ""
    return f'<a href="{escape(target)}"{follows}>{escape(text)}</a>'


def chip_link(text: str, target: str, *, is_chosen: bool = False) -> str:
    """Return HTML of a link that looks like a chip, with a plain text in one line."""
    return f'<a href="{escape(target)}"{" class=chosen" if is_chosen else ""}>{escape(one_line(text, 90))}</a>'


def _build_path(page: Page) -> str:
    return "/" if page is Page.RUNS else f"/{page}"


PATHS = frozenset(map(_build_path, Page))
"""Paths of all pages."""
