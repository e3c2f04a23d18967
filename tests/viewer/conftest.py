"""What tests of the viewer share: its process on a module's lake, a real browser, a page in it, and a lake to read."""

from collections.abc import Iterator
from typing import Any

import pytest

import testkit.browsed_lake
from lake import Lake
from testkit.browser_pages import Tab
from testkit.browsers import chromium
from testkit.lakes import full_lake
from testkit.viewer_process import Viewer, viewer


@pytest.fixture(scope="module")
def running(lk: Lake) -> Iterator[Viewer]:
    """The viewer on the module's lake, a fixture `lk` of the module's own."""
    with viewer(lk.uri) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for a module: while Playwright drives one, other tests of this thread could not run an event loop."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def tab(browser: Any, running: Viewer) -> Iterator[Tab]:
    with Tab(browser, running.address) as opened:
        yield opened


@pytest.fixture
def page(tab: Tab, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page, as large as the module's `VIEWPORT` says; at the end no hostile text of it may have been run."""
    with tab.used(getattr(request.module, "VIEWPORT", None)) as opened:
        yield opened
        assert opened.evaluate("window.hostile") is None


@pytest.fixture(scope="module")
def shared_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Episodes, a credit job and a training job; tests only read it."""
    return full_lake(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(scope="session")
def browsed_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """What several modules look at in a browser; tests only read it."""
    return testkit.browsed_lake.browsed_lake(tmp_path_factory.mktemp("browsed"))


@pytest.fixture(scope="session")
def browsed(browsed_lake: Lake) -> Iterator[Viewer]:
    """The one viewer of this process on that lake."""
    with viewer(browsed_lake.uri) as started:
        yield started
