"""What dead processes left in their spools: which of it belongs to a lake, and what is kept apart.

A spool is taken over by whoever records for its lake next, wherever that lake has been moved to. What was recorded for
a lake that was deleted is not of the lake that lies in its place now: it stays where it is, and is told of. `trajlake
spools` lists it, delivers it to a lake or deletes it.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lake.errors import TrajlakeError
from lake.live.log import EpisodeLog
from lake.live.owners import Owner, is_orphan, is_taken_by, read_owner
from lake.live.places import LOCK, root_of, spool_base, turn
from lake.live.segments import SUFFIX
from lake.live.spool import Spool

_log = logging.getLogger("trajlake")
_told: set[Path] = set()
"""Orphans that this process has told of."""


class Held(NamedTuple):
    """A spool on the disk, as others than its process see it."""

    folder: Path
    owner: Owner | None
    """None: it was written by an earlier version."""
    is_in_use: bool
    """A process records into it."""
    is_orphan: bool
    """It is of a lake that lay where another one lies now."""
    finished: int | None
    """Episodes that have ended and are not known to be in the lake; None while it is in use, or cannot be read."""
    open: int | None
    """Episodes that have not ended."""
    bytes: int


def adopted(root: Path, owner: Owner) -> list[Spool]:
    """Take over the spools of a lake whose processes are dead: those below a root, and those from where the lake was.

    Orphans below the root are told of in the log, once in a process.
    """
    found = Spool.adopt(root, owner=owner)
    for spool in found:
        if spool.owner is None:
            _log.warning("the spool %s does not say which lake it is of; it is taken to be of this one", spool.folder)
    for former in _former_roots(root, owner):
        for spool in Spool.adopt(former, owner=owner):
            _log.warning("the lake was moved: %s, which was recorded for it before, is taken over", spool.folder)
            found.append(spool)
    _tell_orphans(root, owner)
    return found


def spools_of(owner: Owner) -> list[Held]:
    """The spools on this machine that hold frames for a lake, or for one that lay at its address before.

    Those of a `--spool` are not known here.
    """
    base = spool_base()
    own = root_of(owner.address, "")
    marked = {path.parent for path in base.rglob(f"*{SUFFIX}")}
    found = []
    for folder in sorted(marked):
        try:
            other = read_owner(folder)
        except OSError:
            other = None
        is_own = own in folder.parents if other is None else is_taken_by(owner, other)
        if is_own or is_orphan(owner, other):
            found.append(_looked_at(folder, owner, other))
    return found


@contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """The lock of a spool; None: a process records into it. Raises OSError."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        yield None
    finally:
        os.close(lock)


def _looked_at(folder: Path, owner: Owner, other: Owner | None) -> Held:
    size = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
    with turn(folder.parent), locked(folder) as lock:
        counts = None if lock is None else _episodes(folder)
    finished, opened = counts or (None, None)
    return Held(folder, other, lock is None, is_orphan(owner, other), finished, opened, size)


def _episodes(folder: Path) -> tuple[int, int] | None:
    """Episodes of a spool that nobody writes to, finished and open; None: it cannot be read."""
    try:
        log = EpisodeLog(Spool.read_only(folder))
        log.refresh()
    except (TrajlakeError, OSError):
        return None
    return len(log.finished), len(log.open)


def _former_roots(root: Path, owner: Owner) -> list[Path]:
    """Where the same program would keep the spools of this lake, had it another address."""
    base = spool_base()
    if owner.lake is None or base not in root.parents:
        return []
    name, *part = root.relative_to(base).parts
    others = [other.joinpath(*part) for other in _folders(base) if other.name != name]
    return [other for other in others if other.is_dir() and any(_is_of(folder, owner) for folder in _folders(other))]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _is_of(folder: Path, owner: Owner) -> bool:
    try:
        other = read_owner(folder)
    except OSError:
        return False
    return other is not None and other.lake == owner.lake


def _tell_orphans(root: Path, owner: Owner) -> None:
    for folder in _folders(root):
        try:
            other = read_owner(folder)
            if folder in _told or not is_orphan(owner, other):
                continue
            held = _looked_at(folder, owner, other)
            if (held.finished, held.open) == (0, 0):
                delete(held)  # all that it held was delivered before
                continue
        except OSError as error:
            _log.warning("the spool %s cannot be looked at: %s", folder, error)
            continue
        if held.is_in_use:
            continue
        _told.add(folder)
        _log.warning(
            "%s holds episodes (%s finished, %s open) of a lake that was at %s before. They are not delivered to the "
            "lake that is there now, and stay where they are: `trajlake spools --lake %s` lists them, and delivers or "
            "deletes them if it is told to",
            folder,
            "?" if held.finished is None else held.finished,
            "?" if held.open is None else held.open,
            owner.address,
            owner.address,
        )


def delete(held: Held) -> bool:
    """Delete a spool with all that it holds; False: a process records into it. Raises OSError."""
    with turn(held.folder.parent), locked(held.folder) as lock:
        if lock is None:
            return False
        shutil.rmtree(held.folder)
    return True
