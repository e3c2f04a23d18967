"""What a worker tells about an exception; that a socket was refused is said with the way to be allowed one."""

import socket
import urllib.error

import pytest

from pipelines.score.judges import JudgeError
from pipelines.score.sandbox.frames import TEXT
from pipelines.score.sandbox.worker import NO_NETWORK, NoResultError, describe_failure


def refused() -> PermissionError:
    """As the sandbox refuses a socket: from inside the standard library's socket.py."""
    namespace: dict[str, object] = {}
    code = compile("def create():\n    raise PermissionError(1, 'Operation not permitted')\n", "/x/socket.py", "exec")
    exec(code, namespace)
    try:
        namespace["create"]()  # type: ignore[operator]
    except PermissionError as error:
        return error
    raise AssertionError


def wrapped(inner: Exception) -> Exception:
    error = RuntimeError("the judge did not answer")
    error.__cause__ = inner
    return error


@pytest.mark.parametrize(
    "error",
    [
        refused(),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        urllib.error.URLError(refused()),
        wrapped(refused()),
        JudgeError("the environment variable KEY is not set"),
        wrapped(urllib.error.URLError(socket.gaierror(-3, "no"))),
    ],
)
def test_a_network_that_is_not_there_is_named(error: Exception) -> None:
    kind, message = describe_failure(error, locked=True)
    assert (kind, message.endswith(NO_NETWORK)) == ("exception", True)
    assert "requires_network=True" in NO_NETWORK
    assert "--allow-network" in NO_NETWORK
    assert not describe_failure(error, locked=False)[1].endswith(NO_NETWORK), "outside it is another matter"


@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied", "/etc/shadow"), ValueError("x"), wrapped(KeyError("socket.py"))]
)
def test_another_failure_is_not_taken_for_it(error: Exception) -> None:
    assert not describe_failure(error, locked=True)[1].endswith(NO_NETWORK)


def test_exceptions_that_are_behind_each_other_in_a_circle_end() -> None:
    first, second = ValueError("one"), ValueError("other")
    first.__cause__, second.__cause__ = second, first
    assert describe_failure(first, locked=True) == ("exception", "ValueError: one")


def test_a_long_text_is_cut_and_keeps_the_advice() -> None:
    _, message = describe_failure(socket.gaierror(-3, "x" * 99_999), locked=True)
    assert message.endswith(NO_NETWORK)
    assert len(message) == TEXT


def test_what_is_no_exception_of_the_functions_own() -> None:
    assert describe_failure(NoResultError("it returned a set"), locked=True) == ("invalid", "it returned a set")
    assert describe_failure(MemoryError(), locked=True)[0] == "memory"

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_failure(Silent(), locked=True) == ("exception", "Silent")
