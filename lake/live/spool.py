"""The spool: a log on local disk between a recorder and the lake. It survives the death of its process.

Appending a frame puts it into memory and returns. A thread writes the gathered frames every few milliseconds, and syncs
them to disk together. `sync` waits for that. Frames that cannot be written (a full disk) stay in memory and are
retried. Disk and memory are bounded, and appending to a full spool raises an error.

Each writing process has a spool: a folder below a root, locked while the process is alive. If the lock is free, the
process is dead: `adopt` takes the spool over and cuts it after its last whole frame. The log is trimmed only at its
beginning, so a frame that refers to an earlier one outlives it.

A spool's files are segments, `NUMBER.frames`. A segment has a header of 16 bytes (a magic word and 8 random bytes),
then frames. A frame is the length of its payload and a CRC-32 (both little-endian uint32), then the payload. The CRC
also covers the header, the frame's offset and its length, so that misplaced blocks of a file system are not valid
frames. Reading stops at the first invalid frame, because later frames may depend on it.

An agent may record in a signal handler or a destructor, and so interrupt itself while it wakes the writing thread.
`WakeupSignal` is reentrant, because another lock (such as that of `threading.Event`) would deadlock.
"""

import asyncio
import contextlib
import errno
import logging
import os
import queue
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from lake.errors import LakeAccessError, LakeVersionError, TrajlakeError
from lake.live.owners import LOCK, Owner, lock_root, may_adopt, read_owner, write_owner
from lake.retries import compute_pause
from lake.secrets import KeylessRecords
from lake.storage.atomic import sync_path
from lake.storage.locks import lock_file, try_lock_file

MAGIC = b"TRJSPL01"
HEADER_BYTES = 16
FRAME_BYTES = 8
"""Bytes of a frame before its payload."""
LARGEST_PAYLOAD = 2**31 - 1
SUFFIX = ".frames"
MAX_BYTES = 1 << 30
SEGMENT_BYTES = 16 << 20
BUFFER_BYTES = 64 << 20
GROUP_SECONDS = 0.005
"""How long frames gather before a sync that nothing waits for."""
_FRAME = struct.Struct("<II")
_COVERED = struct.Struct("<QI")
_SLOW_DISK = 16 << 20
"""Bytes per second of a slow disk. While such a disk is writing, appending waits for memory instead of failing."""
_LONGEST_PAUSE = 2.0
"""Seconds between two tries to write to a failing disk."""
_LOG_INTERVAL = 60.0
"""Seconds between two warnings about a failing disk, because a nearly full one fails only now and then."""
_CLOSING_SECONDS = 5.0
_log = logging.getLogger("trajlake")
_log.addFilter(KeylessRecords())
_sync_data = getattr(os, "fdatasync", os.fsync)


# ------------------------------------------------------------ segments


class Position(NamedTuple):
    """Position of a frame's payload in a spool; in the order of appending."""

    segment: int
    offset: int
    length: int


START = Position(0, 0, 0)
"""The position before all frames."""


def segment_path(folder: Path, number: int) -> Path:
    """Return the file of a segment."""
    return folder / f"{number:08d}{SUFFIX}"


def list_segments(folder: Path) -> list[int]:
    """Return the numbers of a folder's segments in order."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def new_header() -> bytes:
    """Return the first bytes of a new segment, different for each."""
    return MAGIC + secrets.token_bytes(HEADER_BYTES - len(MAGIC))


def pack_frames(payloads: Iterable[bytes], header: bytes, offset: int) -> bytes:
    """Return the bytes of frames that will be written at an offset of a segment."""
    seed = zlib.crc32(header)
    packed = []
    for payload in payloads:
        crc = zlib.crc32(payload, zlib.crc32(_COVERED.pack(offset, len(payload)), seed))
        packed += [_FRAME.pack(len(payload), crc), payload]
        offset += FRAME_BYTES + len(payload)
    return b"".join(packed)


def read_frames(data: bytes, header: bytes, offset: int = HEADER_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (offset of the payload in the segment, payload) of the frames up to the first invalid one.

    Args:
        data: bytes of a segment from a frame's beginning on.
        header: the segment's first 16 bytes.
        offset: offset of `data` in the segment.
    """
    seed, at, view = zlib.crc32(header), 0, memoryview(data)
    while at + FRAME_BYTES <= len(view):
        length, crc = _FRAME.unpack_from(view, at)
        payload = view[at + FRAME_BYTES : at + FRAME_BYTES + length]
        covered = zlib.crc32(_COVERED.pack(offset + at, length), seed)
        # Blocks that a file system never wrote are zeros; no frame is empty.
        if not length or len(payload) != length or zlib.crc32(payload, covered) != crc:
            return
        yield offset + at + FRAME_BYTES, bytes(payload)
        at += FRAME_BYTES + length


