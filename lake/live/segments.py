"""Segments of a spool: files of frames that can be cut anywhere and still say how much of them is whole.

A segment is `NUMBER.frames`: a header of 16 bytes (a magic word and 8 random bytes), then frames back to back. A frame
is the length of its payload and a CRC-32 (both little-endian uint32), then the payload. The CRC covers the segment's
header, the frame's offset and its length as well, so bytes that a file system puts in a wrong place are no frame.

Reading ends at the first frame that is not whole: what stands behind it was written later and may depend on it.
"""

import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lake.errors import LakeVersionError

MAGIC = b"TRJSPL01"
HEADER_BYTES = 16
FRAME_BYTES = 8
"""What a frame takes beside its payload."""
LARGEST_PAYLOAD = 2**31 - 1
_FRAME = struct.Struct("<II")
_COVERED = struct.Struct("<QI")
SUFFIX = ".frames"


class Position(NamedTuple):
    """Where a frame's payload stands in a spool. Positions are ordered as their frames were appended."""

    segment: int
    offset: int
    length: int


START = Position(0, 0, 0)
"""Before every frame."""


def path_of(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:08d}{SUFFIX}"


def numbers(folder: Path) -> list[int]:
    """The segments of a folder, in order."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def new_header() -> bytes:
    """The first bytes of a segment, different for every one."""
    return MAGIC + secrets.token_bytes(HEADER_BYTES - len(MAGIC))


def framed(payloads: Iterable[bytes], header: bytes, offset: int) -> bytes:
    """The bytes of frames that are going to stand at an offset of a segment."""
    seed = zlib.crc32(header)
    parts = []
    for payload in payloads:
        crc = zlib.crc32(payload, zlib.crc32(_COVERED.pack(offset, len(payload)), seed))
        parts += [_FRAME.pack(len(payload), crc), payload]
        offset += FRAME_BYTES + len(payload)
    return b"".join(parts)


def whole_frames(data: bytes, header: bytes, offset: int = HEADER_BYTES) -> Iterator[tuple[int, bytes]]:
    """(offset of the payload in the segment, payload) of the frames that are whole, up to the first that is not.

    Args:
        data: bytes of a segment from an offset on, at which a frame begins.
        header: the segment's first 16 bytes.
        offset: where `data` begins.
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


def whole_bytes(path: Path) -> tuple[int, int]:
    """(bytes that are whole, bytes behind them that are not) of a segment; a header that is not whole counts as 0.

    Raises:
        LakeVersionError: the segment was written by a version that this one does not know.
        OSError: it cannot be read.
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
    for offset, payload in whole_frames(data[HEADER_BYTES:], header):
        end = offset + len(payload)
    return end, len(data) - end


def mended(folder: Path) -> tuple[int, dict[int, int], int]:
    """(newest segment, bytes of each that are whole, bytes that are not) of a folder whose owner died.

    The newest segment is cut at its last whole frame: its owner may have been writing the next one.

    Raises:
        LakeVersionError: a segment was written by a version that this one does not know.
        OSError: one cannot be read, or cut.
    """
    found, ends, cut_bytes = numbers(folder), dict[int, int](), 0
    for number in found:
        path = path_of(folder, number)
        whole, rest = whole_bytes(path)
        cut_bytes += rest
        if rest and number == found[-1]:
            os.truncate(path, whole)
        if whole:
            ends[number] = whole
    return max(found, default=0), ends, cut_bytes


def read(path: Path, start: int, end: int) -> tuple[bytes, bytes]:
    """(header, bytes from start to end) of a segment. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        file.seek(start)
        return header, file.read(end - start)


def write(file: int, data: bytes, offset: int) -> None:
    """Put bytes at an offset of an open segment, all of them. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, memoryview(data)[done:], offset + done)
