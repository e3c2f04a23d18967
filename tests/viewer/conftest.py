"""What tests of the viewer share: its process on a module's lake, a real browser, a page in it, and a lake to read."""

from collections.abc import Iterator
from typing import Any

import pytest

import testkit.browsed_lake
from lake import Lake
from testkit.browser_pages import HeldBrowser
from testkit.lakes import full_lake
from testkit.viewer_process import Viewer, viewer


@pytest.fixture(scope="module")
def running(lk: Lake) -> Iterator[Viewer]:
    """The viewer on the module's lake, a fixture `lk` of the module's own."""
    with viewer(lk.uri) as started:
        yield started


HELD = HeldBrowser()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a browser follow each other, so that they share it."""
    items.sort(key=_needs_browser)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """End the browser before a test that needs none: while it runs, this thread cannot run another event loop."""
    yield
    if nextitem is None or not _needs_browser(nextitem):
        HELD.close()


def _needs_browser(item: pytest.Item) -> bool:
    return item.get_closest_marker("browser") is not None


@pytest.fixture
def browser() -> Any:
    """The browser that tests in a row share."""
    return HELD.browser()


@pytest.fixture
def page(running: Viewer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page, as large as the module's `VIEWPORT` says; at the end no hostile text of it may have been run."""
    with HELD.tab(running.address).used(getattr(request.module, "VIEWPORT", None)) as opened:
        yield opened
        assert opened.evaluate("window.hostile") is None


@pytest.fixture
def browsed_page(browsed: Viewer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same on the lake that several modules look at."""
    with HELD.tab(browsed.address).used(getattr(request.module, "VIEWPORT", None)) as opened:
        yield opened
        assert opened.evaluate("window.hostile") is None


@pytest.fixture(scope="module")
def shared_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Episodes, a credit job and a training job; tests only read it."""
    return full_lake(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(scope="session")
def browsed_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """What several modules look at in a browser; tests add what changes no list of another one: annotations."""
    return testkit.browsed_lake.browsed_lake(tmp_path_factory.mktemp("browsed"))


@pytest.fixture(scope="session")
def browsed(browsed_lake: Lake) -> Iterator[Viewer]:
    """The one viewer of this process on that lake."""
    with viewer(browsed_lake.uri) as started:
        yield started
