"""One worker process, seen from outside: start it, ask it, and end it at the first sign of trouble.

The parent keeps the time, counts the worker's threads, reads no more than a reply may have, and keeps the end of what
it prints. A worker in trouble is killed and replaced.

When a worker dies, the calls it had not answered are asked again one at a time. A call is blamed only if a fresh worker
died of it alone (or if it ran out of its own time): so a leak of a hundred calls before is not held against it. That
costs one more death than the failing calls themselves, where halving would cost the logarithm of the batch.
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
from pathlib import Path

from lake.errors import SandboxUnavailableError
from lake.locked import isolation
from lake.locked.pipes import ChildPipes
from pipelines.score.sandbox import frames, replies
from pipelines.score.sandbox.contract import Kind, Outcome
from pipelines.score.sandbox.launch import Launch

PRINTED_BYTES = 8192
"""How much of the end of a worker's prints is kept."""
_GRACE = 0.25
"""Seconds beyond a call's own: until the worker says that it began, and until its reply is read."""
_WATCH_SECONDS = 0.1
"""How often a worker's threads are counted while it works."""
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


@dataclass(frozen=True)
class Death:
    """Why a worker was killed, or how it died."""

    kind: Kind
    reason: str


class _DeadError(Exception):
    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.death = Death(kind, reason)


