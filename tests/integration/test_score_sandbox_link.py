"""A worker that is no worker: no matter what a process sends, prints or leaves undone, the parent ends it in good
order."""

import dataclasses
import sys
import textwrap
from pathlib import Path

import pytest

from lake.errors import SandboxUnavailableError
from lake.locked import isolation
from pipelines.score.sandbox import frames
from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import Launch, prepare_launch
from pipelines.score.sandbox.worker_process import PRINTED_BYTES, Death, Worker

PREFACE = """
import os, struct, sys, time
def read(n):
    found = b""
    while len(found) < n:
        part = os.read(0, n - len(found))
        if not part: sys.exit(0)
        found += part
    return found
def request():
    sequence, count, length = struct.unpack("=QII", read(16))
    read(4 * count + length)
    return sequence, count
def reply(sequence, first, count, body, length=None):
    head = struct.pack("=QIII", sequence, first, count, len(body) if length is None else length)
    os.write(1, head + body)
def one(value=b"\\xcb" + struct.pack(">d", 1.0)):
    return b"\\x94\\xa2ok" + value + b"\\xc0\\xcb" + bytes(8)
def rows(*each):
    return b"\\xdc" + struct.pack(">H", len(each)) + b"".join(each)
sequence, _ = request()
reply(sequence, 0, 0, b"")
"""
HELLO = "reply(sequence, 0, 0, b'{}')\nsequence, count = request()\n"


def worker(code: str, **limits: float) -> Worker:
    """A process that runs this instead of the worker's code, with no lock and no orders to lock."""
    limits_used = SandboxLimits(**{"seconds_per_row": 0.5, "start_seconds": 20.0, **limits})  # type: ignore[arg-type]
    command = (sys.executable, "-c", PREFACE + textwrap.dedent(code))
    return Worker(Launch("none", command, {}, b"", FunctionSource("f.py", "f"), limits_used))


def ask(code: str, calls: int = 3) -> tuple[list[object], Death | None]:
    """What the parent makes of a process that says hello and then runs the code."""
    process = worker(HELLO + code)
    try:
        assert process.start() is None
        outcomes, death = process.ask([b"{}"] * calls)
        return [outcome.value for outcome in outcomes], death
    finally:
        process.close()


def test_an_honest_process_is_understood_whole_or_in_parts() -> None:
    assert ask("reply(sequence, 0, 3, rows(one(), one(), one())); request()") == ([1.0] * 3, None)
    assert ask("reply(sequence, 0, 1, rows(one())); reply(sequence, 1, 2, rows(one(), one())); request()") == (
        [1.0] * 3,
        None,
    )


@pytest.mark.parametrize(
    ("code", "answered", "kind", "words"),
    [
        ("os.write(1, b'hello world, I am a reward function'); request()", 0, "invalid", "do not answer the request"),
        ("os.write(1, os.urandom(1 << 20)); request()", 0, "invalid", "do not answer the request"),
        ("reply(sequence + 1, 0, 3, rows(one(), one(), one())); request()", 0, "invalid", "do not answer"),
        ("reply(sequence, 0, 4, rows(*[one()] * 4)); request()", 0, "invalid", "do not answer the request"),
        ("reply(sequence, 0, 2, rows(one())); request()", 0, "invalid", "1 outcomes where it said 2"),
        (
            "reply(sequence, 0, 1, rows(one())); reply(sequence, 0, 1, rows(one())); request()",
            1,
            "invalid",
            "do not answer",
        ),
        ("reply(sequence, 0, 3, b'', 1 << 31); request()", 0, "invalid", "announced a reply of 2,147,483,648 bytes"),
        ("reply(sequence, 0, 3, b'\\xdc', 5000); request()", 0, "timeout", "longer than 0.5 s"),
        ("reply(sequence, 0, 3, rows(one(), one(), one())[:-3], 72); request()", 0, "timeout", "longer than 0.5 s"),
        (
            "reply(sequence, 0, 3, rows(one(), one(), one()), 46); request()",
            0,
            "invalid",
            "not send a list of outcomes",
        ),
        ("reply(sequence, 0, 3, b'\\x91' * 100_000); request()", 0, "invalid", "not send a list of outcomes"),
        ("reply(sequence, 0, 1, rows(one())); sys.exit(5)", 1, "killed", "exit status 5"),
        ("print('oh no', file=sys.stderr); sys.exit(6)", 0, "killed", "exit status 6; it last printed: oh no"),
        ("os.kill(os.getpid(), 9)", 0, "memory", "the system killed"),
        ("os.kill(os.getpid(), 11)", 0, "killed", "SIGSEGV"),
        ("os.close(1); time.sleep(60)", 0, "killed", "closed its worker's connection"),
        ("os.close(0); time.sleep(60)", 0, "timeout", "longer than 0.5 s"),
        ("time.sleep(60)", 0, "timeout", "longer than 0.5 s"),
        ("os.fork(); time.sleep(60)", 0, "timeout", "longer than 0.5 s"),
    ],
)
def test_a_process_that_breaks_the_rules_is_ended(code: str, answered: int, kind: str, words: str) -> None:
    values, death = ask(code)
    assert values == [1.0] * answered
    assert death is not None
    assert death.kind == kind
    assert words in death.reason


