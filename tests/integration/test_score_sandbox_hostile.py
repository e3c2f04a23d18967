"""Hostile reward functions: each spoils its own call and no other, and never the parent.

Every deed stands between good calls in one batch. The good ones are scored, in order, no matter what happens.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.score.sandbox import launch, worker_process
from pipelines.score.sandbox.contract import CallOutcome, FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import find_obstacle
from pipelines.score.sandbox.pool import Sandbox
from testkit import sandbox_hostile
from testkit.examples import mostly_slow, mostly_slow_cases

pytestmark = pytest.mark.skipif(
    find_obstacle("strong") is not None, reason=f"no strong isolation here: {find_obstacle('strong')}"
)

# Deed -> kind of its outcome, and words of its reason (or its value, where it does no harm to its own call).
DEEDS: dict[str, tuple[str, object]] = {
    "swallow": ("timeout", "longer than 1 s"),
    "exit": ("exception", "SystemExit: 3"),
    "hard exit": ("killed", "exit status 4"),
    "interrupt": ("exception", "KeyboardInterrupt"),
    "unprintable": ("exception", "_Unprintable"),
    "long text": ("exception", "ValueError: xxx"),
    "odd text": ("exception", "ValueError: \\ud800 \\x00 \\x1b[31m \n"),
    "exit like a shell": ("killed", "exit status 137"),
    "crash": ("killed", "SIGSEGV"),
    "abort": ("killed", "SIGABRT"),
    "death by alarm": ("killed", "SIGALRM"),
    "memory": ("memory", "memory_mb"),
    "print": ("ok", 5.0),
    "garbage on stdout": ("ok", 5.0),
    "garbage everywhere": ("invalid", "do not answer the request"),
    "zeros everywhere": ("invalid", "do not answer the request"),
    "forged kind": ("invalid", "contradicts itself"),
    "forged contradiction": ("invalid", "contradicts itself"),
    "forged count": ("invalid", "do not answer the request"),
    "forged shortage": ("invalid", "0 outcomes where it said 1"),
    "forged size": ("invalid", "announced a reply of 2,147,483,648 bytes"),
    "forged delay": ("timeout", "longer than 1 s"),
    "forged depth": ("invalid", "not send a list of outcomes"),
    "nan": ("invalid", "nan; valid: a finite number"),
    "infinity": ("invalid", "-inf as 'score'; valid: a finite number"),
    "huge text": ("invalid", "it returned 52,42"),
    "huge list": ("invalid", "more than 1,000,000 values"),
    "many values": ("invalid", "more than 1,000,000 values"),
    "deep": ("invalid", "nested deeper than 64 levels"),
    "very deep": ("invalid", "nested too deeply"),
    "cyclic": ("invalid", "contains itself"),
    "object": ("invalid", "an object of type object"),
    "function": ("invalid", "not JSON data"),
    "generator": ("invalid", "an object of type generator"),
    "no number": ("exception", "not today"),
    "huge number": ("invalid", "too large"),
    "huge number inside": ("invalid", "not JSON data"),
    "recursion": ("exception", "RecursionError"),
    "builtins": ("killed", "exit status 1"),
    "close three": ("ok", 5.0),
    "close everything": ("killed", ""),
    "thread": ("ok", 5.0),
    "limits": ("exception", "not allowed"),
}


def good(value: float) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"good {value}"}], "more": [value]}


def bad(deed: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": deed}]}


def sandbox(folder: Path, **limits: object) -> Sandbox:
    path = shutil.copy(sandbox_hostile.__file__, folder / "hostile.py")
    return Sandbox(FunctionSource(str(path), "hostile"), SandboxLimits(**{"seconds_per_row": 1.0, **limits}))  # type: ignore[arg-type]


def workers_started(monkeypatch: pytest.MonkeyPatch) -> list[worker_process.Worker]:
    """All workers from here on, as they are started."""
    started: list[worker_process.Worker] = []

    class Counted(worker_process.Worker):
        def __init__(self, *arguments: object) -> None:
            started.append(self)
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_process, "Worker", Counted)
    return started


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """For the deeds that end by themselves, one after the other."""
    with sandbox(tmp_path_factory.mktemp("quick"), seconds_per_row=30.0) as open_sandbox:
        yield open_sandbox


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """For those that take longer than they may."""
    with sandbox(tmp_path_factory.mktemp("late")) as open_sandbox:
        yield open_sandbox


ALIKE = {
    "exit like a shell",
    "crash",
    "abort",
    "long text",
    "garbage everywhere",
    "forged contradiction",
    "forged count",
    "forged shortage",
    "infinity",
    "many values",
    "deep",
    "object",
    "generator",
    "huge number inside",
    "recursion",
    "interrupt",
}
"""Deeds with the report of another one."""


@pytest.mark.parametrize("deed", mostly_slow(DEEDS, *(deed for deed in DEEDS if deed not in ALIKE)))
def test_a_hostile_call_spoils_itself_alone(quick: Sandbox, late: Sandbox, deed: str) -> None:
    open_sandbox = late if DEEDS[deed][0] == "timeout" else quick
    first, spoiled, last = open_sandbox.call([good(1.0), bad(deed), good(2.0)])
    assert (first.kind, first.value, first.error) == ("ok", 1.0, None)
    assert (last.kind, last.value, last.error) == ("ok", 2.0, None)
    kind, detail = DEEDS[deed]
    assert spoiled.kind == kind, spoiled
    if kind == "ok":
        assert spoiled.value == detail
        assert spoiled.error is None
    else:
        assert spoiled.value is None
        assert spoiled.error is not None
        assert str(detail) in spoiled.error
        assert len(spoiled.error) <= 2_500


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[CallOutcome]]:
    """Each call that leaves something behind, and two that take long enough to notice; one sandbox for all."""
    deeds = [*sandbox_hostile.LEFT_BEHIND, *sandbox_hostile.OWN_FAULT]
    with sandbox(tmp_path_factory.mktemp("aftermath"), seconds_per_row=10.0) as open_sandbox:
        return {deed: open_sandbox.call([bad(deed), bad("patient 1"), bad("patient 2")]) for deed in deeds}


@pytest.mark.parametrize("deed", sandbox_hostile.LEFT_BEHIND)
def test_what_a_call_leaves_behind_spoils_no_other(aftermath: dict[str, list[CallOutcome]], deed: str) -> None:
    assert [(each.value, each.error) for each in aftermath[deed]] == [(5.0, None), (1.0, None), (2.0, None)]


@pytest.mark.parametrize("deed", sandbox_hostile.OWN_FAULT)
def test_what_a_call_sets_off_at_the_last_moment_is_its_own(aftermath: dict[str, list[CallOutcome]], deed: str) -> None:
    spoiled, *rest = aftermath[deed]
    assert (spoiled.kind, "_LateError" in str(spoiled.error)) == ("exception", True), spoiled
    assert [(each.value, each.error) for each in rest] == [(1.0, None), (2.0, None)]


def test_a_thread_costs_a_worker_and_a_timer_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = workers_started(monkeypatch)
    with sandbox(tmp_path) as open_sandbox:
        assert [each.value for each in open_sandbox.call([bad("alarm"), bad("task"), bad("executor of the loop")])] == [
            5.0
        ] * 3
        assert len(started) == 1
        assert [each.value for each in open_sandbox.call([good(1.0), bad("thread that sleeps"), good(2.0)])] == [
            1.0,
            5.0,
            2.0,
        ]
        assert open_sandbox.call([bad("thread that sleeps")])[0].value == 5.0
        assert open_sandbox.call([good(3.0)])[0].value == 3.0
    assert len(started) == 3


def test_a_worker_is_replaced_before_it_has_used_up_its_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the kernel's, for a worker whose parent no longer keeps the time."""
    started = workers_started(monkeypatch)
    monkeypatch.setattr(launch, "_RENEWAL_SECONDS", 0.0)
    with sandbox(tmp_path, seconds_per_row=0.2, rows_per_batch=1) as open_sandbox:
        assert [each.value for each in open_sandbox.call([bad("patient 1")] * 5)] == [1.0] * 5
        assert 2 <= len(started) <= 5
        orders = started[0]._launch.orders
    assert 30 < json.loads(orders[8:])["policy"]["cpu_seconds"] <= 31 * (os.cpu_count() or 1) + 1


