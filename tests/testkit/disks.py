"""Disks that are full and folders that may not be written, as far as this machine lets a test make them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NAME = "trajlake-test-"
"""Disks are called by this, and by the process that made them."""


@contextmanager
def disk(path: Path, size: str) -> Iterator[Path]:
    """A separate file system at a path, of a size like `100k`; skips where mounting is not allowed."""
    path.mkdir()
    _clear()
    _mount(path, "-t", "tmpfs", "-o", f"size={size}", f"{_NAME}{os.getpid()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def grow(path: Path, size: str) -> None:
    """Give a disk more room."""
    _mount(path, "-o", f"remount,size={size}")


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """A folder whose contents may be changed before and after the context, and not in it.

    Permissions do not stop root, so root gets a file system that is mounted again to be read only.
    """
    if os.geteuid() == 0:
        _mount(path, "-o", "remount,ro")
        try:
            yield path
        finally:
            _mount(path, "-o", "remount,rw")
        return
    folders = [path, *(folder for folder in path.rglob("*") if folder.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield path
    finally:
        for folder in folders:
            folder.chmod(0o755)


@contextmanager
def folder_to_lock(path: Path) -> Iterator[Path]:
    """A folder that `read_only` can lock: a disk for root, a plain folder for everybody else."""
    if os.geteuid() == 0:
        with disk(path, "32m"):
            yield path
    else:
        path.mkdir()
        yield path


def _clear() -> None:
    """Unmount the disks of tests that were killed: no one else does before the machine is started again."""
    for line in Path("/proc/mounts").read_text().splitlines():
        name, mount_point = line.split()[:2]
        owner = name.removeprefix(_NAME)
        if owner != name and not Path("/proc", owner).exists():
            subprocess.run(
                ["umount", "-l", mount_point.encode().decode("unicode_escape")], check=False, capture_output=True
            )


def _mount(path: Path, *args: str) -> None:
    try:
        done = subprocess.run(["mount", *args, str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here to make a disk with")
    if done.returncode:
        pytest.skip(f"this machine does not let a test mount a disk: {done.stderr.strip()}")
