"""A pytest plugin: the wording of messages, kept in one golden file, so that tests assert facts.

A test asserts the class of an error, the field and value that it names, what is valid and what to run next, in
fragments of fewer than five words. The sentence around them goes through the fixture `wording`, which compares it with
`tests/golden/wording.json`. `make golden` writes that file again; its diff shows every sentence that changed.
"""

import fcntl
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "wording.json"
_REWRITE = "--rewrite-wording"
_PROPERTY = "wording"
_PORT = re.compile(r"(127\.0\.0\.1|localhost):\d+")

Wording = Callable[..., str]
"""`wording(message, NAME=text)`: compares a message with the golden file, NAME standing for a text that varies."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _REWRITE, action="store_true", help="write tests/golden/wording.json again, for the tests that run"
    )


class Messages:
    """The messages of a test, in the order in which it compares them.

    Args:
        test: its name, from the folder of tests.
        golden: messages by test; None to take every message as it is.
        folder: of the test, left out of messages, as ports are.
    """

    def __init__(self, test: str, golden: dict[str, list[str]] | None, folder: Path) -> None:
        self._golden = None if golden is None else golden.get(test, [])
        self._folder = str(folder)
        self.shown: list[str] = []

    def compare(self, message: object, **varying: object) -> str:
        """Compare the next message with the golden one; the message as it was."""
        text = str(message)
        normalised = text.replace(self._folder, "TMP")
        for name, value in varying.items():
            normalised = normalised.replace(str(value), name)
        number = len(self.shown)
        self.shown.append(_PORT.sub(r"\1:PORT", normalised))
        if self._golden is not None:
            assert number < len(self._golden), f"{GOLDEN.name} does not have this message; `make golden` adds it"
            assert self.shown[number] == self._golden[number], "the wording changed; `make golden` writes it again"
        return text


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wording]:
    """Compare messages of this test with the golden file; returns each as it was, for the test's own asserts."""
    rewrite = request.config.getoption(_REWRITE)
    test = request.node.nodeid.removeprefix("tests/")
    messages = Messages(test, None if rewrite else _golden(), tmp_path)
    yield messages.compare
    if rewrite:
        request.node.user_properties.append((_PROPERTY, [test, messages.shown]))


@cache
def _golden() -> dict[str, list[str]]:
    return json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}


class _Rewriter:
    """Where results come together: puts the messages of the tests that ran into the golden file."""

    def __init__(self) -> None:
        self._messages: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that compares nothing any more leaves the file.
        self._messages.setdefault(report.nodeid.removeprefix("tests/"), [])
        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "teardown":
                self._messages[value[0]] = value[1]

    def pytest_sessionfinish(self) -> None:
        # Two runs may rewrite at once, each run the messages of its tests.
        with GOLDEN.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            merged = json.loads(file.read() or "{}") | self._messages
            current = {test: texts for test, texts in sorted(merged.items()) if texts and is_defined(test)}
            file.truncate(0)
            file.write(json.dumps(current, indent=1, ensure_ascii=False) + "\n")


def is_defined(test: str) -> bool:
    """Look whether the function of a test, `folder/test_file.py::test_name[case]`, is still there."""
    name, _, function = test.partition("::")
    path = GOLDEN.parents[1] / name
    return path.exists() and f"def {function.partition('[')[0]}(" in path.read_text("utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(_REWRITE) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Rewriter(), "wording-rewriter")
