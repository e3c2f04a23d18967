"""The user's cache folder: what this machine keeps of lakes to be faster, and may be deleted at any time.

`TRAJLAKE_CACHE` moves it, and else `XDG_CACHE_HOME`, as it does for other programs. Where that folder cannot be written
to, each process has one of its own, for as long as it runs: a shared one below /tmp could be another user's, who would
read the lake's texts in it.
"""

import os
import tempfile
from functools import cache
from pathlib import Path

ENVIRONMENT = "TRAJLAKE_CACHE"


def usual(kind: str) -> Path:
    """Where things of a kind are kept unless it cannot be written to; it may not be there."""
    chosen = os.environ.get(ENVIRONMENT) or os.environ.get("XDG_CACHE_HOME")
    return Path(chosen or Path.home() / ".cache", "trajlake", kind)


def folder(kind: str) -> Path:
    """A folder for things of a kind that is there and that nobody else may read."""
    found = usual(kind)
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(found, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    return found if usable else Path(_own(kind).name)


def folders(kind: str) -> list[Path]:
    """Where things of a kind may be: the usual folder, and this process's own, which may both be missing."""
    return [usual(kind), *([Path(_own(kind).name)] if _own.cache_info().currsize else [])]


@cache
def _own(kind: str) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which goes with it."""
    return tempfile.TemporaryDirectory(prefix=f"trajlake-{kind}-")
