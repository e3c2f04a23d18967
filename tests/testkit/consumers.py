"""Foreign programs (readers of exports, agent frameworks, engines), each in an environment made once per machine.

An environment also finds the packages that the tests run with (torch, pyarrow, ...), so that only what a tool needs
next to them is installed; an engine that brings its own does not. `consumers/<name>.py` is run in it: it reads what its
arguments name, with the tool's own code, and prints what it found as JSON.
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
_MASSGEN = ("loguru==0.7.3", "mcp==1.30.0", "fastmcp==2.14.7", "gitpython==3.2.1", "openai==3.54.0", "lmstudio==1.5.0")
_MASSGEN += ("anthropic==2.12.0", "claude-agent-sdk==0.2.187")
_OUT_OF_REACH = ("Could not find a version", "Connection", "Temporary failure", "Max retries", "timed out")


def consumed(name: str, requirements: Sequence[str], *arguments: object, alone: Sequence[str] = ()) -> Any:
    """What a tool's script says of the arguments; skips the test if the tool cannot be had.

    Args:
        name: of the script and the environment.
        requirements: what pip installs.
        arguments: of the script.
        alone: what pip installs without its dependencies, which are more than is needed.
    """
    return said_by(with_packages(name, requirements, alone=alone), name, *arguments)


def with_packages(name: str, requirements: Sequence[str], *, alone: Sequence[str] = ()) -> Path:
    """The Python of an environment in which packages are installed next to those of the tests; see `consumed`."""
    return environment(name, _install(requirements), *([_install(["--no-deps", *alone])] if alone else []))


def massgen_python() -> Path:
    """The Python of an environment that has MassGen."""
    return with_packages("massgen", _MASSGEN, alone=("massgen==0.1.97",))


def said_by(python: Path, script: str, *arguments: object) -> Any:
    """What a script of `consumers/` says of the arguments."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(python), "-P", "-W", "ignore", str(_SCRIPTS / f"{script}.py"), *map(str, arguments)],
            cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def environment(name: str, *commands: Sequence[str], shares: bool = True) -> Path:
    """The Python of an environment; made by one process at a time, and again if it is not whole.

    Args:
        name: of what it is for.
        commands: of pip, in turn; the test is skipped if they find no packages.
        shares: whether it finds the packages that the tests run with.
    """
    digest = hashlib.sha256(repr((commands, shares, sys.executable)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("TRAJLAKE_TEST_CACHE") or Path(tempfile.gettempdir(), "trajlake-consumers"))
    cache.mkdir(exist_ok=True, parents=True)
    folder = cache / f"{name}-{digest}"
    python, complete_mark = folder / "bin" / "python", folder / "whole"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete_mark.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, symlinks=True, with_pip=not shares)
            if shares:
                _share(python)
            for words in commands:
                _pip(python, name, words)
            complete_mark.touch()
    return python


def _install(requirements: Sequence[str]) -> tuple[str, ...]:
    return ("install", "--no-compile", *requirements)


def _share(python: Path) -> None:
    """Let an environment find the packages of this one, after its own."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    (site_packages / "of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n", "utf-8")


def _pip(python: Path, name: str, words: Sequence[str]) -> None:
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        if any(sign in done.stderr for sign in _OUT_OF_REACH):
            pytest.skip(f"{name}: the package index is out of reach, or lacks {' '.join(words)}: {lines[-1]}")
        raise AssertionError(f"{name} cannot be installed: {done.stderr[-2000:]}")
