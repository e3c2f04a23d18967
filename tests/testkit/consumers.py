"""Programs that read what is exported, each in an environment of its own that is made once per machine.

An environment also finds the packages that the tests run with (torch, pyarrow, ...), so that only what a tool needs
beside them is installed. `consumers/<name>.py` is run in it: it reads what its arguments name, with the tool's own
code, and prints what it found as JSON.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_SCRIPTS = Path(__file__).with_name("consumers")
_OUT_OF_REACH = ("Could not find a version", "Connection", "Temporary failure", "Max retries", "timed out")


def consumed(name: str, requirements: Sequence[str], *arguments: object, alone: Sequence[str] = ()) -> Any:
    """What a tool's script says of the arguments; skips the test if the tool cannot be had.

    Args:
        name: of the script and the environment.
        requirements: what pip installs.
        arguments: of the script.
        alone: what pip installs without its dependencies, which are more than is needed.
    """
    python = _environment(name, [[*requirements], ["--no-deps", *alone]] if alone else [[*requirements]])
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(python), "-P", "-W", "ignore", str(_SCRIPTS / f"{name}.py"), *map(str, arguments)],
            cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _environment(name: str, installs: list[list[str]]) -> Path:
    """The Python of an environment; made by one process at a time, and again if it is not whole."""
    wanted = hashlib.sha256(repr((installs, sys.executable)).encode()).hexdigest()[:12]
    cache = Path(tempfile.gettempdir(), "trajlake-consumers")
    cache.mkdir(exist_ok=True)
    folder = cache / f"{name}-{wanted}"
    python, whole = folder / "bin" / "python", folder / "whole"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, symlinks=True)
            _share(python)
            for words in installs:
                _install(python, name, words)
            whole.touch()
    return python


def _share(python: Path) -> None:
    """Let an environment find the packages of this one, after its own."""
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    (own / "of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n", "utf-8")


def _install(python: Path, name: str, words: list[str]) -> None:
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    done = subprocess.run([str(python), *pip, *words], capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        told = done.stderr.strip().splitlines()
        if any(sign in done.stderr for sign in _OUT_OF_REACH):
            pytest.skip(f"{name}: the package index is out of reach, or lacks {' '.join(words)}: {told[-1]}")
        raise AssertionError(f"{name} cannot be installed: {done.stderr[-2000:]}")
