"""The user's cache folder: what this machine keeps of lakes to be faster, and may be deleted at any time.

`TRAJLAKE_CACHE` moves it, and else `XDG_CACHE_HOME`, as it does for other programs. It is used if it is the user's own,
and nobody else may read it: another user could read the lake's texts there, or put others in their place. Where there
is no such folder, a process that cannot do without has one of its own, for as long as it runs.
"""

import errno
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

ENVIRONMENT = "TRAJLAKE_CACHE"


def usual(kind: str) -> Path:
    """Where things of a kind are kept; it may not be there. Raises OSError: the user has no home folder."""
    chosen = os.environ.get(ENVIRONMENT) or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache", "trajlake", kind)
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", "~/.cache/trajlake") from error


def shared(kind: str) -> Path:
    """The usual folder, which all processes of the user share: it is there, and nobody else may read it.

    Raises OSError: there is no such folder, and it cannot be made; or it is another user's.
    """
    found = usual(kind)
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = found.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(found))
    if status.st_mode & 0o077:
        found.chmod(0o700)
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(found))
    return found


def folder(kind: str) -> Path:
    """The usual folder, or else this process's own: one that is there and that nobody else may read."""
    try:
        return shared(kind)
    except OSError:
        return Path(_own(kind).name)


def folders(kind: str) -> list[Path]:
    """Where there may be things of a kind: the usual folder, if it is the user's, and this process's own."""
    found = [Path(_own(kind).name)] if _own.cache_info().currsize else []
    with suppress(OSError):
        path = usual(kind)
        if path.stat().st_uid == os.geteuid():  # in another's folder is nothing of ours: `shared` refuses it
            found.append(path)
    return found


@cache
def _own(kind: str) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which goes with it."""
    return tempfile.TemporaryDirectory(prefix=f"trajlake-{kind}-")
