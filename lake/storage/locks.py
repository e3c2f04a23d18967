"""Locks on files, by which the processes of a machine keep each other out.

The kernel frees a lock when the last process that has the file open ends, so no lock goes stale, and a child process
may inherit one. Only this user can open the files. A holder may write into the file, for example its process id.
A holder may also delete the file, because a lock counts only while its file has its name.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def lock_file(path: Path | str, *, is_shared: bool = False) -> int:
    """Wait for the lock of a file, which is created if missing, and return the open file; closing it frees the lock.

    Raises OSError: the file cannot be opened, or its file system has no locks.
    """
    descriptor = _lock(path, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
    assert descriptor is not None, "it waits until the lock is free"
    return descriptor


def try_lock_file(path: Path | str, *, is_optional: bool = False) -> int | None:
    """Lock a file as `lock_file`, but return None if another process holds the lock.

    Args:
        is_optional: return the open file without a lock if its file system has none.
    """
    return _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, is_optional=is_optional)


@contextmanager
def hold_file_lock(path: Path | str, *, wait: bool = True) -> Iterator[int | None]:
    """Hold the lock of a file in a context; yield the open file, or None if it does not wait for another process."""
    descriptor = lock_file(path) if wait else try_lock_file(path)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            # Closing is not enough, because a process that was forked in between has the file open too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def is_only_holder(descriptor: int) -> bool:
    """Return whether no other process holds a shared lock, which this process keeps."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        # flock drops the shared lock before it tries to convert it, even if the conversion fails.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return True


def _lock(path: Path | str, mode: int, *, is_optional: bool = False) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            if is_optional:
                return descriptor
            os.close(descriptor)
            raise
        # The former holder may have deleted the file, so another file may have the name now.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), Path(path).stat()):
                return descriptor
        os.close(descriptor)
