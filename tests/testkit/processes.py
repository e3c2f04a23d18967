"""Other processes: workers that a test starts, holds at a gate, stops and kills."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-c", "from lake.cli import main; main()"]
TIMEOUT = 120


def environment(**settings: str) -> dict[str, str]:
    """The environment of a child: the checkout and the testkit importable, nothing of ours but what all tests have."""
    ours = {name for name in os.environ if name.startswith("TRAJLAKE_")} - {"TRAJLAKE_CACHE", "TRAJLAKE_GROUP_COMMIT"}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return inherited | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))} | settings


class _Server:
    """The process that forks workers (`testkit.worker_server`); it ends when this one does, with all its workers."""

    def __init__(self, module: str) -> None:
        self._connection, far = socket.socketpair()
        self._lock = threading.Lock()
        program = [sys.executable, "-m", "testkit.worker_server", module, str(far.fileno())]
        # In its own session: Ctrl-C is for the test, which then closes the socket.
        self._process = subprocess.Popen(
            program,
            env=environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        self._answers = self._connection.makefile("r")

    def ask(self, descriptors: list[int] | None = None, **request: Any) -> Any:
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors or [])
            return json.loads(self._answers.readline())

    def close(self) -> None:
        self._answers.close()
        self._connection.close()
        self._process.wait(TIMEOUT)


@cache
def fork_server(module: str) -> _Server:
    """The server that forks processes of a module's `main`; one for each module, while this process lives."""
    server = _Server(module)
    atexit.register(server.close)
    return server


class Worker:
    """A process running a command of `testkit.lake_worker`; it works once `go` is called.

    Args:
        args: the command and its arguments.
        faults: what happens to it next to its commits: `testkit.lake_worker.Fault`s, separated by semicolons.
    """

    def __init__(self, *args: str | Path | int, faults: str = "") -> None:
        self._begin("testkit.lake_worker", [faults, *map(str, args)])

    def _begin(self, module: str, args: list[str]) -> None:
        """Start `main(args)` of a module."""
        self._server = fork_server(module)
        theirs_in, self._stdin = os.pipe()
        self._stdout, theirs_out = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        descriptors = [theirs_in, theirs_out, self._stderr.fileno()]
        self.pid: int = self._server.ask(descriptors, run=args)
        os.close(theirs_in)
        os.close(theirs_out)
        self._status: int | None = None
        self._heard = b""

    def hear(self, timeout: float = TIMEOUT) -> str | None:
        """The next line it prints; None if it ended."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                msg = f"worker {self.pid} said nothing for {timeout} s: {self.error}"
                raise TimeoutError(msg)
            data = os.read(self._stdout, 1 << 16)
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def wait_until_ready(self) -> None:
        """Return when it waits at the gate."""
        line = self.hear()
        assert line == "ready", f"{line}: {self.error}"

    def go(self) -> None:
        """Open the gate once."""
        os.write(self._stdin, b"go\n")

    @property
    def running(self) -> bool:
        """Whether it is still at work, or stopped."""
        if self._status is None:
            self._status = self._server.ask(wait=self.pid, block=False)
        return self._status is None

    @property
    def error(self) -> str:
        """What it wrote to stderr so far."""
        # Both ends share the file's position; reading at a place of our own does not move it.
        return os.pread(self._stderr.fileno(), 1 << 20, 0).decode(errors="backslashreplace")

    def stop(self) -> None:
        """SIGSTOP: not one more instruction until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> bool:
        """SIGKILL, unless it has ended, and wait for the end; whether it was killed."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            self._status = self._server.ask(wait=self.pid, block=True)
        return self._status == -signal.SIGKILL

    def wait(self) -> int:
        """Wait for its end; the exit status, or minus the signal that killed it."""
        while self.hear() is not None:
            pass
        if self._status is None:
            self._status = self._server.ask(wait=self.pid, block=True)
        return self._status

    def finish(self, timeout: float = TIMEOUT) -> str:
        """Wait for a clean end and return what it printed; it may say nothing for `timeout` seconds at most."""
        lines = []
        while (line := self.hear(timeout)) is not None:
            lines.append(line)
        assert self.wait() == 0, self.error
        return "\n".join(lines)

    def __del__(self) -> None:
        for descriptor in (self._stdin, self._stdout):
            os.close(descriptor)
        self._stderr.close()


class Forked(Worker):
    """A process that runs `main(args)` of a module of the testkit, which a server has imported already.

    Args:
        module: testkit.collect_worker, say.
        args: of its `main`.
    """

    def __init__(self, module: str, *args: str | Path | int) -> None:
        self._begin(module, list(map(str, args)))


def at_the_gate(*workers: Worker) -> None:
    """Let workers start at the same moment."""
    for worker in workers:
        worker.wait_until_ready()
    for worker in workers:
        worker.go()


def kill_when(
    process: "subprocess.Popen[str]", happened: Callable[[], bool], never: str, seconds: float = TIMEOUT
) -> None:
    """SIGKILL a process as soon as something has happened, and wait for its end.

    Args:
        process: in its own session, with its stderr in a pipe.
        happened: asked again and again.
        never: what to say if it does not happen: "nothing was committed".
        seconds: how long it may take.

    An AssertionError says so, with what the process wrote to stderr, if it takes longer or the process ends alone;
    all of its session is killed then.
    """
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, f"{never} before its end: {_last_words(process)}"
        assert time.monotonic() < deadline, f"{never} within {seconds:g} s: {_last_words(process)}"
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL, f"it ended before it could be killed: {_last_words(process)}"


def _last_words(process: "subprocess.Popen[str]") -> str:
    """Kill the session of a process; its exit status, and what it wrote to stderr."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, error = process.communicate()
    return f"exit status {process.returncode}, {error[-4000:]}"
