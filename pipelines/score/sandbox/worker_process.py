"""One worker process, seen from the parent: start it, ask it, and end it at the first sign of trouble.

The parent keeps the time, counts the worker's threads, limits the size of replies, and stores the end of its prints. It
kills and replaces a worker in trouble.

When a worker dies, its unanswered calls are repeated one at a time. A call gets the blame only if a new worker died of
it alone, or if it exceeded its own time. So it does not pay for a leak of a hundred earlier calls. The price is one
more death than there are failing calls; halving the batch would cost the logarithm of its size.

The parent does not trust replies. A function runs in the worker's process and can write anything to the parent. So a
reply must match its request: the sequence, the index and number of outcomes, and the size. Its values must be plain
JSON data with finite numbers. Any violation ends the worker.
"""

import fcntl
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from lake.errors import SandboxUnavailableError
from lake.locked import isolation
from lake.locked.isolation import ChildPipes
from pipelines.score.sandbox import frames
from pipelines.score.sandbox.contract import CallOutcome, Mode, OutcomeKind
from pipelines.score.sandbox.launch import Launch

DEPTH = 64
"""Maximum nesting of lists and dicts in a result."""
ITEMS = 1_000_000
"""Maximum number of values in a result."""
_KINDS = frozenset(("ok", "exception", "memory", "invalid"))
"""Kinds that a worker may report; only the parent detects the others."""
_SCALARS = frozenset((bool, int, str))
_CONTROLS = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {ord("\t"), ord("\n")}
_SPELLED_OUT = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}


class ForgedReplyError(ValueError):
    """A worker sent a reply that does not match its request."""


class UnusableValueError(ValueError):
    """A function returned data that cannot be a score."""


class FunctionSignature(msgspec.Struct, frozen=True):
    """A worker's description of its function: the reply to its orders."""

    mode: Mode = "pointwise"
    is_async: bool = False
    parameters: list[str] = []
    accepts_any: bool = False
    requires_network: bool = False
    declared: dict[str, Any] = {}
    kind: OutcomeKind = "ok"
    error: str | None = None


_decode_signature = msgspec.json.Decoder(FunctionSignature)
_decode_outcomes = msgspec.msgpack.Decoder(list[tuple[str, Any, str | None, float]])


def spell_controls(text: str) -> str:
    """Return a function's text with its control characters spelled out, because they could command a terminal."""
    return text.translate(_SPELLED_OUT)


def read_signature(body: bytes) -> FunctionSignature:
    """Decode the reply to a worker's orders; ForgedReplyError if it is invalid."""
    try:
        signature = _decode_signature.decode(body)
        _require_plain(signature.declared)
    except (msgspec.MsgspecError, RecursionError, UnusableValueError) as error:
        msg = f"its worker did not say what the function is: {error}"
        raise ForgedReplyError(msg) from None
    return signature


def read_reply_header(header: bytes, sequence: int, first: int, most: int) -> tuple[int, int, bool]:
    """Return the number of outcomes and bytes after a reply's header, and whether the worker is worn out after them.

    `first` is the index of the first of the `most` calls without an outcome. ForgedReplyError if the reply does not
    match the request, or is longer than allowed.
    """
    answered, index, count, length = frames.REPLY.unpack(header)
    worn, count = bool(count & frames.WORN), count & ~frames.WORN
    if answered != sequence or index != first or not 1 <= count <= most:
        msg = "its worker sent bytes that do not answer the request"
        raise ForgedReplyError(msg)
    if length > frames.REPLY_BYTES:
        msg = f"its worker announced a reply of {length:,} bytes; valid: at most {frames.REPLY_BYTES:,}"
        raise ForgedReplyError(msg)
    return count, length, worn


def read_hello_header(header: bytes, sequence: int) -> int:
    """Return the size of the reply to a worker's orders; ForgedReplyError if the header is invalid or too long."""
    answered, index, count, length = frames.REPLY.unpack(header)
    if answered != sequence or index or count or length > frames.REPLY_BYTES:
        msg = "its worker sent bytes that do not say what the function is"
        raise ForgedReplyError(msg)
    return int(length)


def read_outcomes(body: bytes | bytearray, count: int, mode: Mode) -> list[CallOutcome]:
    """Decode the outcomes of a reply; ForgedReplyError if the bytes are invalid, or the number is wrong."""
    try:
        rows = _decode_outcomes.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        msg = f"its worker did not send a list of outcomes: {error}"
        raise ForgedReplyError(msg) from None
    if len(rows) != count:
        msg = f"its worker sent {len(rows)} outcomes where it said {count}"
        raise ForgedReplyError(msg)
    return [_read_outcome(*row, mode) for row in rows]


