"""Lakes that are made once a process and copied for each test: a copy costs a tenth of what making one does."""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import lake
from lake import Lake


def empty_lake(folder: Path, **options: Any) -> Lake:
    """A new lake without rows; options are those of `lake.open`."""
    return copied("empty", lambda template: lake.open(template, create=True), folder, **options)


def copied(name: str, make: Callable[[Path], object], folder: Path, **options: Any) -> Lake:
    """A copy of the lake that `make` puts into a folder.

    Args:
        name: of what is made: anyone who gives the same name gets a copy of the same lake, job ids and times included.
        make: makes the lake.
        folder: for the copy; missing or empty.
        options: of `lake.open`, for the copy.
    """
    template = _templates() / sha256(name.encode()).hexdigest()[:16]
    if not template.exists():
        make(template)
    shutil.copytree(template, folder, dirs_exist_ok=True)
    return lake.open(folder, **options)


@cache
def _templates() -> Path:
    room = tempfile.TemporaryDirectory(prefix="trajlake-templates-")
    _KEPT.append(room)
    return Path(room.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""