def test_a_drip_of_bytes_does_not_stop_the_clock() -> None:
    """A frame that never ends is no progress."""
    _, death = ask("for n in range(1000): os.write(1, b'x'[:n > 20] or b'x'); time.sleep(0.05)")
    assert death is not None
    assert death.kind in {"timeout", "invalid"}
    header = "os.write(1, struct.pack('=QIII', sequence, 0, 3, 4000))\n"
    assert ask(header + "while True: os.write(1, b'x'); time.sleep(0.01)")[1] == Death(
        "timeout", "it took longer than 0.5 s"
    )


def test_a_process_may_print_without_end_and_still_answer() -> None:
    process = worker(HELLO + "os.write(2, b'y' * 5_000_000); reply(sequence, 0, 1, rows(one())); request()")
    assert process.start() is None
    outcomes, death = process.ask([b"{}"])
    process.close()
    assert death is None
    assert outcomes[0].value == 1.0
    assert process.printed == b"y" * PRINTED_BYTES


def test_a_reply_that_comes_before_the_request_was_read_ends_it() -> None:
    """Else the rest of one request would be read as the next."""
    code = "sequence, count, _ = struct.unpack('=QII', read(16)); reply(sequence, 0, 3, rows(one(), one(), one()))"
    process = worker("reply(sequence, 0, 0, b'{}')\n" + code + "; time.sleep(60)")
    assert process.start() is None
    _, death = process.ask([b'{"a": "' + b"x" * 3_000_000 + b'"}'] * 3)
    process.close()
    assert isinstance(death, Death)
    assert death.kind == "invalid"
    assert "had not read" in str(death)


def test_threads_are_counted_also_while_it_prints() -> None:
    code = """
import threading
threading.stack_size(64 << 10)
for _ in range(40):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
while True:
    os.write(2, b"busy" * 1000)
"""
    process = worker(HELLO + code, seconds_per_row=30.0, max_threads=20)
    assert process.start() is None
    _, death = process.ask([b"{}"])
    assert death is not None
    assert death.kind == "killed"
    assert death.reason.endswith("threads; it may have 20 (max_threads)")


def test_bytes_that_nobody_asked_for_end_it() -> None:
    """They may arrive with the reply, or later; then they are found when the next request is made or answered."""
    code = "reply(sequence, 0, 1, rows(one())); os.write(1, b'more' * 10); request(); request()"
    process = worker(HELLO + code)
    assert process.start() is None
    first, _ = process.ask([b"{}"])
    _, death = process.ask([b"{}"])
    process.close()
    assert first[0].value == 1.0
    assert death is not None
    assert death.kind == "invalid"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("reply(sequence, 0, 0, b'[]'); request()", "invalid", "did not say what the function is"),
        ('reply(sequence, 0, 0, b\'{"mode": "other"}\'); request()', "invalid", "did not say what the function is"),
        ("reply(sequence, 0, 0, b'', 1 << 31); request()", "invalid", "do not say what the function is"),
        ("reply(sequence, 1, 1, b'{}'); request()", "invalid", "do not say what the function is"),
        ("os.write(1, bytes(1000)); request()", "invalid", "do not say what the function is"),
        ("sys.exit(3)", "killed", "exit status 3"),
    ],
)
def test_a_process_that_does_not_say_hello_is_ended(code: str, kind: str, words: str) -> None:
    process = worker(code)
    death = process.start()
    assert death is not None
    assert death.kind == kind
    assert words in death.reason


def test_a_request_larger_than_any_pipe_arrives() -> None:
    code = "reply(sequence, 0, count, rows(*[one()] * count)); request()"
    process = worker(HELLO + code, seconds_per_row=20.0)
    assert process.start() is None
    outcomes, death = process.ask([b'{"a": "' + b"x" * 3_000_000 + b'"}'] * 4)
    process.close()
    assert death is None
    assert len(outcomes) == 4


def test_a_process_that_cannot_be_locked_in_is_an_error_not_an_outcome(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text("def f(**_): return 1.0")
    launch = prepare_launch(FunctionSource(str(path), "f"), SandboxLimits(min_level="none"))
    policy = isolation.LockPolicy(read=("/no/such/place",))
    broken = dataclasses.replace(launch, orders=isolation.encode_orders("pipelines.score.sandbox.worker", policy, {}))
    with pytest.raises(SandboxUnavailableError, match=r"landlock.*no user code was"):
        Worker(broken).start()


def test_a_request_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    calls = [b"", b"{}", b"\x80", bytes(range(256)) * 300]
    file = tmp_path / "request"
    file.write_bytes(frames.pack_request(2**64 - 1, calls) + b"rest")
    with file.open("rb") as opened:
        sequence, request = frames.read_request(opened.fileno())
        assert sequence == 2**64 - 1
        assert [bytes(call) for call in request] == calls
        assert opened.read() == b"rest"
        with pytest.raises(EOFError):
            frames.read_exactly(opened.fileno(), 1)
