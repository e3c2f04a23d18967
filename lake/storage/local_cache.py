"""The user's cache folder on this machine, and cached parts of a bucket's data files in it.

`TRAJLAKE_CACHE` moves the folder, or else `XDG_CACHE_HOME`, as for other programs. It may be deleted at any time. It
must belong to the user and be private: another user could read the lake's texts there or replace them. Without such a
folder, a process that needs one uses a temporary folder.

A data file never changes and its name is never used again, so a fetched range of its bytes stays valid. All processes
of a user on a machine share the folder. If several need a range at once, one fetches it.

The folder never exceeds its limit. When it is full, parts of files that the reader does not use are removed, least
recently used first. Parts of the reader's files stay: training reads the same files in each pass, so a removed part
would soon be needed again. Parts without room are read directly, and later parts of that size no longer wait for other
processes. The lock file records the size of the folder for all processes. A process lists the folder when it starts and
when a part would exceed the limit.

Each part has a digest. A damaged or incomplete part is fetched again. If the disk is full or the folder is unusable,
parts are read directly and a warning is logged once.
"""

import errno
import hashlib
import logging
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lake import ids
from lake.errors import LakeAccessError
from lake.storage.atomic import PARTIAL, write_atomically
from lake.storage.locks import hold_file_lock

if TYPE_CHECKING:
    from lake.storage.buckets import ReadRange

CACHE_VARIABLE = "TRAJLAKE_CACHE"


def cache_path(kind: str) -> Path:
    """Return the folder for files of a kind; it may not exist. Raises OSError: the user has no home folder."""
    root = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(root or Path.home() / ".cache", "trajlake", kind)
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", "~/.cache/trajlake") from error


def require_cache_folder(kind: str) -> Path:
    """Create and return the private folder that all processes of the user share.

    Raises OSError: the folder cannot be created, or belongs to another user.
    """
    folder = cache_path(kind)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


def ensure_cache_folder(kind: str) -> Path:
    """Return the shared folder, or else a private temporary folder of this process."""
    try:
        return require_cache_folder(kind)
    except OSError:
        return Path(_process_folder(kind).name)


def list_cache_folders(kind: str) -> list[Path]:
    """Return all folders that may hold files of a kind: the shared one, if it is the user's, and this process's own."""
    paths = [Path(_process_folder(kind).name)] if _process_folder.cache_info().currsize else []
    with suppress(OSError):
        path = cache_path(kind)
        if (
            path.stat().st_uid == os.geteuid()
        ):  # in another's folder is nothing of ours: `require_cache_folder` refuses it
            paths.append(path)
    return paths


