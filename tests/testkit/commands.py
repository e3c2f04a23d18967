"""The command line in its own process, which is forked from a server that has imported what the command needs.

Real processes with their own memory, files and end, which a test may stop, kill and wait for, without the seconds that
an interpreter takes for its imports. What a library reads from the environment when it is imported (RUST_LOG, say) is
that of the server; `testkit.processes.COMMAND` is for tests of that.
"""

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

from testkit.processes import TIMEOUT, environment, fork_server

_WORKERS = dict.fromkeys(("train", "loop", "rescore", "ope", "demo"), "testkit.training_worker") | {
    "view": "testkit.viewer_worker"
}
"""What runs commands that import more than others do."""


class Command(subprocess.Popen[Any]):
    """`trajlake WORDS`, as a `Popen` of its words.

    The process is the server's child, not ours: the three methods of Popen that start a child and wait for it ask the
    server.
    """

    def _execute_child(self, args: Any, _: Any, preexec: Any, *rest: Any) -> None:
        assert preexec is None, "a function that runs before the command needs a process that is not forked"
        (_, _, folder, env, _, _, _), pipes, session = rest[:7], rest[7:13], rest[18]
        words = [str(word) for word in args]
        self._server = fork_server(_WORKERS.get(words[0], "testkit.command_worker"))
        request = {"environment": dict(env or environment()), "folder": folder and str(folder), "session": session}
        theirs = [pipe if pipe != -1 else usual for usual, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = self._server.ask(theirs, run=[json.dumps(request), *words])
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(wait=self.pid, block=False)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            finally:
                os.close(ended)
            self.returncode = self._server.ask(wait=self.pid, block=True)
        assert self.returncode is not None
        return self.returncode


def trajlake(*args: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command line to its end."""
    words = list(map(str, args))
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "backslashreplace"}
    with Command(words, **(piped | options)) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)
