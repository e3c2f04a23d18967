"""The same for commands that train or score with a model, whose imports take seconds of processor time each.

Ranks that `trajlake train --ranks N` launches are forked too, before the command runs (what it calls starts threads),
and wait until it starts them. They run what `python -m trainer` runs.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from testkit import command_worker, rank_tasks
from testkit.ranks import RANK
from trainer.backends import ranks

__all__ = ["main"]

for _name in ("torch", "transformers.models.auto.modeling_auto", "trainer.runs.offline"):
    importlib.import_module(_name)


def main(args: Sequence[str]) -> None:
    """Run a command line, as `testkit.command_worker` does; or be a rank of `testkit.ranks`."""
    words = list(args[1:])
    if args[0] == RANK:
        rank_tasks.serve(*words)
        return
    if "--ranks" in words and "RANK" not in json.loads(args[0])["environment"]:
        for _ in range(int(words[words.index("--ranks") + 1])):
            _Waiting.processes.append(_Waiting())
        forks = SimpleNamespace(Popen=_ForkedRank, TimeoutExpired=subprocess.TimeoutExpired)
        ranks.subprocess = forks  # type: ignore[assignment]
    command_worker.main(args)


class _Waiting:
    """A process that will be a rank."""

    processes: ClassVar[list["_Waiting"]] = []

    def __init__(self) -> None:
        theirs, self._request = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for process in [self, *self.processes]:
                os.close(process._request)
            with os.fdopen(theirs) as request:
                _become_rank(request.read())
        os.close(theirs)

    def start(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        with os.fdopen(self._request, "w") as request:
            json.dump([list(arguments), environment], request)


def _become_rank(request: str) -> None:
    """Run the rank that is asked for, or nothing where the command has ended without asking."""
    if request:
        arguments, environment = json.loads(request)
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["trainer", *arguments]
        runpy.run_module("trainer", run_name="__main__", alter_sys=True)
    os._exit(0)


class _ForkedRank(subprocess.Popen[bytes]):
    """A process that waits already, as the `Popen` of a rank."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        environment = rest[5]
        waiting = _Waiting.processes[int(environment["RANK"])]
        waiting.start(args[3:], environment)
        self.pid = waiting.pid
        self._child_created = True
