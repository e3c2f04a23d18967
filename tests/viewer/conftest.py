"""What tests of the viewer share: its process on a module's lake, a real browser, a page in it, and a lake to read."""

from collections.abc import Iterator
from typing import Any

import pytest

from lake import Lake
from testkit.browser_pages import fresh_page
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
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any, running: Viewer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh page, as large as the module's `VIEWPORT` says; at the end no hostile text of it may have been run."""
    size = getattr(request.module, "VIEWPORT", None)
    with fresh_page(browser, running.address, **({} if size is None else {"viewport": size})) as opened:
        yield opened
        assert opened.evaluate("window.hostile") is None


@pytest.fixture(scope="module")
def shared_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Episodes, a credit job and a training job; tests only read it."""
    return full_lake(tmp_path_factory.mktemp("viewer"))
