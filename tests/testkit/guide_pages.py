"""The commands of a guide, in their order: each `trajlake` in this process, the lines between them in a shell."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from lake.cli import trajlake
from testkit.processes import environment


def run_in_process(commands: str, folder: Path) -> str:
    """Run a block of commands in a folder; what the commands print.

    Args:
        commands: as a page has them, over several lines where a backslash ends one.
        folder: the current and the home folder of each.

    An AssertionError shows what a failed command wrote.
    """
    settings = {"HOME": str(folder), "TRAJLAKE_SPOOL": str(folder / "spool")}
    out = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for part in re.split(r"^(trajlake .+)$", commands.replace("\\\n", " "), flags=re.MULTILINE):
            if part.startswith("trajlake "):
                done = CliRunner().invoke(trajlake, shlex.split(part, comments=True)[1:], env=settings)
                assert done.exit_code == 0, f"{part}: {done.output} {done.exception}"
                out += done.stdout
            elif part.strip():
                words = ["bash", "-euc", part]
                shell = subprocess.run(words, env=environment(**settings), capture_output=True, text=True, check=False)
                assert shell.returncode == 0, f"{part}: {shell.stderr[-4000:]}"
    return out
