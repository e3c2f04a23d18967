"""Where spools lie on a machine, and who may make or take one."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lake import ids

LOCK = "lock"
"""Held on the file of this name: in a spool by the process that it belongs to, in a root by who makes or adopts one."""


def root_of(lake_uri: str, part: str) -> Path:
    """Where the spools of a lake are kept on this machine: below TRAJLAKE_SPOOL, else among the user's state.

    Args:
        lake_uri: the lake's folder or address.
        part: which of several programs: each adopts its own.
    """
    given = os.environ.get("TRAJLAKE_SPOOL")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    address = lake_uri.rstrip("/") if "://" in lake_uri else str(Path(lake_uri).expanduser().resolve())
    name = f"{PurePosixPath(address).name}-{ids.to_text(ids.text_hash(address))}"
    return (Path(given) if given else state / "trajlake" / "spool") / name / part


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
