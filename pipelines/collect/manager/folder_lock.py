"""The lock of a folder of spools: one process on this machine at a time works in it."""

import fcntl
import os
from pathlib import Path

from lake import ids
from lake.errors import LakeAccessError, UsageError

_OWNER = "collect"
"""File in the folder: a name of the folder that no other has, and the process that holds the lock."""


class FolderLock:
    """Held until it is released, or the process ends.

    Args:
        root: the folder; it is made.
        part: names what is collected there.

    Raises:
        UsageError: another process holds it.
        LakeAccessError: the folder cannot be made.
    """

    def __init__(self, root: Path, part: str) -> None:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(root / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LakeAccessError(f"{root}: {error.strerror or error}; set TRAJLAKE_SPOOL to another folder") from error
        said = os.pread(self._file, 100, 0).decode(errors="replace").split()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise UsageError(
                f"run {part!r} is being collected into this lake by process {said[-1] if said else '?'}; wait for it, "
                "or choose another --run"
            ) from error
        self.place = said[0] if len(said) == 2 else ids.to_text(ids.fresh_id())
        """The folder's own name: whoever holds its lock tells by it what earlier processes claimed from here."""
        written = os.pwrite(self._file, f"{self.place} {os.getpid()}\n".encode(), 0)
        os.ftruncate(self._file, written)

    def release(self) -> None:
        """Let another process in."""
        os.close(self._file)
