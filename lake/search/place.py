"""Where indexes are kept: in the user's cache folder, one file a lake; a viewer writes nothing into a lake.

`TRAJLAKE_CACHE` moves it, and else `XDG_CACHE_HOME`, as it does for other programs. Without a folder that can be
written to, the temporary one serves. A file may be deleted at any time: it is built again.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lake import ids

ENVIRONMENT = "TRAJLAKE_CACHE"
_LAYOUT = 1
"""Of the file: another number is another file."""


def path(root: str) -> Path:
    """The file of a lake, in a folder that is there and that nobody else may read."""
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder / _name(root)
    return _own() / _name(root)


def delete(root: str) -> None:
    """Delete what this machine keeps of a lake's texts."""
    for folder in _folders():
        for suffix in ("", "-wal", "-shm"):
            Path(folder, _name(root) + suffix).unlink(missing_ok=True)


@cache
def _own() -> Path:
    """A folder of this process, where no other can be written to."""
    return Path(tempfile.mkdtemp(prefix="trajlake-search-"))


def _folders() -> Iterator[Path]:
    cache = os.environ.get(ENVIRONMENT) or os.environ.get("XDG_CACHE_HOME")
    yield Path(cache or Path.home() / ".cache", "trajlake", "search")
    yield Path(tempfile.gettempdir(), f"trajlake-{os.getuid()}", "search")


def _name(root: str) -> str:
    return f"{ids.to_text(ids.key_hash('lake', root))}-{_LAYOUT}.sqlite"