def test_no_deed_is_forgotten() -> None:
    assert set(sandbox_hostile.DEEDS) == set(DEEDS) | {"recursion without limit", "patch", "hoard", "forged nan"}


def test_a_stack_that_grows_without_limit_ends_its_worker_or_its_memory(tmp_path: Path) -> None:
    with sandbox(tmp_path, seconds_per_row=20.0, memory_mb=256) as open_sandbox:
        first, spoiled, last = open_sandbox.call([good(1.0), bad("recursion without limit"), good(2.0)])
    assert spoiled.kind in {"killed", "memory", "exception"}, spoiled
    assert (first.value, last.value) == (1.0, 2.0)


def test_a_function_can_lie_about_its_own_rewards_and_nothing_else(tmp_path: Path) -> None:
    """It has replaced the code of its worker: the scores may be anything, but they are scores, and all are there."""
    with sandbox(tmp_path) as open_sandbox:
        outcomes = open_sandbox.call([good(1.0), bad("patch"), good(2.0), good(3.0)])
        assert len(outcomes) == 4
        assert {each.kind for each in outcomes} <= {"ok", "exception", "invalid", "killed", "timeout"}
    with sandbox(tmp_path) as other_sandbox:
        assert [each.value for each in other_sandbox.call([good(1.0), good(2.0)])] == [1.0, 2.0]


