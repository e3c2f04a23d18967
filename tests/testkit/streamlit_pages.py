"""Driving the viewer without a browser: open a page by its address, and read everything on it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from streamlit.components.v2 import manifest_scanner  # noqa: TID253
from streamlit.testing.v1 import AppTest  # noqa: TID253 - imported by the viewer's tests alone

from lake import ids

APP = Path(__file__).resolve().parents[2] / "viewer" / "app.py"
SCREENS = ("runs", "episodes", "groups", "training", "jobs", "rejects")
"""Pages in the navigation."""
# Each page would look through every installed package for components, which takes as long as the page.
manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)


def open_page(name: str, **address: str | int | list[str]) -> AppTest:
    """The page after one run; ids in the address may be numbers."""
    at = AppTest.from_file(str(APP), default_timeout=60)
    if name != "runs":
        at.run()
        assert_sound(at)
    for key, value in address.items():
        is_id = key in ("episode", "group", "job", "credit", "anchor", "reject") and isinstance(value, int)
        at.query_params[key] = ids.to_text(value) if is_id else value if isinstance(value, list) else str(value)
    if name != "runs":
        at.switch_page(f"screens/{name}.py")
    return assert_sound(at.run())


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
            found = getattr(element, name, None)
            lines.append(found.to_csv() if hasattr(found, "to_csv") else str(found or ""))
        if element.type == "html":
            lines.append(element.proto.body)
        if element.type == "page_link":
            lines.append(element.proto.label)
    return "\n".join(lines)


_TELLING_COLUMNS = {
    "rounds": {"round", "live_groups"},
    "runs": {"run_id", "dead_share"},
    "tasks": {"task_id", "scored"},
    "episodes": {"episode_id", "stop_reason"},
    "groups": {"group_id", "signal"},
    "siblings": {"episode_id", "num_steps", "mean_advantage"},
    "anchors": {"anchor_key", "spread"},
    "visits": {"episode_id", "return_to_go"},
    "batch": {"episode_id", "action_tokens"},
    "jobs": {"job_id", "kind"},
    "rejects": {"reject_id", "reason"},
}


def frame(at: AppTest, name: str) -> Any:
    """A table of the page, as pandas; tables have no names, so columns tell which it is."""
    (found,) = [table.value for table in at.dataframe if _TELLING_COLUMNS[name] <= set(table.value.columns)]
    return found


def charts(at: AppTest) -> int:
    """Number of charts on the page."""
    return len(at.get("vega_lite_chart"))
