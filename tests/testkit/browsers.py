"""A real Chromium for the tests that need one, driven by Playwright.

Where none is installed those tests are skipped and say so; with TRAJLAKE_REQUIRE_BROWSER=1 they fail instead, so that a
machine that should have one cannot lose them quietly.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIRE = "TRAJLAKE_REQUIRE_BROWSER"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The executable of an installed Chromium: on the path, or the one Playwright downloaded."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser_path = driver.chromium.executable_path
    return browser_path if Path(browser_path).exists() else None


def missing(reason: str) -> None:
    """Skip the test, or fail it where a browser is required."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason}, and {REQUIRE}=1 requires it", pytrace=False)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running headless Chromium (`playwright.sync_api.Browser`)."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("Playwright is not installed (pip install playwright)")
    executable = find_chromium()
    if executable is None:
        missing("no Chromium is installed (apt-get install chromium, or playwright install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()
