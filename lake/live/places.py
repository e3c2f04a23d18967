"""Where a lake and its spools lie: whether a lake can be there at all, and who may make or take a spool."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lake import ids
from lake.errors import LakeAccessError
from lake.live.owners import address_of
from lake.storage.addresses import parse
from lake.storage.identity import OWN_FOLDER, RESERVED
from lake.tables import EPISODES, TABLES

LOCK = "lock"
"""Held on the file of this name: in a spool by the process that it belongs to, in a root by who makes or adopts one."""


@contextlib.contextmanager
def checked_place(uri: str | Path) -> Iterator[None]:
    """Begin to record where a lake may be; what was made for it is taken away again if that fails. As `check_place`."""
    place = parse(uri).folder
    reserved = None if place is None else place / RESERVED
    made = _missing(None if place is None else place / OWN_FOLDER)
    is_new = reserved is not None and not reserved.exists()
    try:
        check_place(uri)
        yield
    except BaseException:
        if reserved is not None and is_new:
            with contextlib.suppress(OSError):
                reserved.unlink()
        for folder in made:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()
        raise


def _missing(folder: Path | None) -> list[Path]:
    """A folder and those above it that are not there, the innermost first."""
    above = [] if folder is None else [folder, *folder.parents]
    return [path for path in above if not os.path.lexists(path)]


def check_place(uri: str | Path) -> None:
    """Refuse a place where no lake can be, before anything is recorded for it.

    The local folder of a lake that is to be made is made now, empty: no other look at it is as sure. A bucket is not
    asked, for one that cannot be reached now may be reached later; only its address is looked at.

    Args:
        uri: the lake's folder or address.

    Raises:
        UsageError: an address that is none.
        LakeAccessError: a file, a path below one, a folder of something else, or one that cannot be made or written.
    """
    folder = parse(uri).folder
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
    except FileExistsError as error:
        msg = f"{folder} is a file, and a lake is a folder; choose another one for the lake"
        raise LakeAccessError(msg) from error
    except OSError as error:
        msg = f"{folder}: {error.strerror or error}; choose another folder for the lake, or change its permissions"
        raise LakeAccessError(msg) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LakeAccessError(f"{folder}: no permission to write here; choose another folder for the lake")
    if EPISODES.name in names or names <= TABLES.keys():
        return
    if not names <= TABLES.keys() | {OWN_FOLDER}:
        raise LakeAccessError(f"{folder} is not a lake and not empty; name a new or an empty folder for the lake")


def root_of(lake_uri: str, part: str) -> Path:
    """Where the spools of a lake are kept on this machine: below TRAJLAKE_SPOOL, else among the user's state.

    Args:
        lake_uri: the lake's folder or address.
        part: which of several programs: each adopts its own.
    """
    address = address_of(lake_uri)
    return spool_base() / f"{PurePosixPath(address).name}-{ids.to_text(ids.text_hash(address))}" / part


def spool_base() -> Path:
    """Where the spools of all lakes are kept on this machine, a folder for each address of a lake."""
    given = os.environ.get("TRAJLAKE_SPOOL")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(given) if given else state / "trajlake" / "spool"


def proxy_root(lake_uri: str, port: int, spool: Path | None = None) -> Path:
    """Where the spools of proxies on a port are: what another one left open is its own to go on with."""
    own = f"proxy-{port}"
    return root_of(lake_uri, own) if spool is None else spool / own


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """One process at a time makes, adopts or deletes spools below a root: no folder is seen before it is locked."""
    lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        # Closing is not enough: a process that is forked meanwhile has the file open too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
