"""Attacks on anyone who runs a reward function: each works in an open process, and none in the sandbox.

As the user who runs the tests and, if that is root, as an ordinary user too. Where the interpreter lies in a folder
that only root can read, the ordinary user is given the right to read all files, and no other: that makes the open side
easier, and the sandbox must hold all the same.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pipelines.score.sandbox.contract import CallOutcome, FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import find_obstacle
from pipelines.score.sandbox.pool import Sandbox
from testkit import sandbox_arena
from testkit.examples import mostly_slow
from testkit.processes import environment
from testkit.sandbox_attacks import NAMES, PEACE

NOBODY = 65534
STRONG = pytest.mark.skipif(
    find_obstacle("strong") is not None, reason=f"no strong isolation here: {find_obstacle('strong')}"
)
BWRAP = pytest.mark.skipif(find_obstacle("bwrap") is not None, reason=f"no level bwrap here: {find_obstacle('bwrap')}")
READ_ALL = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
FIFTEEN = {
    "network",
    "UDP",
    "unix socket",
    "file write",
    "file read",
    "passwd",
    "shadow",
    "parent's environment",
    "fork bomb",
    "memory bomb",
    "thread bomb",
    "exec",
    "big file",
    "kill parent",
    "parent's memory",
    "own limits",
}


def arena(user: str, level: str) -> dict[str, Any]:
    """What came of all attacks, as one user, at one level."""
    command = [sys.executable, sandbox_arena.__file__]
    if user == "nobody":
        if os.getuid() != 0:
            pytest.skip("only root can become another user: run as oneself alone")
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv (util-linux) is not installed: it is needed to become another user")
        ids = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        command = ["setpriv", *ids, *READ_ALL, *command]
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder, "room")
        room.mkdir()
        for path in (folder, room):
            os.chown(path, *((NOBODY, NOBODY) if user == "nobody" else (os.getuid(), os.getgid())))
        env = environment(**{sandbox_arena.SECRET: "s3cret"})
        done = subprocess.run([*command, str(room), level], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["level"] == level
    assert document["user"] == (NOBODY if user == "nobody" else os.getuid())
    assert tuple(document["results"]) == NAMES
    return dict(document)


def may_read(path: str) -> bool:
    """Whether an open process of this user may (os.access does not know of capabilities)."""
    try:
        return bool(Path(path).read_bytes())
    except PermissionError:
        return False


def not_held(outcomes: dict[str, Any]) -> dict[str, Any]:
    """Attacks that got something, left something behind, or were not refused with a reason."""
    kinds = {"exception", "memory", "killed"}
    return {
        name: each
        for name, each in outcomes["results"].items()
        if each["kind"] not in kinds or each["value"] is not None or not each["error"] or each["traces"]
    }


def test_no_attack_is_forgotten() -> None:
    assert set(NAMES) >= FIFTEEN


@STRONG
@pytest.mark.parametrize("user", mostly_slow(["oneself", "nobody"], "oneself"))
def test_attacks_work_in_the_open_and_not_in_the_sandbox(user: str) -> None:
    outcomes = arena(user, "strong")
    refused = {name for name, each in outcomes["results"].items() if "got" not in each["open"]}
    assert refused == (set() if user == "nobody" or may_read("/etc/shadow") else {"shadow"})
    assert not_held(outcomes) == {}
    assert outcomes["peace"] == 1.0, "the sandbox still works"
    # What the open attacks did was seen, so that no traces of the sandboxed ones says something.
    traces = {name: each["open_traces"] for name, each in outcomes["results"].items() if each["open_traces"]}
    assert traces == {
        "file write": ["written"],
        "write beside itself": ["rewards/written"],
        "change of itself": ["attacks.py"],
        "file removal": ["doomed"],
        "big file": ["big"],
        "kill parent": ["dead victim"],
        "signal by a pipe": ["dead victim"],
        "slow the parent": ["slow victim"],
        "pipe in a folder": ["written"],
        "hard link": ["written"],
        "renaming": ["written", "doomed"],
    }


@BWRAP
def test_bubblewrap_holds_as_well() -> None:
    """As oneself alone: bubblewrap refuses to run for a user who was given a right."""
    outcomes = arena("oneself", "bwrap")
    assert not_held(outcomes) == {}
    assert outcomes["peace"] == 1.0


def at_level(folder: Path, level: str, name: str) -> CallOutcome:
    """One attack at a level that is weaker than it could be."""
    path = Path(shutil.copy(sandbox_arena.sandbox_attacks.__file__, folder / "attacks.py"))
    limits = SandboxLimits(max_level=level, min_level="none")  # type: ignore[arg-type]
    with Sandbox(FunctionSource(str(path), "attack"), limits) as sandbox:
        assert sandbox.level == level
        where = {"folder": str(folder), "port": 0, "victim": os.getpid(), "parent": os.getpid(), "address": 0}
        return sandbox.call([{"messages": [{"content": name}], "ground_truth": where}])[0]


@pytest.mark.skipif(find_obstacle("basic") is not None, reason=f"no level basic here: {find_obstacle('basic')}")
def test_basic_isolation_has_the_hole_it_is_said_to_have(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    assert at_level(tmp_path, "basic", "file read").value == {"score": 1.0, "got": "secret"}
    for name in ("fork bomb", "exec", "socket pair", "slow the parent", "big file", "memory bomb"):
        assert at_level(tmp_path, "basic", name).kind in {"exception", "memory"}, name


def test_no_isolation_limits_and_nothing_else(tmp_path: Path) -> None:
    assert at_level(tmp_path, "none", "fork bomb").value == {"score": 1.0, "got": 3}
    assert at_level(tmp_path, "none", "socket pair").value == {"score": 1.0, "got": 0}
    assert at_level(tmp_path, "none", "memory bomb").kind == "memory"
    assert at_level(tmp_path, "none", "inherited environment").kind == "exception"
    assert at_level(tmp_path, "none", PEACE).value == 1.0


PEEK = """
import os, sys
from pathlib import Path

def peek(path, **_):
    frame, rows = sys._getframe(1), 0
    while frame is not None:
        rows = max(rows, len(frame.f_locals.get("rows", ())))
        frame = frame.f_back
    told = os.stat(path)
    found = {"rows": rows, "size": told.st_size, "changed": told.st_mtime, "there": os.path.exists(path + "x")}
    found["link"] = os.readlink(path + "-link")
    for name, deed in (("text", Path(path).read_text), ("beside", lambda: os.listdir(Path(path).parent))):
        try:
            found[name] = deed()
        except PermissionError:
            found[name] = None
    return {"score": 1.0, "found": found}
"""


@STRONG
def test_the_guide_says_what_a_function_learns_of_files_and_of_other_rows(tmp_path: Path) -> None:
    """Size and times of any file, nothing of what is in it; the rows of its request, which may be one."""
    (tmp_path / "rewards").mkdir()
    path = tmp_path / "rewards" / "peek.py"
    path.write_text(PEEK)
    secret = tmp_path / "secret"
    secret.write_text("12345")
    (tmp_path / "secret-link").symlink_to("elsewhere")
    learned = {
        "link": "elsewhere",
        "size": 5,
        "changed": secret.stat().st_mtime,
        "there": False,
        "text": None,
        "beside": None,
    }
    for at_once, rows in ((64, 3), (1, 1)):
        with Sandbox(FunctionSource(str(path), "peek"), SandboxLimits(rows_per_batch=at_once)) as sandbox:
            for outcome in sandbox.call([{"path": str(secret)}] * 3):
                assert outcome.value == {"score": 1.0, "found": {"rows": rows} | learned}