def _read_outcome(kind: str, returned: Any, error: str | None, seconds: float, mode: Mode) -> CallOutcome:
    seconds = seconds if isfinite(seconds) and seconds >= 0 else 0.0
    if kind == "ok" and error is None:
        if type(returned) is float and mode == "pointwise" and isfinite(returned):
            return CallOutcome(returned, None, "ok", seconds)
        try:
            _require_plain(returned)
        except UnusableValueError as reason:
            return CallOutcome(None, f"it returned {reason}", "invalid", seconds)
        if mode == "pointwise" or type(returned) is list:
            return CallOutcome(returned, None, "ok", seconds)
    elif kind in _KINDS and returned is None and error is not None and len(error) <= 2 * frames.TEXT:
        return CallOutcome(None, spell_controls(error), kind, seconds)  # type: ignore[arg-type]
    msg = "its worker sent an outcome that contradicts itself"
    raise ForgedReplyError(msg)


def _require_plain(document: Any) -> None:
    """Check a document without recursion: an attacker chooses its depth."""
    stack: list[tuple[Any, Any, int]] = [(document, None, 0)]
    total = 0
    while stack:
        node, key, depth = stack.pop()
        kind = type(node)
        if kind is float:
            if not isfinite(node):
                label = f" as {key!r:.100}" if key is not None else ""
                msg = f"{node}{label}; valid: a finite number"
                raise UnusableValueError(msg)
        elif kind is dict or kind is list:
            total += len(node)
            if depth == DEPTH or total > ITEMS:
                msg = f"data nested deeper than {DEPTH} levels, or of more than {ITEMS:,} values"
                raise UnusableValueError(msg)
            pairs = node.items() if kind is dict else enumerate(node)
            stack += [(inner, name, depth + 1) for name, inner in pairs]
            if kind is dict and not all(type(name) is str for name in node):
                msg = "a dict with keys that are not text"
                raise UnusableValueError(msg)
        elif node is not None and kind not in _SCALARS:
            msg = f"{kind.__name__}, which is not JSON data"
            raise UnusableValueError(msg)


PRINTED_BYTES = 8192
"""Size of the stored end of a worker's prints."""
_GRACE = 0.25
"""Seconds added to a call's own: until the worker reports its start, and until the parent reads its reply."""
_WATCH_SECONDS = 0.1
"""Interval at which a busy worker's threads are counted."""
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


@dataclass(frozen=True)
class Death:
    """Why a worker was killed, or how it died."""

    kind: OutcomeKind
    reason: str


class _DeadError(Exception):
    def __init__(self, kind: OutcomeKind, reason: str) -> None:
        super().__init__(reason)
        self.death = Death(kind, reason)


