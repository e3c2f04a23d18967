"""Driving the viewer without a browser: open a page by its address, and read everything on it."""

import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from streamlit.components.v2 import manifest_scanner  # noqa: TID253
from streamlit.runtime.scriptrunner.script_cache import ScriptCache  # noqa: TID253
from streamlit.testing.v1 import AppTest, app_test, local_script_runner  # noqa: TID253 - the viewer's tests alone
from streamlit.util import calc_hash  # noqa: TID253

from lake import Lake, ids
from viewer.server import ENVIRONMENT

APP = Path(__file__).resolve().parents[2] / "viewer" / "app.py"
SCREENS = ("runs", "episodes", "groups", "anchors", "training", "change", "jobs", "annotations", "sql", "rejects")
"""Pages in the navigation."""
# Each page would look through every installed package for components, which takes as long as the page.
manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)
# Each run would compile its scripts anew; a server compiles them once.
for module in (app_test, local_script_runner):
    module.ScriptCache = cache(ScriptCache)  # type: ignore[attr-defined]


def show(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """Have pages show a lake."""
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    return lk


def episode_id(lk: Lake, task: str, rollout_index: int, round_: int = 0) -> int:
    """The episode of a task, a number and a round."""
    query = "SELECT episode_id FROM episodes WHERE task_id = ? AND rollout_index = ? AND collection_round = ?"
    return int(lk.sql(query, [task, rollout_index, round_]).item())


def open_page(name: str, **address: str | int | list[str]) -> AppTest:
    """The page after one run; ids in the address may be numbers."""
    at = AppTest.from_file(str(APP), default_timeout=600)
    for key, value in address.items():
        is_id = key in ("episode", "group", "job", "credit", "anchor", "reject") and isinstance(value, int)
        at.query_params[key] = ids.to_text(value) if is_id else value if isinstance(value, list) else str(value)
    go_to(at, name)
    return assert_sound(at.run())


def go_to(at: AppTest, name: str) -> None:
    """Turn to a page; the next run shows it. Streamlit's `switch_page` knows pages by their files only."""
    at._page_hash = calc_hash(name)


def assert_sound(at: AppTest) -> AppTest:
    """No traceback on the page."""
    assert [error.value for error in at.exception] == []
    return at


def elements(at: AppTest) -> Iterator[Any]:
    """Every element of the page, in order."""

    def walk(block: Any) -> Iterator[Any]:
        for child in block.children.values():
            yield child
            if hasattr(child, "children"):
                yield from walk(child)

    yield from walk(at._tree)


def words(at: AppTest) -> str:
    """All text that the page shows, labels and tables included, one element a line."""
    lines = []
    for element in elements(at):
        for name in ("label",) if hasattr(element, "children") else ("label", "value"):
            lines.append(str(getattr(element, name, None) or ""))
        if element.type == "html":
            lines.append(element.proto.body)
    return "\n".join(lines)


def transcript(at: AppTest) -> dict[str, Any]:
    """What the page was given of the transcript that it shows (`viewer.transcript.component`)."""
    (proto,) = [e.proto for e in elements(at) if getattr(e.proto, "component_name", "") == "trajlake_transcript"]
    return dict(json.loads(proto.json))


_TELLING_COLUMNS = {
    "rounds": {"round", "live_groups"},
    "runs": {"name", "last_at"},
    "trained runs": {"run_id", "updates"},
    "tasks": {"task_id", "scored"},
    "episodes": {"episode_id", "group_id", "status"},
    "groups": {"group_id", "signal"},
    "siblings": {"episode_id", "num_steps", "rollout_index"},
    "anchors": {"anchor_key", "spread"},
    "visits": {"episode_id", "return_to_go"},
    "batch": {"episode_id", "action_tokens"},
    "jobs": {"job_id", "kind"},
    "rejects": {"reject_id", "reason"},
    "figures": {"figure", "difference"},
    "changed": {"task_id", "difference"},
    "lengths": {"side", "last"},
    "definitions": {"definition", "singleton"},
    "rounds_of_a_run": {"x", "num_steps"},
    "tools": {"tool", "first"},
    "tools_of_both_sides": {"tool", "a_share"},
    "annotations": {"author", "text"},
    "scorers": {"scorer", "kappa"},
    "settings": {"setting", "differs"},
    "settings_that_differ": {"setting", "kind"},
    "missing_scores": {"scorer", "reason", "scores"},
    "changed_groups": {"group_id", "lost"},
    "batch_groups": {"group_id", "mean_size"},
    "answer": {"things"},
    "states": {"anchor_key", "share", "groups"},
    "groups_of_a_state": {"group_id", "weight"},
    "things": {"episode_id", "value"},
}


class _Table(HTMLParser):
    """Names of a table's columns, its rows as they are shown, and where they lead.

    Columns below others, and their cells, come after these.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.columns: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str | None] = []
        self.id_links: list[list[str]] = []
        self.opened: list[bool] = []
        self._is_cell = self._is_under = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if "data-column" in attributes:
            self.columns.append(str(attributes["data-column"]))
        elif tag == "tr" and self.columns:
            self.rows.append([])
            self.links.append(None)
            self.id_links.append([])
            self.opened.append(attributes.get("class") == "opened")
        elif tag == "td" or "data-cell" in attributes:
            self.rows[-1].append("")
            self._is_cell = True
        elif tag == "small":
            self._is_cell, self._is_under = False, True
        elif tag == "a" and self._is_cell and len(self.rows[-1]) == 1:
            self.links[-1] = attributes["href"]
        elif tag == "a" and self._is_cell:
            self.id_links[-1].append(str(attributes["href"]))

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag != "td" and not (self._is_under and tag == "span")
        self._is_under = self._is_under and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.rows[-1][-1] += data


def _table(at: AppTest, name: str) -> _Table:
    """A table of the page; its columns identify it."""
    tables = [_Table(element.proto.body) for element in elements(at) if element.type == "html"]
    (matching_table,) = [table for table in tables if _TELLING_COLUMNS[name] <= set(table.columns)]
    return matching_table


def column(at: AppTest, name: str, field: str) -> list[str]:
    """A column of a table of the page, as it is shown."""
    table = _table(at, name)
    return [row[table.columns.index(field)] for row in table.rows]


def columns(at: AppTest, name: str) -> list[str]:
    """Names of a table's columns."""
    return _table(at, name).columns


def links(at: AppTest, name: str) -> list[str | None]:
    """Where the rows of a table lead."""
    return _table(at, name).links


def id_links(at: AppTest, name: str) -> list[list[str]]:
    """Where the ids of each row of a table lead."""
    return _table(at, name).id_links


def opened(at: AppTest, name: str) -> list[int]:
    """Positions of the rows that are marked."""
    return [position for position, is_opened in enumerate(_table(at, name).opened) if is_opened]


def facts(at: AppTest) -> dict[str, str]:
    """The figures that stand in lines on the page, by their labels."""
    facts = {}
    for element in elements(at):
        if element.type == "html" and element.proto.body.startswith('<dl class="trajlake-facts">'):
            facts |= dict(re.findall("<dt>(.*?)</dt> <dd>(.*?)</dd>", element.proto.body))
    return {unescape(label): unescape(value) for label, value in facts.items()}


def charts(at: AppTest) -> int:
    """Number of charts on the page."""
    return len(at.get("vega_lite_chart"))


def job_choice(at: AppTest) -> Any:
    """The box of the training page in which the job is chosen."""
    return next(box for box in at.selectbox if box.label == "Job")
