"""A page of the viewer in a real browser: opened, awaited, read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATIENCE = 120_000
"""Milliseconds a page may take on a busy machine."""
_FOLLOWS = "() => Object.getOwnPropertySymbols(window).some(one => one.description === 'trajlake.navigation')"


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
    """Wait for a heading, for the script to have ended, and for the page to follow links and keys (navigation.js)."""
    page.get_by_role("heading", name=re.compile(rf"^{heading}( |$)")).first.wait_for()
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    page.wait_for_function(_FOLLOWS)


def open_row(page: Any, table: str, row: int) -> None:
    """Click into the middle of a row of the table with a label."""
    rows_of(page, table).nth(row).click()


def rows_of(page: Any, table: str) -> Any:
    """The rows of the table with a label."""
    return page.get_by_role("region", name=table, exact=True).locator("tbody tr")


def address(page: Any) -> dict[str, str]:
    """The parameters of the page's address."""
    return {name: values[-1] for name, values in parse_qs(urlsplit(page.url).query).items()}
