"""Folders and files that are either there in full or not at all, also after a power cut.

Written under a temporary name beside the target, flushed to disk, then renamed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""End of the name of what is being written."""


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A fresh folder to write into; it becomes `target`, in place of what was there, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_place(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    for path in sorted(partial.rglob("*"), reverse=True):
        _sync(path)
    _sync(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync(target.parent)


def partial_place(target: Path) -> Path:
    """Where a folder or file is written before it gets its name."""
    return target.with_name(f".{target.name}{PARTIAL}")


def atomic_text(target: Path, text: str) -> None:
    """Write a text file in one piece."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_place(target)
    partial.write_text(text, encoding="utf-8")
    _sync(partial)
    partial.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
