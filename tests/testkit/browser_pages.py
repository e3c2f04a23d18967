"""A page of the viewer in a real browser: opened, awaited, read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATIENCE = 120_000
"""Milliseconds a page may take on a busy machine."""
_SETTLED = "() => window[Symbol.for('trajlake.navigation')]?.isSettled()"
_HEARS = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
"""What is drawn hears keys a moment later: React runs effects, which register them, after a frame."""


@contextmanager
def fresh_page(browser: Any, base: str, **options: Any) -> Iterator[Any]:
    """A page without a history; at the end nothing may have gone wrong in it, and nothing been asked of another host.

    Args:
        base: address of the viewer.
        options: of the browser's context.
    """
    context = browser.new_context(**({"viewport": {"width": 1440, "height": 1400}, "base_url": base} | options))
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    faults: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.add(urlsplit(request.url).hostname or ""))
    yield page
    assert page.get_by_test_id("stException").count() == 0
    assert faults == []
    assert asked <= {"127.0.0.1", ""}, f"the viewer asked {asked}"
    context.close()


def go(page: Any, path: str, heading: str) -> None:
    """Open an address and wait until its page stands."""
    page.goto(path)
    settled(page, heading)


def settled(page: Any, heading: str) -> None:
    """Wait until what the address names is drawn, whole (navigation.js), under a heading."""
    _wait(page)
    page.get_by_role("heading", name=re.compile(rf"^{heading}( |$)")).first.wait_for()
    page.evaluate(_HEARS)


def open_row(page: Any, table: str, row: int) -> None:
    """Click into the middle of a row of the table with a label."""
    rows_of(page, table).nth(row).click()


def rows_of(page: Any, table: str) -> Any:
    """The rows of the table with a label, once what the address names is drawn."""
    _wait(page)
    return page.get_by_role("region", name=table, exact=True).locator("tbody tr")


def address(page: Any) -> dict[str, str]:
    """The parameters of the page's address, once what it names is drawn."""
    _wait(page)
    return {name: values[-1] for name, values in parse_qs(urlsplit(page.url).query).items()}


def _wait(page: Any) -> None:
    page.wait_for_function(_SETTLED)