def test_a_perfect_forgery_is_held_to_the_rules_of_values(tmp_path: Path) -> None:
    """It speaks for another call of the same function, and may cost one its answer: these are its own rewards."""
    with sandbox(tmp_path) as open_sandbox:
        outcomes = open_sandbox.call([good(1.0), bad("forged nan"), good(2.0)])
        assert [each.kind for each in open_sandbox.call([good(3.0)])] == ["ok"]
    assert outcomes[0].kind == "invalid"
    assert "returned nan" in str(outcomes[0].error)
    assert len(outcomes) == 3
    assert {each.kind for each in outcomes} <= {"ok", "invalid", "timeout"}


def test_memory_of_earlier_calls_is_not_held_against_a_later_one(tmp_path: Path) -> None:
    """Forty MiB per call stay behind, and a worker has 256: workers are replaced, no call fails."""
    with sandbox(tmp_path, memory_mb=256, seconds_per_row=10.0) as open_sandbox:
        assert [each.kind for each in open_sandbox.call([bad("hoard")] * 8)] == ["ok"] * 8


def test_prints_are_kept_apart_and_bounded(tmp_path: Path) -> None:
    with sandbox(tmp_path) as open_sandbox:
        assert [each.value for each in open_sandbox.call([bad("print"), bad("garbage on stdout"), good(1.0)])] == [
            5.0,
            5.0,
            1,
        ]
        assert 0 < len(open_sandbox.printed) <= worker_process.PRINTED_BYTES


def test_a_failing_call_costs_one_more_worker_than_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = workers_started(monkeypatch)
    calls = [good(float(number)) for number in range(30)]
    calls[17] = bad("hard exit")
    with sandbox(tmp_path) as open_sandbox:
        outcomes = open_sandbox.call(calls)
    assert [each.value for each in outcomes] == [None if n == 17 else float(n) for n in range(30)]
    # The first dies with the batch, the second answers up to the culprit and dies, the third shows it to be the
    # culprit, and the fourth answers the rest.
    assert len(started) == 4


AT_IMPORT = [
    ("raises", "raise ValueError('at import')", "exception", "ValueError: at import (raises.py, line 1)", 1),
    ("exits", "import sys; sys.exit('bye')", "exception", "SystemExit: bye", 1),
    ("dies", "import os; os._exit(7)", "killed", "exit status 7", 2),
    ("pretends", "import os; os._exit(97)", "killed", "exit status 97", 2),
    ("hangs", "while True: pass", "timeout", "longer than 0.5 s", 2),
    ("broken", "def f(:", "exception", "SyntaxError", 1),
    ("lies", "import os\nfor n in range(64, 1024):\n  try: os.write(n, bytes(99))\n  except OSError: pass\n"
     "def f(**_): return 1", "invalid", "do not say what the function is", 2),
]  # fmt: skip
"""Name, text, kind of every outcome, words of its reason, and how many workers are started at most."""


@pytest.mark.parametrize(
    ("name", "body", "kind", "words", "most"),
    mostly_slow_cases(AT_IMPORT, *(case for case in AT_IMPORT if case[0] in ("raises", "dies", "lies"))),
)
def test_a_worker_that_dies_at_import_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str, kind: str, words: str, most: int
) -> None:
    started = workers_started(monkeypatch)
    path = tmp_path / f"{name}.py"
    path.write_text(body)
    limits = SandboxLimits(start_seconds=0.5 if name == "hangs" else 30, rows_per_batch=2)
    with Sandbox(FunctionSource(str(path), "f"), limits) as open_sandbox:
        outcomes = open_sandbox.call([good(1.0)] * 9)
    assert [each.kind for each in outcomes] == [kind] * 9, name
    assert {each.error for each in outcomes} == {outcomes[0].error}
    assert words in str(outcomes[0].error)
    assert str(outcomes[0].error).startswith("`f` cannot be loaded: ")
    assert len(started) == most, name
