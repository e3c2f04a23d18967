"""Outcomes as they come: none is lost, none is reported twice, and a slow or hanging call holds up nothing but
itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.pool import Sandbox

CODE = """
import os, time

def f(n, do):
    if do == "raise":
        raise ValueError(n)
    if do == "die":
        os._exit(7)
    if do == "memory":
        bytearray(1 << 40)
    if do == "nothing":
        return None
    time.sleep({"hang": 60, "slow": 0.3}.get(do, 0))
    return float(n)
"""
CASES = {
    "fine": ["ok"] * 12,
    "faults": ["ok", "raise", "nothing", "ok", "die", "ok", "memory", "ok", "ok", "memory"],
    "first wants memory": ["memory", "ok", "raise", "ok"],
    "all hang": ["hang", "hang"],
    "a hang": ["ok", "ok", "hang", "ok"],
}


@pytest.fixture
def function(tmp_path: Path) -> FunctionSource:
    path = tmp_path / "code" / "mine.py"
    path.parent.mkdir()
    path.write_text(CODE)
    return FunctionSource(str(path), "f")


def calls(words: list[str]) -> list[tuple[int, dict[str, Any]]]:
    return [(n, {"n": n, "do": word}) for n, word in enumerate(words)]


@pytest.mark.parametrize("rows", [2, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_what_comes_is_what_a_call_gives(function: FunctionSource, words: list[str], rows: int) -> None:
    limits = SandboxLimits(seconds_per_row=0.5, rows_per_batch=rows)
    requests = calls(words)
    with Sandbox(function, limits) as sandbox:
        pieces = [pair for piece in sandbox.stream([requests[:2], [], requests[2:]]) for pair in piece]
    with Sandbox(function, limits) as sandbox:
        expected = sandbox.call([call for _, call in requests])
    assert [mark for mark, _ in pieces] == list(range(len(words)))
    assert [(outcome.kind, outcome.value, outcome.error) for _, outcome in pieces] == [
        (outcome.kind, outcome.value, outcome.error) for outcome in expected
    ]


def test_a_message_is_told_before_it_is_answered_whole(function: FunctionSource) -> None:
    """Eight slow calls in one message: they come a few at a time."""
    with Sandbox(function, SandboxLimits()) as sandbox:
        pieces = [[mark for mark, _ in piece] for piece in sandbox.stream([calls(["slow"] * 8)])]
    assert [mark for piece in pieces for mark in piece] == list(range(8))
    assert len([piece for piece in pieces if piece]) > 2


def test_nothing_is_said_too_while_a_call_hangs(function: FunctionSource) -> None:
    with Sandbox(function, SandboxLimits(seconds_per_row=2.0)) as sandbox:
        pieces = list(sandbox.stream([calls(["ok", "hang"])]))
    assert [] in pieces
    (first, second) = [pair for piece in pieces for pair in piece]
    assert (first[1].value, second[1].kind) == (0.0, "timeout")
    assert next(n for n, piece in enumerate(pieces) if piece) < len(pieces) - 1, "the first did not wait for the second"


def test_a_hanging_call_does_not_hold_up_those_of_other_workers(function: FunctionSource) -> None:
    words = ["hang", *["ok"] * 20]
    limits = SandboxLimits(seconds_per_row=3.0, rows_per_batch=1, workers=2)
    with Sandbox(function, limits) as sandbox:
        marks = [mark for piece in sandbox.stream([[call] for call in calls(words)]) for mark, _ in piece]
    assert sorted(marks) == list(range(21))
    assert marks[-1] == 0


def test_it_reads_ahead_but_not_everything(function: FunctionSource) -> None:
    outcomes = []

    def batches() -> Iterator[list[tuple[int, dict[str, Any]]]]:
        for call in calls(["ok"] * 300):
            outcomes.append(call)
            yield [call]

    n_told = 0
    with Sandbox(function, SandboxLimits()) as sandbox:
        for piece in sandbox.stream(batches()):
            n_told += len(piece)
            assert len(outcomes) <= n_told + 5
    assert n_told == 300


def test_of_no_calls_nothing_comes(function: FunctionSource) -> None:
    with Sandbox(function, SandboxLimits()) as sandbox:
        assert [pair for piece in sandbox.stream([[], []]) for pair in piece] == []
