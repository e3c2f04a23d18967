"""A pytest plugin for `tests/run_slow.py`: prints the collected tests, one line a case, with the promise of each.

The promise is the argument of the mark (`@pytest.mark.slow("...")`), else the first line of the test's docstring, else
its name in words.
"""

import inspect

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    for item in session.items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        reporter.line(f"slow-case\t{name}\t{promise(item)}")


def promise(item: pytest.Item) -> str:
    """What a slow test shows, in a line."""
    for mark in item.iter_markers("slow"):
        if mark.args:
            return str(mark.args[0])
    text = inspect.getdoc(getattr(item, "function", None)) or item.name.partition("[")[0].removeprefix("test_").replace(
        "_", " "
    )
    return text.partition("\n")[0]
