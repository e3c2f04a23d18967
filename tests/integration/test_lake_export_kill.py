"""Real processes: an export that is killed continues where it was, and two into one place do no harm."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lake import Lake
from lake.export import TARGETS
from lake.export.job import LOCK, MANIFEST, STATE
from testkit.commands import Command, trajlake
from testkit.copies import copied
from testkit.episodes import episode
from testkit.examples import mostly_slow
from testkit.wording import Wording

GROUPS = 16
NAMES = ("jsonl", "messages-parquet", "eval-protocol-db", "atif")
_LOOK_SECONDS = 0.002
"""Between two looks at an export that continues: a shard takes longer."""


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    def make(folder: Path) -> None:
        import lake

        records = [episode(f"task-{n}", index, steps=3, tokens=True) for n in range(GROUPS) for index in range(4)]
        lake.open(folder, create=True).append(records, run_id="run")

    return copied(f"export-{GROUPS}", make, tmp_path / "lake")


def start(lk: Lake, name: str, out: Path) -> subprocess.Popen[str]:
    words = ["export", "--lake", lk.uri, "--format", name, "--out", str(out), "--shard-episodes", "4"]
    return Command(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def files(folder: Path) -> dict[str, bytes]:
    """All files of an export."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(out: Path) -> int:
    """How many shards an unfinished export says are whole."""
    try:
        return (out / STATE).read_text("utf-8").count('"sha256"')
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("name", mostly_slow(NAMES, "jsonl"))
def test_a_killed_export_goes_on_and_ends_with_the_same_bytes(lk: Lake, tmp_path: Path, name: str) -> None:
    assert name in TARGETS
    process = start(lk, name, tmp_path / "whole")
    assert process.wait(120) == 0, process.communicate()
    out = tmp_path / "out"
    killed = 0
    for shard_count in (1, GROUPS // 2):
        run = start(lk, name, out)
        while run.poll() is None and shards(out) < shard_count:
            time.sleep(_LOOK_SECONDS)
        os.kill(run.pid, signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
        run.communicate()
    assert killed == 2, "it ended before it could be killed"
    assert not (out / MANIFEST).exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    done = start(lk, name, out)
    assert done.wait(120) == 0, done.communicate()
    done.communicate()
    process.communicate()
    assert files(out) == files(tmp_path / "whole")
    paths = [path for path, time in before.items() if path.exists() and path.stat().st_mtime_ns == time]
    assert len(paths) >= GROUPS // 2, "what was there was not written again"


def test_of_two_exports_into_one_folder_the_second_is_refused(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    out = tmp_path / "out"
    first = start(lk, "jsonl", out)
    while shards(out) < 1 and first.poll() is None:
        time.sleep(_LOOK_SECONDS)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        second = trajlake("export", "--lake", lk.uri, "--out", out, "--shard-episodes", "4")
        assert second.returncode == 2
        assert f"exports to {out}" in wording(second.stderr)
        second_export = trajlake("export", "--lake", lk.uri, "--format", "messages", "--out", out)
        assert second_export.returncode == 2
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.wait(120) == 0, first.communicate()
    first.communicate()
    again = start(lk, "jsonl", tmp_path / "again")
    assert again.wait(120) == 0
    again.communicate()
    assert files(out) == files(tmp_path / "again")
    assert not (out / LOCK).exists()


def test_two_files_of_one_folder_are_exported_at_once(lk: Lake, tmp_path: Path) -> None:
    words = [["--format", name, "--out", str(tmp_path / f"{name}.jsonl")] for name in ("jsonl", "messages")]
    runs = [
        Command(["export", "--lake", lk.uri, *word], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for word in words
    ]
    for run in runs:
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 0, stderr
    assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == [
        "jsonl.jsonl",
        f"jsonl.jsonl.{MANIFEST}",
        "messages.jsonl",
        f"messages.jsonl.{MANIFEST}",
    ]
