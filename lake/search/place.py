"""Where indexes are kept: in the user's cache folder, one file a lake; a viewer writes nothing into a lake.

`TRAJLAKE_CACHE` moves it, and else `XDG_CACHE_HOME`, as it does for other programs. Where that folder cannot be written
to, each process has one of its own, for as long as it runs: a shared one below /tmp could be another user's, who would
read the lake's texts in it. A file may be deleted at any time: it is built again.
"""

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from lake import ids

ENVIRONMENT = "TRAJLAKE_CACHE"
_LAYOUT = 1
"""Of the file: another number is another file."""


def path(root: str) -> Path:
    """The file of a lake, in a folder that is there and that nobody else may read."""
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    return (folder if usable else Path(_own().name)) / _name(root)


def delete(root: str) -> None:
    """Delete what this machine keeps of a lake's texts."""
    own = [Path(_own().name)] if _own.cache_info().currsize else []
    for folder in (_folder(), *own):
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError, NotADirectoryError):
                Path(folder, _name(root) + suffix).unlink()


def _folder() -> Path:
    chosen = os.environ.get(ENVIRONMENT) or os.environ.get("XDG_CACHE_HOME")
    return Path(chosen or Path.home() / ".cache", "trajlake", "search")


@cache
def _own() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which goes with it."""
    return tempfile.TemporaryDirectory(prefix="trajlake-search-")


def _name(root: str) -> str:
    return f"{ids.to_text(ids.key_hash('lake', root))}-{_LAYOUT}.sqlite"
