"""The spool: a log on disk between whatever records and the lake, which survives the death of its process.

Appending puts a payload into memory and returns; a thread writes what has gathered every few milliseconds and syncs it
to the disk once for all of it. `sync` waits for that. What cannot be written (a full disk) stays in memory and is tried
again; both the disk and the memory are bounded, and a spool says when it is full.

A spool is a folder below a root, one for each process that writes, locked while its process is alive. A folder whose
lock is free belonged to a process that is dead: `adopt` takes it over, cut at its last whole frame. The log is trimmed
from its beginning only, so a later frame that speaks of an earlier one outlives it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lake.errors import LakeAccessError, TrajlakeError
from lake.formats.base.secrets import KeylessRecords
from lake.live.bell import Bell, TimeLimit
from lake.live.owners import Owner, is_taken_by, read_owner, write_owner
from lake.live.places import LOCK, turn
from lake.live.segments import (
    FRAME_BYTES,
    HEADER_BYTES,
    LARGEST_PAYLOAD,
    START,
    Position,
    framed,
    mended,
    new_header,
    numbers,
    path_of,
    read,
    whole_bytes,
    whole_frames,
    write,
)
from lake.storage.atomic import sync_path

MAX_BYTES = 1 << 30
SEGMENT_BYTES = 16 << 20
BUFFER_BYTES = 64 << 20
GROUP_SECONDS = 0.005
"""How long frames gather before they are synced together, unless somebody waits for them."""
_SLOW_DISK = 16 << 20
"""Bytes a second: memory that is full is no reason to lose a frame while a disk that has room is writing."""
_LONGEST_PAUSE = 2.0
"""Seconds between two tries to write to a disk that refuses."""
_TOLD_EVERY = 60.0
"""Seconds between two warnings that the disk refuses: a nearly full one takes and refuses in turn."""
_CLOSING_SECONDS = 5.0
_log = logging.getLogger("trajlake")
_log.addFilter(KeylessRecords())
_sync_data = getattr(os, "fdatasync", os.fsync)


class SpoolFullError(TrajlakeError, RuntimeError):
    """There is no room for a frame; nothing of it was taken."""


class Spool:
    """One folder of segments, and the only process that writes to it. Thread-safe.

    Made by `create` and `adopt`.
    """

    def __init__(
        self, folder: Path, lock: int, max_bytes: int, segment_bytes: int, buffer_bytes: int, owner: Owner | None = None
    ) -> None:
        self.folder = folder
        self.owner = owner
        """The lake that its frames are for; None if it was written by an earlier version."""
        self.cut_bytes = 0
        """Bytes of an adopted spool that were not whole."""
        self.problem: str | None = None
        """Why it cannot be written at the moment."""
        self._lock_file = lock
        self._max_bytes, self._buffer_bytes = max_bytes, buffer_bytes
        # The segment that is written is not deleted: one that could take all the room would never make some.
        self._segment_bytes = min(segment_bytes, max_bytes // 8)
        self._ends: dict[int, int] = {}
        """Segment -> its bytes that are whole and synced."""
        self._number = 0
        self._file: int | None = None
        """Of the segment that is written; None if the next frame begins one."""
        self._header = b""
        self._state = threading.Condition()
        self._bell = Bell()
        self._pending: list[bytes] = []
        self.held_bytes = 0
        """Of frames that are in memory, those that are being written among them."""
        self._appended = self._synced = 0
        """Frames."""
        self._waited_at = -1  # frames on the disk when a wait for room was in vain: nobody waits before there are more
        self._is_closing, self._told_at = False, -_TOLD_EVERY
        self._thread: threading.Thread | None = None
        self.limit = TimeLimit(None)  # of waits for room, once it is going to be closed

    @classmethod
    def create(
        cls,
        root: Path,
        *,
        owner: Owner | None = None,
        max_bytes: int = MAX_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> Self:
        """A new spool of this process.

        Args:
            root: made if it is missing, for its owner alone: what agents say may be private.
            owner: the lake that its frames are for.
            max_bytes: of the disk; frames that would go beyond are refused.
            segment_bytes: a file that is longer, or than an eighth of `max_bytes`, is followed by another.
            buffer_bytes: of the memory, before they are on the disk.

        Raises:
            LakeAccessError: the folder cannot be made.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with turn(root):
                folder = root / f"{os.getpid()}-{secrets.token_hex(4)}"
                folder.mkdir(mode=0o700)
                lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if owner is not None:
                    write_owner(folder, owner)
        except OSError as error:
            msg = f"{root}: {error.strerror or error}; name another folder for the spool, or change its permissions"
            raise LakeAccessError(msg) from error
        return cls(folder, lock, max_bytes, segment_bytes, buffer_bytes, owner)

    @classmethod
    def adopt(
        cls,
        root: Path,
        *,
        owner: Owner | None = None,
        max_bytes: int = MAX_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> list[Self]:
        """Take over the spools below a root whose processes are dead, each cut at its last whole frame.

        One that cannot be read is left where it is, and told of in the log.

        Args:
            root: looked at if it is there.
            owner: take those alone that were recorded for this lake, and leave the others as they are.
            max_bytes: see `create`.
            segment_bytes: see `create`.
            buffer_bytes: see `create`.
        """
        found: list[Self] = []
        if not root.is_dir():
            return found
        with turn(root):
            for folder in sorted(path for path in root.iterdir() if path.is_dir()):
                try:
                    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                except OSError as error:
                    _log.warning("the spool %s cannot be taken over: %s", folder, error)
                    continue
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    spool = cls(folder, lock, max_bytes, segment_bytes, buffer_bytes, read_owner(folder))
                    if owner is not None and not is_taken_by(owner, spool.owner):
                        os.close(lock)
                        continue
                    spool._load()
                except BlockingIOError:
                    os.close(lock)
                except (OSError, TrajlakeError) as error:
                    os.close(lock)
                    _log.warning("the spool %s cannot be taken over: %s", folder, error)
                else:
                    found.append(spool)
        return found

    @classmethod
    def read_only(cls, folder: Path) -> Self:
        """Look at a spool whose lock the caller holds; nothing is written to it, and nothing is closed.

        Raises:
            LakeVersionError: it was written by a version that this one does not know.
            OSError: it cannot be read.
        """
        spool = cls(folder, -1, MAX_BYTES, SEGMENT_BYTES, BUFFER_BYTES)
        spool._ends = {number: end for number in numbers(folder) if (end := whole_bytes(path_of(folder, number))[0])}
        return spool

    def assign(self, owner: Owner) -> None:
        """Say which lake the frames are for. Raises OSError."""
        write_owner(self.folder, owner)
        self.owner = owner

    @property
    def size(self) -> int:
        """On the disk and in memory."""
        return sum(list(self._ends.values())) + self.held_bytes

    @property
    def is_roomy(self) -> bool:
        """Whether less than half of it is taken."""
        return 2 * self.size < self._max_bytes

    @property
    def is_busy(self) -> bool:
        """Whether more than half of the memory for what is not written yet is taken."""
        return 2 * self.held_bytes > self._buffer_bytes

    def append(self, payload: bytes, *, wait: float = 0.0, is_reserved: bool = False) -> None:
        """Take a frame; it is in memory when this returns, and on the disk soon after: see `sync`.

        Args:
            payload: not empty.
            wait: seconds to wait for room, if there is none; some if the disk has room, and is writing.
            is_reserved: take it even if there is no room: for small frames that let others go.

        Raises:
            SpoolFullError: there is no room, or the spool is closed.
        """
        size = len(payload) + FRAME_BYTES
        with self._state:
            if not is_reserved and not self._has_room(size) and not self._wait_for_room(size, wait):
                raise SpoolFullError(self._why_full(size))
            if self._is_closing:
                raise SpoolFullError(f"the spool {self.folder} is closed")
            self._pending.append(payload)
            self.held_bytes += size
            self._appended += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trajlake-spool", daemon=True)
                self._thread.start()
            if len(self._pending) == 1:
                self._bell.ring()

    def sync(self, timeout: float | None = None, *, unless_refused: bool = False) -> bool:
        """Wait until what was appended before is on the disk; False if that took longer than `timeout` seconds.

        Args:
            timeout: seconds; without end unless given.
            unless_refused: stop waiting when the disk refuses; it is tried again all the same.
        """
        with self._state:
            goal = self._appended
            self._bell.ring(is_urgent=True)
            self._state.wait_for(lambda: self._synced >= goal or (unless_refused and self.problem is not None), timeout)
            return self._synced >= goal

    def frames(self, since: Position = START) -> Iterator[tuple[Position, bytes]]:
        """The frames behind a position that are on the disk, in order. Raises OSError."""
        with self._state:
            ends = sorted(self._ends.items())
        for number, end in ends:
            start = max(HEADER_BYTES, since.offset + since.length if number == since.segment else 0)
            if number < since.segment or start >= end:
                continue
            header, data = read(path_of(self.folder, number), start, end)
            for offset, payload in whole_frames(data, header, start):
                yield Position(number, offset, len(payload)), payload

    def payload(self, at: Position) -> bytes:
        """One frame's payload. Raises OSError."""
        return read(path_of(self.folder, at.segment), at.offset, at.offset + at.length)[1]

    def trim(self, before: Position) -> None:
        """Delete the segments that end before a position: nobody needs their frames any more. Raises OSError."""
        with self._state:
            written = None if self._file is None else self._number
            for number, end in sorted(self._ends.items()):
                if number == written or (number, end) > before[:2]:
                    break
                path_of(self.folder, number).unlink(missing_ok=True)
                del self._ends[number]
            self._state.notify_all()

    def close(self, *, remove: bool = False, timeout: float = _CLOSING_SECONDS) -> bool:
        """Write what is in memory and let go of the folder; whether all of it could be written in time.

        Args:
            remove: delete the folder, as all of it was delivered; not if there is something left in memory.
            timeout: seconds.
        """
        with self._state:
            self._is_closing = True
            self._bell.ring(is_urgent=True)
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        if remove and not self._pending:
            with contextlib.suppress(OSError), turn(self.folder.parent):
                shutil.rmtree(self.folder)
        self.abandon()
        return not self._pending

    def abandon(self) -> None:
        """Close the files and nothing else: for a forked child, whose parent goes on with this spool."""
        for descriptor in (self._file, self._lock_file):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._file = None
        self._lock_file = -1

    def _has_room(self, size: int) -> bool:
        # A frame that is longer than the buffer is taken beside what little there is. Nobody waits for a closed spool.
        is_buffered = self.held_bytes + min(size, self._buffer_bytes // 2) <= self._buffer_bytes
        return self._is_closing or (is_buffered and self.size + size <= self._max_bytes and size <= LARGEST_PAYLOAD)

    def _wait_for_room(self, size: int, seconds: float) -> bool:
        can_ever_fit = size + HEADER_BYTES <= min(self._max_bytes, LARGEST_PAYLOAD)
        has_disk = self.size + size <= self._max_bytes and self.problem is None
        if has_disk and self._waited_at != self._synced:
            seconds = max(seconds, 1.0 + self.held_bytes / _SLOW_DISK)
        seconds = min(seconds, self.limit.left)
        found = can_ever_fit and seconds > 0 and self._state.wait_for(lambda: self._has_room(size), seconds)
        self._waited_at = self._waited_at if found else self._synced
        return found

    def _why_full(self, size: int) -> str:
        reason = f" because {self.problem}" if self.problem else ""
        return (
            f"the spool {self.folder} has no room for {size:,} bytes{reason}: it holds {self.size:,} of "
            f"{self._max_bytes:,} bytes, {self.held_bytes:,} of them in memory"
        )

    def _load(self) -> None:
        self._number, self._ends, self.cut_bytes = mended(self.folder)
        if self.cut_bytes:
            _log.warning(
                "the spool %s ends in %d bytes that are not whole: they were being written when its process died, or "
                "the disk damaged them; the frames before them are kept",
                self.folder,
                self.cut_bytes,
            )

    def _run(self) -> None:
        """What the writing thread does."""
        pause, limit = GROUP_SECONDS, self._segment_bytes
        while True:
            self._bell.gather(pause)
            with self._state:
                batch = self._next_batch(limit)
                is_closing = self._is_closing
            if not batch:
                if is_closing:
                    return
                continue
            try:
                self._write(batch)
            except OSError as error:
                self._fail(error)
                if is_closing:
                    return
                pause = min(pause * 2, _LONGEST_PAUSE)
                # Less may still fit.
                limit = sum(map(len, batch)) // 2
            else:
                pause, limit = GROUP_SECONDS, self._segment_bytes
            if self._pending or self._is_closing:
                self._bell.ring()

    def _next_batch(self, limit: int) -> list[bytes]:
        """The frames that are written together: the first one, and more up to about `limit` bytes."""
        size, count = 0, 0
        while count < len(self._pending) and (not count or size < limit):
            size += len(self._pending[count])
            count += 1
        return self._pending[:count]

    def _write(self, batch: list[bytes]) -> None:
        """Put frames on the disk and let whoever waits for them go on. Raises OSError; then none of them counts."""
        file = self._file if self._file is not None else self._begin()
        start = self._ends[self._number]
        data = framed(batch, self._header, start)
        write(file, data, start)
        _sync_data(file)
        if not os.fstat(file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "its files were deleted while it was in use", str(self.folder))
        with self._state:
            self._ends[self._number] = start + len(data)
            del self._pending[: len(batch)]
            self.held_bytes -= len(data)
            self._synced += len(batch)
            if not self._pending:
                # Not before: a disk that is nearly full takes a small frame and refuses the next.
                self.problem = None
            self._state.notify_all()
        if start + len(data) > self._segment_bytes:
            os.close(file)
            self._file = None

    def _begin(self) -> int:
        """Begin the next segment; its file. Raises OSError."""
        header = new_header()
        file = os.open(path_of(self.folder, self._number + 1), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write(file, header, 0)
            sync_path(self.folder)
        except OSError:
            os.close(file)
            raise
        with self._state:
            self._number += 1
            self._header, self._file = header, file
            self._ends[self._number] = HEADER_BYTES
        return file

    def _fail(self, error: OSError) -> None:
        """Leave the segment at its last good byte: after a failed sync nobody knows what its later pages hold."""
        if time.monotonic() - self._told_at > _TOLD_EVERY:
            self._told_at = time.monotonic()
            _log.warning("the spool %s cannot be written and is tried again: %s", self.folder, error)
        with self._state:
            self.problem = error.strerror or str(error)
            self._state.notify_all()
        if self._file is not None:
            end = self._ends[self._number]
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
            if end == HEADER_BYTES:
                # A disk that takes the header alone would collect one with each try.
                path_of(self.folder, self._number).unlink(missing_ok=True)
                with self._state:
                    del self._ends[self._number]