def measure_segment(path: Path) -> tuple[int, int]:
    """Return (valid bytes, invalid bytes after them) of a segment; with an invalid header, no byte is valid.

    Raises LakeVersionError: a later version wrote the segment; OSError: it cannot be read.
    """
    data = path.read_bytes()
    header = data[:HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return 0, len(data)
    if header[: len(MAGIC)] != MAGIC:
        if header.startswith(MAGIC[:-2]):
            raise LakeVersionError(f"{path} was written by a newer trajlake; start the recorder with that version once")
        return 0, len(data)
    end = HEADER_BYTES
    for offset, payload in read_frames(data[HEADER_BYTES:], header):
        end = offset + len(payload)
    return end, len(data) - end


def repair_segments(folder: Path) -> tuple[int, dict[int, int], int]:
    """Return (newest segment, valid bytes of each, number of invalid bytes) of a folder whose process died.

    The newest segment is cut after its last valid frame, because the process may have died while writing the next.

    Raises:
        LakeVersionError: a later version wrote a segment.
        OSError: a segment cannot be read or cut.
    """
    segments, ends, cut_bytes = list_segments(folder), dict[int, int](), 0
    for number in segments:
        path = segment_path(folder, number)
        valid, invalid = measure_segment(path)
        cut_bytes += invalid
        if invalid and number == segments[-1]:
            os.truncate(path, valid)
        if valid:
            ends[number] = valid
    return max(segments, default=0), ends, cut_bytes


def read_segment(path: Path, start: int, end: int) -> tuple[bytes, bytes]:
    """Return (header, bytes from start to end) of a segment. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        file.seek(start)
        return header, file.read(end - start)


def write_at(file: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset of an open segment. Raises OSError."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], offset + written)


# ------------------------------------------------------------ waiting


class WakeupSignal:
    """Wakes one thread from any other. Pending notifications coalesce."""

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[bool] = queue.SimpleQueue()  # the only queue with a reentrant `put`

    def notify(self, *, is_urgent: bool = False) -> None:
        """Wake the thread; `is_urgent`: end `gather` at once."""
        self._pending.put(is_urgent)

    def wait(self, seconds: float) -> None:
        """Wait for a notification, at most so many seconds."""
        with contextlib.suppress(queue.Empty):
            self._pending.get(timeout=seconds)
        self._clear()

    def gather(self, seconds: float) -> None:
        """Wait for a notification, then so many seconds for more, unless one is urgent."""
        is_urgent, until = self._pending.get(), time.monotonic() + seconds
        while not is_urgent and (remaining := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                is_urgent = self._pending.get(timeout=remaining)
        self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._pending.get_nowait()


class TimeLimit:
    """One limit for several waits in a row.

    Args:
        seconds: total of all waits; None sets no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds for the next wait."""
        return threading.TIMEOUT_MAX if self._until is None else max(self._until - time.monotonic(), 0.0)


class GroupSync:
    """Shares disk syncs between the tasks of an event loop that wait at the same time.

    Args:
        sync: blocks until earlier writes are on disk, and returns whether that succeeded.
    """

    def __init__(self, sync: Callable[[], bool]) -> None:
        self._sync = sync
        self._next: asyncio.Task[bool] | None = None
        self._turn = asyncio.Lock()

    async def wait(self) -> bool:
        """Wait until everything written before this call is on disk, and return whether it is."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> bool:
        async with self._turn:
            # Later callers need the next sync, because this one may already be running.
            self._next = None
            return await asyncio.to_thread(self._sync)


# ------------------------------------------------------------ the spool


class SpoolFullError(TrajlakeError, RuntimeError):
    """There is no room for a frame; no part of it was accepted."""


class Spool:
    """One folder of segments, and the only process that writes to it. Thread-safe.

    Use `create`, `adopt` or `read_only` to make one.
    """

    def __init__(
        self, folder: Path, lock: int, max_bytes: int, segment_bytes: int, buffer_bytes: int, owner: Owner | None = None
    ) -> None:
        self.folder = folder
        self.owner = owner
        """The lake that the frames are for; None if an earlier version wrote the spool."""
        self.cut_bytes = 0
        """Invalid bytes of an adopted spool."""
        self.problem: str | None = None
        """Why the spool cannot be written now."""
        self.is_disk_full = False
        self._lock_file = lock
        self._max_bytes, self._buffer_bytes = max_bytes, buffer_bytes
        # The segment that is being written is never deleted. If it could take all the room, none would become free.
        self._segment_bytes = min(segment_bytes, max_bytes // 8)
        self._ends: dict[int, int] = {}
        """Segment -> bytes that are valid and synced."""
        self._number = 0
        self._file: int | None = None
        """File of the current segment; None if the next frame begins a segment."""
        self._header = b""
        self._state = threading.Condition()
        self._writing = threading.Lock()
        """Held while frames are written, so that `move_to_memory` does not change what is pending."""
        self._wakeup = WakeupSignal()
        self._pending: list[bytes] = []
        self.unwritten_bytes = 0
        """Bytes of frames in memory, including those that are being written."""
        self._appended = self._synced = 0
        """Numbers of frames."""
        self._waited_at = -1  # frames on disk when a wait for room failed; the next wait needs more of them
        self._is_closing, self._logged_at = False, -_LOG_INTERVAL
        self._thread: threading.Thread | None = None
        self.limit = TimeLimit(None)  # for waits for room, once the spool will be closed

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
        """Create a spool for this process.

        Args:
            root: folder of spools; created for the current user only, because recordings may be private.
            owner: the lake that the frames are for.
            max_bytes: maximum bytes on disk; frames beyond them are refused.
            segment_bytes: size at which a new segment begins; at most an eighth of `max_bytes`.
            buffer_bytes: maximum bytes in memory.

        Raises:
            LakeAccessError: the folder cannot be made.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with lock_root(root):
                folder = root / f"{os.getpid()}-{secrets.token_hex(4)}"
                folder.mkdir(mode=0o700)
                lock = lock_file(folder / LOCK)
                if owner is not None:
                    write_owner(folder, owner)
        except OSError as error:
            msg = f"{root}: {error.strerror or error}; name another folder for the spool, or change its permissions"
            raise LakeAccessError(msg) from error
        return cls(folder, lock, max_bytes, segment_bytes, buffer_bytes, owner)

    @classmethod
    def adopt(cls, root: Path, *, owner: Owner | None = None) -> list[Self]:
        """Take over the spools below a root whose processes are dead, each cut after its last valid frame.

        A spool that cannot be read stays where it is, and the log says so.

        Args:
            root: folder of spools; may be missing.
            owner: take over only the spools for this lake.
        """
        spools: list[Self] = []
        if not root.is_dir():
            return spools
        with lock_root(root):
            for folder in sorted(path for path in root.iterdir() if path.is_dir()):
                lock = None
                try:
                    if (lock := try_lock_file(folder / LOCK)) is None:
                        continue
                    spool = cls(folder, lock, MAX_BYTES, SEGMENT_BYTES, BUFFER_BYTES, read_owner(folder))
                    if owner is not None and not may_adopt(owner, spool.owner):
                        os.close(lock)
                        continue
                    spool._number, spool._ends, spool.cut_bytes = repair_segments(folder)
                except (OSError, TrajlakeError) as error:
                    if lock is not None:
                        os.close(lock)
                    _log.warning("the spool %s cannot be taken over: %s", folder, error)
                else:
                    spools.append(spool)
                    if spool.cut_bytes:
                        _log.warning(
                            "the spool %s ends in %d invalid bytes: its process died while writing them, or the disk "
                            "damaged them; the frames before them are kept",
                            folder,
                            spool.cut_bytes,
                        )
        return spools

    @classmethod
    def read_only(cls, folder: Path) -> Self:
        """Open a spool for reading. The caller holds its lock; nothing is written or closed.

        Raises LakeVersionError: a later version wrote it; OSError: it cannot be read.
        """
        spool = cls(folder, -1, MAX_BYTES, SEGMENT_BYTES, BUFFER_BYTES)
        ends = {number: measure_segment(segment_path(folder, number))[0] for number in list_segments(folder)}
        spool._ends = {number: end for number, end in ends.items() if end}
        return spool

    def assign(self, owner: Owner) -> None:
        """Set the lake that the frames are for. Raises OSError."""
        write_owner(self.folder, owner)
        self.owner = owner

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return sum(list(self._ends.values()))

    @property
    def size(self) -> int:
        """Bytes on disk and in memory."""
        return self.disk_bytes + self.unwritten_bytes

    @property
    def is_roomy(self) -> bool:
        """Whether less than half of the spool is used."""
        return 2 * self.size < self._max_bytes

    @property
    def is_busy(self) -> bool:
        """Whether more than half of the memory for unwritten frames is used."""
        return 2 * self.unwritten_bytes > self._buffer_bytes

    def append(self, payload: bytes, *, wait: float = 0.0, is_reserved: bool = False) -> None:
        """Add a frame. It is in memory when this returns, and on disk soon after: see `sync`.

        Args:
            payload: the encoded frame; not empty.
            wait: seconds to wait for room. If the disk has room and is writing, the wait is longer.
            is_reserved: accept the frame even without room, for small frames that free others.

        Raises:
            SpoolFullError: there is no room, or the spool is closed.
        """
        size = len(payload) + FRAME_BYTES
        with self._state:
            if not is_reserved and not self._has_room(size) and not self._wait_for_room(size, wait):
                reason = f" because {self.problem}" if self.problem else ""
                raise SpoolFullError(
                    f"the spool {self.folder} has no room for {size:,} bytes{reason}: it holds {self.size:,} of "
                    f"{self._max_bytes:,} bytes, {self.unwritten_bytes:,} of them in memory"
                )
            if self._is_closing:
                raise SpoolFullError(f"the spool {self.folder} is closed")
            self._pending.append(payload)
            self.unwritten_bytes += size
            self._appended += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trajlake-spool", daemon=True)
                self._thread.start()
            if len(self._pending) == 1:
                self._wakeup.notify()

    def _has_room(self, size: int) -> bool:
        # A frame longer than the buffer is accepted if the buffer is half empty. Nothing waits for a closed spool.
        is_buffered = self.unwritten_bytes + min(size, self._buffer_bytes // 2) <= self._buffer_bytes
        return self._is_closing or (is_buffered and self.size + size <= self._max_bytes and size <= LARGEST_PAYLOAD)

    def _wait_for_room(self, size: int, seconds: float) -> bool:
        can_ever_fit = size + HEADER_BYTES <= min(self._max_bytes, LARGEST_PAYLOAD)
        has_disk = self.size + size <= self._max_bytes and self.problem is None
        if has_disk and self._waited_at != self._synced:
            seconds = max(seconds, 1.0 + self.unwritten_bytes / _SLOW_DISK)
        seconds = min(seconds, self.limit.remaining)
        has_room = can_ever_fit and seconds > 0 and self._state.wait_for(lambda: self._has_room(size), seconds)
        self._waited_at = self._waited_at if has_room else self._synced
        return has_room

    def sync(self, timeout: float | None = None, *, unless_refused: bool = False) -> bool:
        """Wait until all earlier frames are on disk; False if that took longer than `timeout` seconds.

        Args:
            timeout: seconds; None sets no limit.
            unless_refused: stop waiting when the disk fails. Writing is retried all the same.
        """
        with self._state:
            goal = self._appended
            self._wakeup.notify(is_urgent=True)
            self._state.wait_for(lambda: self._synced >= goal or (unless_refused and self.problem is not None), timeout)
            return self._synced >= goal

    def frames(self, since: Position = START) -> Iterator[tuple[Position, bytes]]:
        """Yield the frames on disk after a position, in order. Raises OSError."""
        with self._state:
            ends = sorted(self._ends.items())
        for number, end in ends:
            start = max(HEADER_BYTES, since.offset + since.length if number == since.segment else 0)
            if number < since.segment or start >= end:
                continue
            header, data = read_segment(segment_path(self.folder, number), start, end)
            for offset, payload in read_frames(data, header, start):
                yield Position(number, offset, len(payload)), payload

    def payload(self, at: Position) -> bytes:
        """Return the payload of one frame. Raises OSError."""
        return read_segment(segment_path(self.folder, at.segment), at.offset, at.offset + at.length)[1]

    def trim(self, before: Position) -> None:
        """Delete the segments that end before a position. Raises OSError."""
        with self._state:
            current = None if self._file is None else self._number
            for number, end in sorted(self._ends.items()):
                if number == current or (number, end) > before[:2]:
                    break
                segment_path(self.folder, number).unlink(missing_ok=True)
                del self._ends[number]
            self._state.notify_all()

    def move_to_memory(self, payloads: Sequence[bytes], read: Position, timeout: float) -> bool:
        """Delete the segments up to a position, and write frames of them again, before the frames that wait.

        A spool that filled its disk gets room again in this way. Until they are written, the frames are in memory only.

        Args:
            payloads: the frames that are still needed; all of them are on disk at or before `read`.
            read: the newest position on disk.
            timeout: seconds to wait for a write that is under way.

        Returns:
            Whether it was done: not if a frame was written since, or if a write takes longer.

        Raises:
            OSError: a segment cannot be deleted.
        """
        if not self._writing.acquire(timeout=timeout):
            return False
        try:
            newest = max(self._ends.items(), default=(0, 0))
            if self._file is not None or newest != (read.segment, read.offset + read.length):
                return False
            self.trim(Position(*newest, 0))
            with self._state:
                self._pending[:0] = payloads
                self.unwritten_bytes += sum(len(payload) + FRAME_BYTES for payload in payloads)
                self._synced -= len(payloads)
            self._wakeup.notify(is_urgent=True)
            return True
        finally:
            self._writing.release()

    def close(self, *, remove: bool = False, timeout: float = _CLOSING_SECONDS) -> bool:
        """Write the frames in memory and unlock the folder; return whether all were written in time.

        Args:
            remove: delete the folder, because all frames were delivered. Kept if frames remain in memory.
            timeout: seconds.
        """
        with self._state:
            self._is_closing = True
            self._wakeup.notify(is_urgent=True)
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        if remove and not self._pending:
            with contextlib.suppress(OSError), lock_root(self.folder.parent):
                shutil.rmtree(self.folder)
        self.abandon()
        return not self._pending

    def abandon(self) -> None:
        """Close the files only. Used in a forked child, whose parent continues to use the spool."""
        for descriptor in (self._file, self._lock_file):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._file = None
        self._lock_file = -1

    # ------------------------------------------------------------ the writing thread

    def _run(self) -> None:
        failures, limit = 0, self._segment_bytes
        while True:
            self._wakeup.gather(compute_pause(failures + 1, first=GROUP_SECONDS, longest=_LONGEST_PAUSE))
            with self._writing:
                with self._state:
                    size, count = 0, 0
                    while count < len(self._pending) and (not count or size < limit):
                        size += len(self._pending[count])
                        count += 1
                    batch = self._pending[:count]
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
                    failures += 1
                    limit = size // 2  # fewer frames may still fit
                else:
                    failures, limit = 0, self._segment_bytes
            if self._pending or self._is_closing:
                self._wakeup.notify()

    def _write(self, batch: list[bytes]) -> None:
        """Write and sync frames, and wake threads that wait for them. Raises OSError; then no frame counts."""
        file = self._file if self._file is not None else self._begin_segment()
        start = self._ends[self._number]
        data = pack_frames(batch, self._header, start)
        write_at(file, data, start)
        _sync_data(file)
        if not os.fstat(file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "its files were deleted while it was in use", str(self.folder))
        with self._state:
            self._ends[self._number] = start + len(data)
            del self._pending[: len(batch)]
            self.unwritten_bytes -= len(data)
            self._synced += len(batch)
            if not self._pending:
                # Not earlier: a nearly full disk accepts a small frame and refuses the next.
                self.problem = None
            self._state.notify_all()
        if start + len(data) > self._segment_bytes:
            os.close(file)
            self._file = None

    def _begin_segment(self) -> int:
        """Create the next segment and return its file. Raises OSError."""
        header = new_header()
        file = os.open(segment_path(self.folder, self._number + 1), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_at(file, header, 0)
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
        """Cut the segment after its last synced byte, because after a failed sync its later pages are unknown."""
        if time.monotonic() - self._logged_at > _LOG_INTERVAL:
            self._logged_at = time.monotonic()
            _log.warning("the spool %s cannot be written and is tried again: %s", self.folder, error)
        with self._state:
            self.problem = error.strerror or str(error)
            self.is_disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._state.notify_all()
        if self._file is not None:
            end = self._ends[self._number]
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
            if end == HEADER_BYTES:
                # A disk that only accepts the header would get another segment with each try.
                segment_path(self.folder, self._number).unlink(missing_ok=True)
                with self._state:
                    del self._ends[self._number]