class Worker:
    """A worker process; start it, ask it, close it. `served` counts its answers, `printed` is the end of its prints."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.served = 0
        self.printed = bytearray()
        self.facts = replies.Facts()
        self._closed = False
        self._worn = False
        self._began = time.monotonic()
        self._watched = time.monotonic()
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
            # A pipe that holds a whole request: fewer turns.
            fcntl.fcntl(self._process.stdin.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
        self._pipes = ChildPipes(self._process)

    @property
    def is_due(self) -> bool:
        """Whether it is to be replaced before it is asked again."""
        limits = self._launch.limits
        old = time.monotonic() - self._began >= self._launch.renewal_seconds
        return self._worn or old or self.served >= limits.recycle_rows

    def start(self) -> Death | None:
        """Wait until the function is loaded, or say why it is not; SandboxUnavailableError if it is not locked in."""
        sequence = secrets.randbits(64)
        limit = self._launch.limits.start_seconds
        locked = False
        try:
            self._post(self._launch.orders_for(sequence))
            self._reply(sequence, limit, 0, 0)
            locked = True
            self.facts = replies.facts(self._reply(sequence, limit, 0, 0)[1])
            self._require_read()
        except _DeadError as dead:
            self.close()
            if self._process.returncode == isolation.EXIT_NOT_LOCKED and not locked:
                msg = f"{self.printed.decode('utf-8', 'replace').strip()}; no user code was run"
                raise SandboxUnavailableError(msg) from None
            return dead.death
        except replies.ForgedReplyError as error:
            self.close()
            return Death("invalid", str(error))
        if self.facts.error is not None:
            self.close()
            return Death(self.facts.kind, replies.printable(self.facts.error[: frames.TEXT]))
        return None

    def ask(
        self, calls: list[bytes], heard: Callable[[list[Outcome]], None] = lambda _: None
    ) -> tuple[list[Outcome], Death | None]:
        """Outcomes in order; fewer than calls, and the reason, if the worker did not survive them.

        Without a reason the worker itself wants no more calls, as one has left a thread behind. `heard` is told the
        next outcomes as soon as they are there.
        """
        sequence = secrets.randbits(64)
        mode = self._launch.function.mode
        found: list[Outcome] = []
        try:
            self._post(frames.request(sequence, calls))
            while len(found) < len(calls) and not self._worn:
                count, body = self._reply(
                    sequence, self._launch.limits.seconds_per_row, len(found), len(calls) - len(found)
                )
                outcomes = replies.outcomes(body, count, mode)
                found += outcomes
                heard(outcomes)
            self._require_read()
        except _DeadError as dead:
            self.close()
            return found, dead.death
        except replies.ForgedReplyError as error:
            self.close()
            return found, Death("invalid", str(error))
        self.served += len(found)
        return found, None

    def kill(self) -> None:
        """Make it end at once; whoever asks it notices. May be called from any thread."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, with all that belongs to it, and keep the end of what it printed."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        self._listen_to_the_end()
        self._pipes.close()

    def _post(self, data: bytes) -> None:
        if self._inbox:
            msg = "its worker sent bytes that nobody asked for"
            raise replies.ForgedReplyError(msg)
        self._pipes.post(data)

    def _require_read(self) -> None:
        if self._pipes.is_unsent and not self._worn:
            msg = "its worker answered a request that it had not read"
            raise replies.ForgedReplyError(msg)

    def _reply(self, sequence: int, limit: float, first: int, most: int) -> tuple[int, bytes]:
        """Number of outcomes and body of the next reply; hands the request over meanwhile."""
        deadline = time.monotonic() + limit + frames.REPORT_SECONDS + _GRACE
        count, length = -1, 0
        while True:
            if count < 0 and len(self._inbox) >= frames.REPLY.size:
                count, length = self._opened(sequence, first, most)
            if count >= 0 and len(self._inbox) >= length:
                body = bytes(self._inbox[:length])
                del self._inbox[:length]
                return count, body
            self._wait(deadline, limit)

    def _opened(self, sequence: int, first: int, most: int) -> tuple[int, int]:
        header = bytes(self._inbox[: frames.REPLY.size])
        del self._inbox[: frames.REPLY.size]
        if most:
            count, length, self._worn = replies.body_length(header, sequence, first, most)
            return count, length
        return 0, replies.hello_length(header, sequence)

    def _wait(self, deadline: float, limit: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise _DeadError("timeout", f"it took longer than {limit:g} s")
        if now >= self._watched + _WATCH_SECONDS:
            self._watched = now
            # The kernel does not count the threads of root.
            most = self._launch.limits.max_threads
            if (count := _threads(self._process.pid, wrapped=self._launch.level == "bwrap")) > most:
                raise _DeadError("killed", f"it started {count} threads; it may have {most} (max_threads)")
        for stream, data in self._pipes.turn(min(deadline - now, _WATCH_SECONDS)):
            if stream == "stderr":
                self._print(data)
            elif not data:
                raise _DeadError(*self._end())
            else:
                self._inbox += data

    def _print(self, text: bytes) -> None:
        self.printed = (self.printed + text)[-PRINTED_BYTES:]

    def _listen_to_the_end(self) -> None:
        self._print(self._pipes.rest("stderr", _PIPE_BYTES))

    def _end(self) -> tuple[Kind, str]:
        """How the process died, or that it lives but will not be heard from."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "killed", "it closed its worker's connection"
        # Bubblewrap tells of a signal as a shell does.
        number = status - 128 if self._launch.level == "bwrap" and status > 128 else -status
        if number == signal.SIGKILL:
            return "memory", "its process was killed by the system, most likely for want of memory"
        if number == signal.SIGXCPU:
            return "killed", "it used up the processor time that a worker has"
        if number in set(signal.Signals):
            return "killed", f"its process died of {signal.Signals(number).name}{self._last_line()}"
        return "killed", f"its process ended with exit status {status}{self._last_line()}"

    def _last_line(self) -> str:
        self._listen_to_the_end()
        text = self.printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"; it last printed: {replies.printable(text[:300])}" if text else ""


def _threads(pid: int, *, wrapped: bool) -> int:
    """Threads of a process, or of what it started in its namespace; 0 where that cannot be read."""
    count = 0
    with suppress(OSError, ValueError, IndexError):
        count = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[17])
        if wrapped:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            count = max([count, *(_threads(int(child), wrapped=True) for child in children)])
    return count


_STARTS = 2
"""Attempts to start a worker whose function neither loads nor says why."""


class WorkerSlot:
    """The place of one worker: it is started when needed, replaced when worn or dead, and the failing call is found."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._worker: Worker | None = None
        self._broken: Death | None = None
        self._stopped = False
        self._printed = bytearray()

    @property
    def printed(self) -> bytes:
        """The end of what its workers printed."""
        now = self._worker.printed if self._worker else b""
        return bytes(self._printed + now)[-PRINTED_BYTES:]

    def score(self, calls: list[bytes], found: list[Outcome] | None = None) -> list[Outcome]:
        """One outcome per call (encoded keyword arguments), in order, added to `found`; another thread may look on.

        SandboxUnavailableError if a worker could not be locked in.
        """
        found = [] if found is None else found
        singly = False
        while len(found) < len(calls):
            worker = self._ready()
            if worker is None:
                assert self._broken is not None
                error = f"`{self._launch.function.name}` cannot be loaded: {self._broken.reason}"
                found += [Outcome(None, error, self._broken.kind, 0.0)] * (len(calls) - len(found))
                break
            last = len(found) + 1 if singly else len(calls)
            before = len(found)
            answered, blamed = self._ask(worker, calls[before:last], found)
            found += answered[len(found) - before :]
            if blamed is not None:
                found.append(Outcome(None, blamed.reason, blamed.kind, 0.0))
            singly = singly or len(found) < len(calls)
        return found

    def _ask(self, worker: Worker, calls: list[bytes], found: list[Outcome]) -> tuple[list[Outcome], Death | None]:
        """Outcomes that hold, in order, and why the call after them is to blame, if it is.

        Those up to the first that wanted memory, behind which nothing is sure, are added to `found` as they come.
        """
        fresh = worker.served == 0
        sure = True

        def heard(outcomes: list[Outcome]) -> None:
            nonlocal sure
            starved = _first_starved(outcomes)
            found.extend(outcomes[:starved] if sure else ())
            sure = sure and starved is None

        answered, death = worker.ask(calls, heard)
        starved = _first_starved(answered)
        if death is not None or starved is not None:
            self._retire()
        if starved is not None:
            # What came before may have filled its memory: that counts for the first call of a worker only.
            return answered[: 1 if fresh and starved == 0 else starved], None
        alone = len(calls) == 1 and not answered
        return answered, death if death and alone and (fresh or death.kind == "timeout") else None

    def stop(self) -> None:
        """Let nothing more be asked; may be called from any thread."""
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.kill()

    def close(self) -> None:
        """End its worker."""
        self._retire()

    def _ready(self) -> Worker | None:
        """A worker whose function is loaded; None if it cannot be loaded."""
        if self._worker is not None and self._worker.is_due:
            self._retire()
        for attempt in range(_STARTS):
            if self._stopped:
                msg = "this sandbox is closed"
                raise RuntimeError(msg)
            if self._worker is not None or self._broken is not None:
                return self._worker
            self._worker = Worker(self._launch)
            death = self._worker.start()
            if death is not None:
                self._retire()
                # What it says itself is true of the next one too; a process that died may have had bad luck.
                self._broken = death if death.kind == "exception" or attempt == _STARTS - 1 else None
        return self._worker

    def _retire(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._printed = (self._printed + self._worker.printed)[-PRINTED_BYTES:]
            self._worker = None


def _first_starved(outcomes: list[Outcome]) -> int | None:
    return next((place for place, outcome in enumerate(outcomes) if outcome.kind == "memory"), None)
