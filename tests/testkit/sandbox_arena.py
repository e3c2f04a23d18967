"""All attacks of `sandbox_attacks`, first in an open process and then in the sandbox; prints what came of them.

    python sandbox_arena.py FOLDER LEVEL

A separate program, so that it can run as another user: the one that starts it is the user who is attacked.
"""

import ctypes
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.pool import Sandbox
from testkit import sandbox_attacks

SECRET = "TRAJLAKE_SECRET"
KILLERS = ("kill parent", "signal by a pipe")


class Arena:
    """Targets of attacks: files, listeners, this process, and another one of the same user."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        rewards = folder / "rewards"
        rewards.mkdir()
        self.path = Path(shutil.copy(sandbox_attacks.__file__, rewards / "attacks.py"))
        self.code = self.path.read_bytes()
        (folder / "secret").write_text("secret")
        (folder / "doomed").touch()
        (rewards / ".env").write_text("KEY=secret")
        (rewards / "link").symlink_to(folder / "secret")
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = listener.getsockname()[1]
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", self.port))
        for address in (f"{folder}/unix", f"\0trajlake-{self.port}"):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(address)
            unix.listen()
        self.memory = ctypes.create_string_buffer(b"secret")
        self.victim = self._new_victim()

    @staticmethod
    def _new_victim() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def arguments_of(self, name: str) -> dict[str, Any]:
        """Arguments of the reward function."""
        where = {"folder": str(self.folder), "port": self.port, "victim": self.victim.pid, "parent": os.getpid()}
        where["address"] = ctypes.addressof(self.memory)
        return {"messages": [{"role": "user", "content": name}], "ground_truth": where}

    def traces(self, patience: float) -> list[str]:
        """What an attack has left behind; everything is put back.

        Args:
            patience: seconds to wait for the death of the victim.
        """
        attacks_run = []
        for name in ("written", "big", "rewards/written"):
            if (self.folder / name).exists():
                (self.folder / name).unlink()
                attacks_run.append(name)
        if not (doomed := self.folder / "doomed").exists():
            doomed.touch()
            attacks_run.append("doomed")
        if self.path.read_bytes() != self.code:
            self.path.write_bytes(self.code)
            attacks_run.append("attacks.py")
        if os.getpriority(os.PRIO_PROCESS, self.victim.pid) != os.getpriority(os.PRIO_PROCESS, 0):
            attacks_run.append("slow victim")
        try:
            self.victim.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        else:
            attacks_run.append("dead victim")
        if attacks_run:
            self.end()
            self.victim = self._new_victim()
        return attacks_run

    def end(self) -> None:
        self.victim.kill()
        self.victim.communicate()


def in_the_open(function: Callable[..., Any], orders: dict[str, Any]) -> dict[str, Any]:
    """The attack in a plain child of this process."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            outcome = {"got": function(**orders)["got"]}
        except BaseException as error:
            outcome = {"error": repr(error)}
        os.write(writer, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        outcome = json.loads(file.read() or b'{"error": "died"}')
    os.waitpid(pid, 0)
    return outcome


def main() -> None:
    """Print what came of each attack as JSON."""
    folder, level = Path(sys.argv[1]), sys.argv[2]
    assert os.environ[SECRET]
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        arena = Arena(folder, stack)
        attack = runpy.run_path(str(arena.path))["attack"]
        for name in sandbox_attacks.NAMES:
            opened = in_the_open(attack, arena.arguments_of(name))
            results[name] = {"open": opened, "open_traces": arena.traces(5 if name in KILLERS else 0)}
        limits = SandboxLimits(max_level=level, min_level=level, seconds_per_row=5)  # type: ignore[arg-type]
        sandbox = stack.enter_context(Sandbox(FunctionSource(str(arena.path), "attack"), limits))
        for name in sandbox_attacks.NAMES:
            # One call each, so that what one leaves behind is not laid at the next one's door.
            (outcome,) = sandbox.call([arena.arguments_of(name)])
            outcome_fields = {"kind": outcome.kind, "error": outcome.error, "value": outcome.value}
            results[name] |= outcome_fields | {"traces": arena.traces(0.2 if name in KILLERS else 0)}
        (peace,) = sandbox.call([arena.arguments_of(sandbox_attacks.PEACE)])
        print(json.dumps({"user": os.getuid(), "level": sandbox.level, "peace": peace.value, "results": results}))
        arena.end()


if __name__ == "__main__":
    main()
