"""Parts of a bucket's data files on a local disk, for processes that read them again and again.

A data file never changes and its name is never used again, so a range of its bytes, once fetched, stays good. All
processes of a user on a machine share the folder: of several that want a range at once, one fetches it.

The folder never holds more than its limit. Where it is full, parts of files that the reader is not interested in make
way, those first that were used the longest ago. Parts of its own files never do: training goes through the same files
pass after pass, and whatever it put out would be what it needs next. What finds no room is read directly: from then on
nothing of its size waits for other processes. How much the folder holds is written in its lock, for all of them; a
process goes through the folder when it begins, and when a part would cross the limit.

Each part carries a digest. A part that is damaged, or not whole, is fetched again. Where the disk is full, or the
user's folder cannot be used, parts are read directly, and that is said once.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lake import ids
from lake.errors import LakeAccessError
from lake.storage import user_cache

if TYPE_CHECKING:
    from lake.storage.bucket_files import Read

KIND = "files"
_DIGEST_BYTES = 16
_LOCKS = 64
"""Locks by which processes agree on who fetches a part; two parts share one now and then."""
_LOCK = "lock"
"""Whoever holds it may add parts and remove those of others. It says how many bytes the parts have, or a few more."""
_TOTAL_BYTES = 8
_PART, _NEW = ".part", ".new"

_log = logging.getLogger(__name__)


def through_disk(read: "Read", limit: int, files: Collection[str]) -> "Read":
    """A function that reads as the given one does, from the user's folder where there is one.

    Args:
        read: reads a range of a file in a bucket.
        limit: bytes that the folder may hold.
        files: URIs of the files that are read.
    """
    try:
        folder = user_cache.shared(KIND)
    except OSError as error:
        _say(str(error.filename), error.strerror or str(error))
        return read
    return LocalCache(folder, limit, files).through(read)


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
        self._scanned = False
        self._spare = limit
        """Bytes that parts of our own files leave; as they stay, larger parts need not try."""

    def through(self, read: "Read") -> "Read":
        """A function that reads as the given one does, from the disk where it can."""

        def cached(uri: str, start: int, end: int) -> bytes:
            path = self._folder / f"{_file_name(uri)}-{start}-{end}{_PART}"
            if (found := self._found(path, end - start)) is not None:
                return found
            if not self._writes or _DIGEST_BYTES + end - start > self._spare:
                return read(uri, start, end)
            with self._alone(path):
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
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        """Write a part if there is room for it."""
        new, size = path.with_suffix(_NEW), _DIGEST_BYTES + len(data)
        try:
            with _locked(self._folder / _LOCK) as lock:
                used = int.from_bytes(os.pread(lock, _TOTAL_BYTES, 0))
                if not self._scanned or used + size > self._limit:
                    used = self._make_room(size)
                    self._scanned = True
                if used + size > self._limit:
                    return
                # Before the part is there: of a process that is killed in between the total is too high, never too low.
                os.pwrite(lock, (used + size).to_bytes(_TOTAL_BYTES), 0)
                with open(new, "wb", opener=_open_privately) as file:
                    file.write(_digest(data))
                    file.write(data)
                new.replace(path)
        except OSError as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            self._give_up(error)

    def _make_room(self, size: int) -> int:
        """Bytes of all parts, once those of other files have made way for so many; all stay if that is not enough."""
        own, others = 0, []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Removed meanwhile: damaged, by its reader.
                with suppress(FileNotFoundError):
                    if entry.name.endswith(_NEW):
                        Path(entry).unlink()  # whoever left this behind is dead: the lock is ours
                    elif entry.name.endswith(_PART):
                        status = entry.stat()
                        if entry.name.partition("-")[0] in self._own:
                            own += status.st_size
                        else:
                            others.append((status.st_mtime, entry.name, status.st_size))
        self._spare = self._limit - own
        used = own + sum(part_size for _, _, part_size in others)
        if size > self._spare:
            return used
        for _, name, part_size in sorted(others):
            if used + size <= self._limit:
                break
            (self._folder / name).unlink(missing_ok=True)
            used -= part_size
        return used

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

    def _give_up(self, error: OSError) -> None:
        """Write no more; what is there is still read."""
        if self._writes:
            self._writes = False
            _say(str(self._folder), error.strerror or str(error))


def erase() -> None:
    """Delete all that this machine keeps of data files for this user; call it once they are gone from the bucket.

    It waits for fetches under way, which may have begun before that. Raises LakeAccessError: it may not be deleted.
    """
    for folder in user_cache.folders(KIND):
        try:
            _erase(folder)
        except OSError as error:
            msg = f"{folder} may still hold forgotten rows and cannot be changed ({error.strerror}); delete it yourself"
            raise LakeAccessError(msg) from error


def _erase(folder: Path) -> None:
    # Whoever fetches holds one of these until the part is written.
    for fetch in folder.glob("fetch-*.lock"):
        with _locked(fetch):
            pass
    with _locked(folder / _LOCK):
        for pattern in (f"*{_PART}", f"*{_NEW}"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


@cache
def _say(folder: str, reason: str) -> None:
    """Once in a process, however many readers it has."""
    _log.warning(
        "%s cannot keep what is read from the bucket (%s): it is read directly, each time anew; make room, or set %s "
        "to a folder of your own on another disk",
        folder,
        reason,
        user_cache.ENVIRONMENT,
    )


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = _lock(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """A descriptor that holds a lock until it is closed, by its process's end at the latest."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _file_name(uri: str) -> str:
    return ids.to_text(ids.key_hash("file", uri))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