class Worker:
    """A worker process. `served` counts its outcomes, `printed` is the end of its prints."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.served = 0
        self.printed = bytearray()
        self.signature = FunctionSignature()
        self._closed = False
        self._worn = False
        self._start = time.monotonic()
        self._watched_at = time.monotonic()
        self._inbox = bytearray()
        self._process = subprocess.Popen(
            launch.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launch.environment,
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(OSError):
            # A pipe that fits a whole request needs fewer writes.
            fcntl.fcntl(self._process.stdin.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
        self._pipes = ChildPipes(self._process)

    @property
    def is_due(self) -> bool:
        """Whether to replace it before the next request."""
        limits = self._launch.limits
        old = time.monotonic() - self._start >= self._launch.renewal_seconds
        return self._worn or old or self.served >= limits.recycle_rows

    def start(self) -> Death | None:
        """Wait until the function is loaded; return why it is not. SandboxUnavailableError if the lock failed."""
        sequence = secrets.randbits(64)
        limit = self._launch.limits.start_seconds
        locked = False
        try:
            self._post(self._launch.encode_orders(sequence))
            self._read_reply(sequence, limit, 0, 0)
            locked = True
            self.signature = read_signature(self._read_reply(sequence, limit, 0, 0)[1])
            self._require_read()
        except _DeadError as dead:
            self.close()
            if self._process.returncode == isolation.EXIT_NOT_LOCKED and not locked:
                msg = f"{self.printed.decode('utf-8', 'replace').strip()}; no user code was run"
                raise SandboxUnavailableError(msg) from None
            return dead.death
        except ForgedReplyError as error:
            self.close()
            return Death("invalid", str(error))
        if self.signature.error is not None:
            self.close()
            return Death(self.signature.kind, spell_controls(self.signature.error[: frames.TEXT]))
        return None

    def ask(
        self, calls: list[bytes], on_outcomes: Callable[[list[CallOutcome]], None] = lambda _: None
    ) -> tuple[list[CallOutcome], Death | None]:
        """Return outcomes in order; if the worker died, there are fewer than calls, with the reason.

        Without a reason, the worker itself takes no more calls, because one has left a thread behind. `on_outcomes`
        gets the next outcomes as soon as they arrive.
        """
        sequence = secrets.randbits(64)
        mode = self._launch.function.mode
        outcomes: list[CallOutcome] = []
        try:
            self._post(frames.pack_request(sequence, calls))
            while len(outcomes) < len(calls) and not self._worn:
                count, body = self._read_reply(
                    sequence, self._launch.limits.seconds_per_row, len(outcomes), len(calls) - len(outcomes)
                )
                news = read_outcomes(body, count, mode)
                outcomes += news
                on_outcomes(news)
            self._require_read()
        except _DeadError as dead:
            self.close()
            return outcomes, dead.death
        except ForgedReplyError as error:
            self.close()
            return outcomes, Death("invalid", str(error))
        self.served += len(outcomes)
        return outcomes, None

    def kill(self) -> None:
        """End it at once; a caller of `ask` then gets the death. Any thread may call this."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it with its process group, and store the end of its prints."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        self._read_prints()
        self._pipes.close()

    def _post(self, frame: bytes) -> None:
        if self._inbox:
            msg = "its worker sent bytes without a request"
            raise ForgedReplyError(msg)
        self._pipes.post(frame)

    def _require_read(self) -> None:
        if self._pipes.is_unsent and not self._worn:
            msg = "its worker answered a request that it had not read"
            raise ForgedReplyError(msg)

    def _read_reply(self, sequence: int, limit: float, first: int, most: int) -> tuple[int, bytes]:
        """Return the number of outcomes and the body of the next reply; send the rest of the request while waiting."""
        deadline = time.monotonic() + limit + frames.REPORT_SECONDS + _GRACE
        count, length = -1, 0
        while True:
            if count < 0 and len(self._inbox) >= frames.REPLY.size:
                header = bytes(self._inbox[: frames.REPLY.size])
                del self._inbox[: frames.REPLY.size]
                if most:
                    count, length, self._worn = read_reply_header(header, sequence, first, most)
                else:
                    count, length = 0, read_hello_header(header, sequence)
            if count >= 0 and len(self._inbox) >= length:
                body = bytes(self._inbox[:length])
                del self._inbox[:length]
                return count, body
            self._wait(deadline, limit)

    def _wait(self, deadline: float, limit: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise _DeadError("timeout", f"it took longer than {limit:g} s")
        if now >= self._watched_at + _WATCH_SECONDS:
            self._watched_at = now
            # The kernel does not limit the threads of root.
            most = self._launch.limits.max_threads
            if (count := _count_threads(self._process.pid, wrapped=self._launch.level == "bwrap")) > most:
                raise _DeadError("killed", f"it started {count} threads; it may have {most} (max_threads)")
        for stream, chunk in self._pipes.exchange(min(deadline - now, _WATCH_SECONDS)):
            if stream == "stderr":
                self._print(chunk)
            elif not chunk:
                raise _DeadError(*self._describe_end())
            else:
                self._inbox += chunk

    def _print(self, text: bytes) -> None:
        self.printed = (self.printed + text)[-PRINTED_BYTES:]

    def _read_prints(self) -> None:
        self._print(self._pipes.read_available("stderr", _PIPE_BYTES))

    def _describe_end(self) -> tuple[OutcomeKind, str]:
        """Return how the process died, or that it lives without a connection."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "killed", "it closed its worker's connection"
        # Bubblewrap reports a signal as a shell does.
        number = status - 128 if self._launch.level == "bwrap" and status > 128 else -status
        if number == signal.SIGKILL:
            return "memory", "the system killed its process, most likely because memory ran out"
        if number == signal.SIGXCPU:
            return "killed", "it used up the processor time of a worker"
        self._read_prints()
        line = self.printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        last_print = f"; it last printed: {spell_controls(line[:300])}" if line else ""
        if number in set(signal.Signals):
            return "killed", f"its process died of {signal.Signals(number).name}{last_print}"
        return "killed", f"its process ended with exit status {status}{last_print}"


def _count_threads(pid: int, *, wrapped: bool) -> int:
    """Return the threads of a process, or of its children in a namespace; 0 where they cannot be read."""
    count = 0
    with suppress(OSError, ValueError, IndexError):
        count = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[17])
        if wrapped:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            count = max([count, *(_count_threads(int(child), wrapped=True) for child in children)])
    return count


_STARTS = 2
"""Attempts to start a worker whose function neither loads nor reports why."""


class WorkerSlot:
    """A slot for one worker: start it on demand, replace it when worn or dead, and find the failing call."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._worker: Worker | None = None
        self._load_failure: Death | None = None
        self._stopped = False
        self._printed = bytearray()

    @property
    def printed(self) -> bytes:
        """The end of its workers' prints."""
        current = self._worker.printed if self._worker else b""
        return bytes(self._printed + current)[-PRINTED_BYTES:]

    def score(self, calls: list[bytes], outcomes: list[CallOutcome] | None = None) -> list[CallOutcome]:
        """Return one outcome per call (encoded keyword arguments), in order.

        They are added to `outcomes` as they arrive, which another thread may read. SandboxUnavailableError if a worker
        could not be locked in.
        """
        outcomes = [] if outcomes is None else outcomes
        singly = False
        while len(outcomes) < len(calls):
            worker = self._ensure_worker()
            if worker is None:
                assert self._load_failure is not None
                error = f"`{self._launch.function.name}` cannot be loaded: {self._load_failure.reason}"
                failure = CallOutcome(None, error, self._load_failure.kind, 0.0)
                outcomes += [failure] * (len(calls) - len(outcomes))
                break
            last = len(outcomes) + 1 if singly else len(calls)
            before = len(outcomes)
            answered, blame = self._ask(worker, calls[before:last], outcomes)
            outcomes += answered[len(outcomes) - before :]
            if blame is not None:
                outcomes.append(CallOutcome(None, blame.reason, blame.kind, 0.0))
            singly = singly or len(outcomes) < len(calls)
        return outcomes

    def _ask(
        self, worker: Worker, calls: list[bytes], outcomes: list[CallOutcome]
    ) -> tuple[list[CallOutcome], Death | None]:
        """Return the reliable outcomes, in order, and why the next call is to blame, if it is.

        Outcomes before the first one that ran out of memory are added to `outcomes` as they arrive; later ones are not
        reliable.
        """
        fresh = worker.served == 0
        reliable = True

        def add_reliable(news: list[CallOutcome]) -> None:
            nonlocal reliable
            starved = _find_starved(news)
            outcomes.extend(news[:starved] if reliable else ())
            reliable = reliable and starved is None

        answered, death = worker.ask(calls, add_reliable)
        starved = _find_starved(answered)
        if death is not None or starved is not None:
            self.close()
        if starved is not None:
            # Earlier calls may have filled the memory: the outcome only counts for the first call of a worker.
            return answered[: 1 if fresh and starved == 0 else starved], None
        alone = len(calls) == 1 and not answered
        return answered, death if death and alone and (fresh or death.kind == "timeout") else None

    def stop(self) -> None:
        """Reject further calls; any thread may call this."""
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.kill()

    def close(self) -> None:
        """End its worker, and store the end of its prints."""
        if self._worker is not None:
            self._worker.close()
            self._printed = (self._printed + self._worker.printed)[-PRINTED_BYTES:]
            self._worker = None

    def _ensure_worker(self) -> Worker | None:
        """Return a worker with the loaded function; None if the function cannot be loaded."""
        if self._worker is not None and self._worker.is_due:
            self.close()
        for attempt in range(_STARTS):
            if self._stopped:
                msg = "this sandbox is closed"
                raise RuntimeError(msg)
            if self._worker is not None or self._load_failure is not None:
                return self._worker
            self._worker = Worker(self._launch)
            death = self._worker.start()
            if death is not None:
                self.close()
                # An exception repeats in the next worker; a death may be bad luck.
                self._load_failure = death if death.kind == "exception" or attempt == _STARTS - 1 else None
        return self._worker


def _find_starved(outcomes: list[CallOutcome]) -> int | None:
    return next((index for index, outcome in enumerate(outcomes) if outcome.kind == "memory"), None)
