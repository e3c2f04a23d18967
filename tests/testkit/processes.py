"""Other processes: the command line, and workers that a test starts, holds at a gate and kills."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-c", "from lake.cli import main; main()"]
WORKER = [sys.executable, str(TESTS / "testkit" / "lake_worker.py")]
_TIMEOUT = 120


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: the checkout and the testkit importable, nothing of ours configured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAJLAKE_")}
    return kept | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))} | more


def trajlake(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=_TIMEOUT,
        check=False,
        env=environment(),
        **options,
    )


class Worker:
    """A process running a command of `testkit.lake_worker`; it works once `go` is called.

    Args:
        args: the command and its arguments.
    """

    def __init__(self, *args: str | Path | int) -> None:
        self.process = subprocess.Popen(
            [*WORKER, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def wait_until_ready(self) -> None:
        """Return when it has imported everything and waits at the gate."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", self.process.communicate(timeout=_TIMEOUT)[1]

    def go(self) -> None:
        """Open the gate once."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    @property
    def running(self) -> bool:
        """Whether it is still at work."""
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.communicate(timeout=_TIMEOUT)

    def finish(self) -> str:
        """Wait for a clean end and return what it printed."""
        out, err = self.process.communicate(timeout=_TIMEOUT)
        assert self.process.returncode == 0, err
        return out


def at_the_gate(*workers: Worker) -> None:
    """Let workers start at the same moment."""
    for worker in workers:
        worker.wait_until_ready()
    for worker in workers:
        worker.go()
