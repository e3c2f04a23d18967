"""A page of the viewer in a real browser: opened, awaited, read."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testkit.browsers import chromium

PATIENCE = 120_000
"""Milliseconds a page may take on a busy machine."""
_MOST_ENTRIES = 30
"""Entries of the history after which a page is given up: browsers count up to 50."""
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
    with closing(Tab(browser, base, **options)) as tab, tab.used() as page:
        yield page


class Tab:
    """A page of a browser that tests use one after the other: a new one costs three times what opening an address does.

    Args:
        base: address of the viewer.
        options: of the browser's context.
    """

    def __init__(self, browser: Any, base: str, **options: Any) -> None:
        self._browser = browser
        self._options = {"base_url": base} | options
        self._size = self._options.setdefault("viewport", {"width": 1440, "height": 1400})
        self._page: Any = None
        self._faults: list[str] = []
        self._asked: set[str] = set()

    def close(self) -> None:
        """Give the page up; the next test gets another."""
        if self._page is not None:
            self._page.context.close()
            self._page = None

    @contextmanager
    def used(self, size: dict[str, int] | None = None) -> Iterator[Any]:
        """The page for one test; at its end nothing may have gone wrong in it, and nothing been asked of another host.

        Args:
            size: of its window, if not the usual.
        """
        if self._page is not None and self._page.evaluate("history.length") > _MOST_ENTRIES:
            self.close()
        if self._page is None:
            self._page = self._start_page()
        page = self._page
        page.set_viewport_size(size or self._size)
        is_clean = False
        try:
            yield page
            assert page.get_by_test_id("stException").count() == 0
            assert self._faults == []
            assert self._asked <= {"127.0.0.1", ""}, f"the viewer asked {self._asked}"
            assert page.context.pages == [page]
            page.unroute_all()
            page.context.clear_permissions()
            page.emulate_media(color_scheme="null")
            page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
            page.goto("about:blank")
            is_clean = True
        finally:
            if not is_clean:
                self.close()

    def _start_page(self) -> Any:
        page = self._browser.new_context(**self._options).new_page()
        page.set_default_timeout(PATIENCE)
        self._faults, self._asked = faults, requests = [], set()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.add(urlsplit(request.url).hostname or ""))
        return page


class HeldBrowser:
    """A browser, and a tab in it, that tests of several files use; started when the first of them asks for it."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._browser: Any = None
        self._tabs: dict[str, Tab] = {}

    def browser(self) -> Any:
        """The browser."""
        if self._browser is None:
            self._browser = self._open.enter_context(chromium())
        return self._browser

    def tab(self, base: str) -> Tab:
        """The tab on a viewer; one on another viewer is closed.

        Args:
            base: address of the viewer.
        """
        if base not in self._tabs:
            while self._tabs:
                self._tabs.popitem()[1].close()
            self._tabs[base] = Tab(self.browser(), base)
        return self._tabs[base]

    def close(self) -> None:
        """End the browser, if there is one; the next test that asks starts another."""
        self._tabs.clear()
        self._browser = None
        self._open.close()


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
