"""Parts of a bucket's data files on a local disk, for processes that read them again and again.

A data file never changes and its name is never used again, so a range of its bytes, once fetched, stays good. All
processes of a user on a machine share the folder: of several that want a range at once, one fetches it.

The folder never holds more than its limit. Where it is full, parts of files that the reader is not interested in make
way, those first that were used the longest ago. Parts of its own files never do: training goes through the same files
pass after pass, and whatever it put out would be what it needs next. What finds no room is read directly.

Each part carries a digest. A part that is damaged, or not whole, is fetched again. Where the disk is full or the folder
cannot be written to, parts are read directly, and that is said once.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lake import ids
from lake.storage import user_cache

if TYPE_CHECKING:
    from lake.storage.bucket_files import Read

KIND = "files"
_DIGEST_BYTES = 16
_LOCKS = 64
"""Locks by which processes agree on who fetches a part; two parts share one now and then."""
_PART, _NEW = ".part", ".new"

_log = logging.getLogger(__name__)


class LocalCache:
    """Parts of some files, within a folder that other caches use, too; safe to use from several threads.

    Args:
        folder: where; it is made if it is missing.
        limit: bytes that the folder may hold, whoever wrote them. Processes should name the same.
        files: URIs of the files that are read.
    """

    def __init__(self, folder: Path, limit: int, files: Collection[str]) -> None:
        self._folder, self._limit = folder, limit
        self._own = frozenset(map(_file_name, files))
        self._writes = True

    def through(self, read: "Read") -> "Read":
        """A function that reads as the given one does, from the disk where it can."""

        def cached(uri: str, start: int, end: int) -> bytes:
            path = self._folder / f"{_file_name(uri)}-{start}-{end}{_PART}"
            if (found := self._found(path, end - start)) is not None:
                return found
            with self._alone(path) if self._writes else nullcontext():
                if (found := self._found(path, end - start)) is not None:
                    return found
                data = read(uri, start, end)
                if self._writes:
                    self._keep(path, data)
            return data

        return cached

    def _found(self, path: Path, size: int) -> bytes | None:
        """The bytes of a part; None if it is not there, or not whole."""
        try:
            with path.open("rb") as file:
                digest, data = file.read(_DIGEST_BYTES), file.read()
            if len(data) != size or digest != _digest(data):
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        """Write a part if there is room for it."""
        new = path.with_suffix(_NEW)
        try:
            with self._locked("lock"):
                # Whoever left this behind is dead: the lock is ours.
                for left in self._folder.glob(f"*{_NEW}"):
                    left.unlink(missing_ok=True)
                if not self._has_room(_DIGEST_BYTES + len(data)):
                    return
                with new.open("xb") as file:
                    file.write(_digest(data))
                    file.write(data)
                new.replace(path)
        except OSError as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            self._give_up(error)

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes fit, once parts of other files have made way."""
        parts = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_PART):
                with suppress(FileNotFoundError):  # damaged, and just removed by its reader
                    status = entry.stat()
                    parts.append((status.st_mtime, entry.name, status.st_size))
        used = sum(part_size for _, _, part_size in parts)
        for _, name, part_size in sorted(parts):
            if used + size <= self._limit:
                return True
            if name.partition("-")[0] not in self._own:
                (self._folder / name).unlink(missing_ok=True)
                used -= part_size
        return used + size <= self._limit

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """No other process, and no other thread, fetches the same part meanwhile."""
        number = int.from_bytes(hashlib.blake2b(path.name.encode(), digest_size=2).digest()) % _LOCKS
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = _lock(self._folder / f"fetch-{number}.lock")
        except OSError as error:
            self._give_up(error)
            descriptor = None
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = _lock(self._folder / name)
        try:
            yield
        finally:
            os.close(descriptor)

    def _give_up(self, error: OSError) -> None:
        """Write no more; what is there is still read."""
        if self._writes:
            self._writes = False
            _log.warning(
                "%s cannot keep what is read from the bucket (%s): it is read directly, each time anew; make room, or "
                "set %s to a folder on another disk",
                self._folder,
                error.strerror or error,
                user_cache.ENVIRONMENT,
            )


def erase() -> None:
    """Delete all that this machine keeps of data files."""
    for folder in user_cache.folders(KIND):
        for pattern in (f"*{_PART}", f"*{_NEW}"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """A descriptor that holds a lock until it is closed, by its process's end at the latest."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _file_name(uri: str) -> str:
    return ids.to_text(ids.key_hash("file", uri))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