@cache
def _process_folder(kind: str) -> tempfile.TemporaryDirectory[str]:
    """Create a folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix=f"trajlake-{kind}-")


KIND = "files"
_DIGEST_BYTES = 16
_LOCKS = 64
"""Number of locks with which processes agree on who fetches a part; two parts may share one."""
_LOCK = "lock"
"""File whose lock allows adding and removing parts. It records the total bytes of all parts, or slightly more."""
_TOTAL_BYTES = 8
_PART, _FETCH_LOCK = ".part", ".lock"

_log = logging.getLogger(__name__)


def cache_reads(read: "ReadRange", limit: int, files: Collection[str]) -> "ReadRange":
    """Return a function that reads like the given one, through the user's folder if there is one.

    Args:
        read: reads a range of a file in a bucket.
        limit: bytes that the folder may hold.
        files: URIs of the files that are read.
    """
    try:
        folder = require_cache_folder(KIND)
    except OSError as error:
        _warn_once(str(error.filename), error.strerror or str(error))
        return read
    return LocalCache(folder, limit, files).through(read)


class LocalCache:
    """Parts of some files in a folder that other caches use too; several threads may use it.

    Args:
        folder: the folder, created if it is missing.
        limit: bytes that the folder may hold in total. All processes should use the same limit.
        files: URIs of the files that are read.
    """

    def __init__(self, folder: Path, limit: int, files: Collection[str]) -> None:
        self._folder, self._limit = folder, limit
        self._own_files = frozenset(map(_file_name, files))
        self._writes = True
        self._scanned = False
        self._spare = limit
        """Bytes left by the parts of our own files, which stay; larger parts are not written."""

    def through(self, read: "ReadRange") -> "ReadRange":
        """Return a function that reads like the given one, from the disk if possible."""

        def cached(uri: str, start: int, end: int) -> bytes:
            path = self._folder / f"{_file_name(uri)}-{start}-{end}{_PART}"
            if (part := self._read_part(path, end - start)) is not None:
                return part
            if not self._writes or _DIGEST_BYTES + end - start > self._spare:
                return read(uri, start, end)
            with self._lock_fetch(path):
                if (part := self._read_part(path, end - start)) is not None:
                    return part
                data = read(uri, start, end)
                if self._writes:
                    self._write_part(path, data)
            return data

        return cached

    def _read_part(self, path: Path, size: int) -> bytes | None:
        """Return the bytes of a part; None if it is missing or incomplete."""
        try:
            with path.open("rb") as file:
                digest, data = file.read(_DIGEST_BYTES), file.read()
            if len(data) != size or digest != _digest(data):
                path.unlink(missing_ok=True)
                return None
        except FileNotFoundError:
            return None
        except OSError as error:
            self._stop_writing(error)
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def _write_part(self, path: Path, data: bytes) -> None:
        """Write a part if there is room for it."""
        size = _DIGEST_BYTES + len(data)
        try:
            with hold_file_lock(self._folder / _LOCK) as lock:
                assert lock is not None
                used = int.from_bytes(os.pread(lock, _TOTAL_BYTES, 0))
                if not self._scanned or used + size > self._limit:
                    used = self._make_room(size)
                    self._scanned = True
                if used + size > self._limit:
                    return
                # The total is written first: if the process is killed in between, it is too high but never too low.
                os.pwrite(lock, (used + size).to_bytes(_TOTAL_BYTES), 0)
                # The digest shows what a power cut left, so the disk need not be waited for.
                write_atomically(path, _digest(data), data, mode=0o600, sync=False)
        except OSError as error:
            self._stop_writing(error)

    def _make_room(self, size: int) -> int:
        """Remove parts of other files until `size` bytes fit, if they can, and return the bytes of all parts."""
        own_bytes, removable = 0, []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Another reader may remove a damaged part.
                with suppress(FileNotFoundError):
                    if entry.name.endswith(PARTIAL):
                        Path(entry).unlink()  # its writer is dead, since we hold the lock
                    elif entry.name.endswith(_PART):
                        status = entry.stat()
                        if entry.name.partition("-")[0] in self._own_files:
                            own_bytes += status.st_size
                        else:
                            removable.append((status.st_mtime, entry.name, status.st_size))
        self._spare = self._limit - own_bytes
        used = own_bytes + sum(part_size for _, _, part_size in removable)
        if size > self._spare:
            return used
        for _, name, part_size in sorted(removable):
            if used + size <= self._limit:
                break
            (self._folder / name).unlink(missing_ok=True)
            used -= part_size
        return used

    @contextmanager
    def _lock_fetch(self, path: Path) -> Iterator[None]:
        """Keep other processes and threads from fetching the same part, until the context ends."""
        number = int.from_bytes(hashlib.blake2b(path.name.encode(), digest_size=2).digest()) % _LOCKS
        with ExitStack() as stack:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(hold_file_lock(self._folder / f"fetch-{number}{_FETCH_LOCK}"))
            except OSError as error:
                self._stop_writing(error)
            yield

    def _stop_writing(self, error: OSError) -> None:
        """Write no more parts; existing ones are still read."""
        if self._writes:
            self._writes = False
            _warn_once(str(self._folder), error.strerror or str(error))


def erase_cached_files() -> None:
    """Delete all cached data files of this user on this machine; call it after they are deleted from the bucket.

    It waits for running fetches, which may have started before the deletion. Raises LakeAccessError: it may not delete.
    """
    for folder in list_cache_folders(KIND):
        try:
            # A process that fetches holds one of these locks until the part is written.
            for fetch in folder.glob(f"*{_FETCH_LOCK}"):
                with hold_file_lock(fetch):
                    pass
            with hold_file_lock(folder / _LOCK):
                for path in folder.iterdir():
                    if path.name != _LOCK and path.suffix != _FETCH_LOCK:
                        path.unlink(missing_ok=True)
        except OSError as error:
            msg = f"{folder} may still hold forgotten rows and cannot be changed ({error.strerror}); delete it yourself"
            raise LakeAccessError(msg) from error


@cache
def _warn_once(folder: str, reason: str) -> None:
    """Log a warning once per process, for any number of readers."""
    _log.warning(
        "%s cannot cache files of the bucket (%s): they are read directly each time; make room, or set %s "
        "to your own folder on another disk",
        folder,
        reason,
        CACHE_VARIABLE,
    )


def _file_name(uri: str) -> str:
    return ids.to_text(ids.key_hash("file", uri))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
