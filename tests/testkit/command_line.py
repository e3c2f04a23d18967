"""The command line, run in this process: what it printed and how it ended."""

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from lake.cli import main


@dataclass
class Result:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def fault(self) -> str:
        """The one line of a user's fault: on stderr, and nothing else anywhere."""
        assert self.code != 0
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.startswith("trajlake: "), self.err
        assert self.err.count("\n") == 1
        return self.err


Cli = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A function that runs a command line; nothing of ours is configured by the environment."""
    for name in list(os.environ):
        if name.startswith("TRAJLAKE_"):
            monkeypatch.delenv(name)

    def run(*args: str | Path, stdin: bytes | TextIO = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["trajlake", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin)
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            main()
        printed = capsys.readouterr()
        return Result(int(error.value.code or 0), printed.out, printed.err)

    return run
