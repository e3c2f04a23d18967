"""A project of examples/ in a copy, whose commands are those of its README.

What the page says that a command prints is compared line by line; `...` there is any text.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from lake.cli import trajlake
from testkit.processes import COMMAND, environment
from testkit.shared import CHECKOUT

_SECONDS = 1800


def free_port() -> int:
    """A port of 127.0.0.1 that no one listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Example:
    """A copy of an example.

    Args:
        name: of its folder.
        folder: to copy it to.
        python: that its commands run with.
        settings: environment variables of its commands.
        ports: the page's ports, and those to use in their place.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        python: str | Path = sys.executable,
        settings: dict[str, str] | None = None,
        ports: dict[int, int] | None = None,
    ) -> None:
        source = Path(CHECKOUT, "examples", name)
        self.folder = Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__")))
        self.page = (source / "README.md").read_text("utf-8")
        self._python, self._settings, self._ports = str(python), settings or {}, ports or {}

    def run(self, beginning: str) -> str:
        """What the page's command of that beginning prints, on stdout and stderr.

        A lone `trajlake` of our own Python runs in this process.
        """
        command = self._command(beginning)
        if self._python == sys.executable and re.fullmatch(r"trajlake [^|&;<>$]+", command):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(self.folder)
                result = CliRunner().invoke(trajlake, shlex.split(command)[1:], env=self._settings)
            assert result.exit_code == 0, f"{result.output} {result.exception}"
            return result.stdout + result.stderr
        done = subprocess.run(
            self._words(beginning),
            cwd=self.folder,
            env=environment(**self._settings),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout + done.stderr

    def prints_as_the_page_says(self, beginning: str) -> str:
        """The same, compared with the page."""
        printed = self.run(beginning)
        for line in self._expected(beginning):
            pattern = re.escape(line).replace(re.escape("..."), ".*")
            assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{line!r} is not in {printed[-4000:]!r}"
        return printed

    @contextmanager
    def running(self, beginning: str) -> Iterator[None]:
        """The page's command of that beginning continues in the meantime; entered once it has printed a line."""
        process = subprocess.Popen(
            self._words(beginning),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(PYTHONUNBUFFERED="1", **self._settings),
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), f"{beginning} has ended"
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=_SECONDS)

    def _command(self, beginning: str) -> str:
        """The page's command of that beginning, at our ports."""
        (command,) = re.findall(rf"^\$ ({re.escape(beginning)}.*)$", self.page, re.MULTILINE)
        command = command.partition("   #")[0]
        for port, other_port in self._ports.items():
            command = command.replace(f":{port}", f":{other_port}").replace(f" {port}", f" {other_port}")
        return command

    def _words(self, beginning: str) -> list[str]:
        command = self._command(beginning)
        script = f"""python() {{ "$0" "$@"; }}\ntrajlake() {{ "$0" -c '{COMMAND[2]}' "$@"; }}\n{command}"""
        return ["bash", "-c", script, self._python]

    def _expected(self, beginning: str) -> list[str]:
        """The lines below a command of the page, but for the empty ones and those of `...` alone."""
        (block,) = re.findall(rf"^\$ {re.escape(beginning)}.*\n((?:(?!\$ |```).*\n)*)", self.page, re.MULTILINE)
        return [line for line in block.splitlines() if line.strip() not in ("", "...")]
