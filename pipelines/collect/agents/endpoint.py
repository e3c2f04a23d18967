"""The recording proxy as a child of this process: `trajlake record` on a free port of 127.0.0.1, before one engine.

It drops what it has not finished when it dies: whoever collects plays those rollouts anew, under the same names. What
was ended is in its spool, and the next one delivers it.
"""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from lake.errors import LakeAccessError, UsageError
from lake.live.delivery import Delivery
from lake.live.owners import open_owned, owner_at
from lake.live.places import LOCK, proxy_root
from lake.live.spool import Spool
from pipelines.collect.children import guarded
from pipelines.collect.engines import EngineError
from pipelines.collect.engines.http import reached

_MAIN = "from lake.cli import main; main()"
_PORT = 0
_UPSTREAM = "TRAJLAKE_RECORD_UPSTREAM"
"""`--upstream` of `trajlake record`: a password in it is in no list of processes."""
_NEVER = 1e9
"""Seconds after which an episode is idle: its agent may think for as long as its manager lets it."""
_STARTING_SECONDS, _ENDING_SECONDS = 120.0, 90.0
_DYING_SECONDS = 30.0
_TAIL = 20
"""Lines of what a proxy said last."""
_log = logging.getLogger("trajlake")


class Endpoint:
    """A proxy before one engine.

    Args:
        upstream: base URL of the engine.
        lake_uri: the lake that is recorded into.
        spool: folder for what is not yet in the lake; those of one run share it.
        call_seconds: how long the engine may be silent.
        logprobs_mode: as the engine was started with, where it does not say.
    """

    def __init__(
        self, upstream: str, *, lake_uri: str, spool: Path, call_seconds: float, logprobs_mode: str | None = None
    ) -> None:
        self.upstream = upstream
        self.name, _ = reached(upstream)
        self.in_flight = 0
        self._base: str | None = None
        self._is_heard = threading.Event()
        self._said: deque[str] = deque(maxlen=_TAIL)
        options = {"lake": lake_uri, "port": _PORT, "spool": spool, "unfinished": "drop"}
        options |= {"idle": _NEVER, "timeout": call_seconds}
        if logprobs_mode is not None:
            options["logprobs-mode"] = logprobs_mode
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        # In a session of its own: Ctrl-C is for its parent, which ends it when its rollouts have ended.
        self._process = subprocess.Popen(
            guarded([sys.executable, "-c", _MAIN, "record", *words], leaving=_ENDING_SECONDS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
            env=os.environ | {_UPSTREAM: upstream},
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._listeners = [
            threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._warn, args=(self._process.stderr,), daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """How it ended: its exit status (of a signal, 128 and its number), and what it said last."""
        return f"with exit status {self._process.poll()}: {' '.join(self._said) or 'it said nothing'}"

    def base(self) -> str:
        """Its address, without /v1; waits until it listens.

        Raises:
            EngineError: it ended, or did not begin to listen; says what it said last.
        """
        self._is_heard.wait(_STARTING_SECONDS)
        if self._base is None:
            self.close()
            said = " ".join(self._said) or f"it said nothing for {_STARTING_SECONDS:.0f} s"
            raise EngineError(f"the recording proxy before {self.name} does not run: {said}")
        return self._base

    def close(self) -> None:
        """End it, with all that has ended in the lake, or else in its spool."""
        self._process.terminate()
        try:
            self._process.wait(2 * _ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for listener in self._listeners:
            listener.join()

    def _hear(self, pipe: IO[str]) -> None:
        """Take its address from its first line; what else it says is of interest to who looks closer."""
        with pipe:
            for line in pipe:
                words = line.split()
                if self._base is None and words[:1] == ["recording"]:
                    self._base = words[1].removesuffix("/v1")
                    self._is_heard.set()
                else:
                    _log.info("%s: %s", self.name, line.strip())
        self._is_heard.set()

    def _warn(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._said.append(line.strip())
                _log.warning("%s: %s", self.name, line.strip())


def deliver_left(lake_uri: str, spool: Path) -> None:
    """Have all that proxies ended before they died in the lake.

    Raises:
        UsageError: one of them is alive: another process collects into the same spool.
        LakeAccessError: the lake or the spool cannot be reached.
    """
    root = proxy_root(lake_uri, _PORT, spool)
    if not root.is_dir():
        return
    _wait_for_the_dying(root)
    owner = owner_at(lake_uri)
    own = Spool.create(root, owner=owner)
    delivery = Delivery(lambda: open_owned(owner, lake_uri), own, root=root, unfinished="drop")
    delivery.start()
    is_all = delivery.flush()
    delivery.close()
    own.close(remove=True)
    if not is_all:
        raise LakeAccessError(f"what was recorded before is still in {root}: {delivery.counts.problem}")


def _wait_for_the_dying(root: Path) -> None:
    """Wait until no proxy holds a spool: one that is killed with its parent may live for some milliseconds longer."""
    deadline = time.monotonic() + _DYING_SECONDS
    for folder in (path for path in root.iterdir() if path.is_dir()):
        with (folder / LOCK).open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise UsageError(
                            f"another process records agents into {root} (process {os.getpid()} waited for it); let it "
                            "end, or name another run"
                        ) from error
                    time.sleep(0.02)
