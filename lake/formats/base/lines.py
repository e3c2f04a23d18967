"""Lines of a file, numbered from 1, and what is wrong with one that cannot be read."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lake.formats.base.source import Input, Source
from lake.records import Reject, excerpt

LINE_LIMIT = 64 << 20
"""Bytes of a line; decoding and storing one takes about ten times as much memory."""
TAIL = "tail"
"""What `Input.memory` holds of a file that may grow: the last bytes that were read."""
_TAIL_BYTES = 1024
_RAW_OF_LONG = 64 << 10
_PIECE = 1 << 20
_NUMBER_BEGUN = re.compile(rb"(?:-|\.|[eE][+-]?)\Z")
_TOO_LONG = (
    f"the line is longer than {LINE_LIMIT >> 20} MB; keep images and other payloads in files and write their paths, or "
    'write several episodes that continue one another (`"relation": "continuation"`)'
)


def read_lines(file: Input) -> Iterator[tuple[int, bytes] | Reject]:
    """The lines of a file that are not blank, and rejects of those that are too long or of damaged packed data.

    `file.from_line` and `file.from_byte` say where to begin, and where the next reading has to, once this one is done.
    A last line without an end is taken if it is an object, which nothing can be added to; its end belongs to it.
    """
    with Source(file.path) as source:
        if file.from_byte:
            source.seek(file.from_byte)
        while not _is_at_end(file) and (line := source.readline(LINE_LIMIT + 1)):
            is_whole = line.endswith(b"\n")
            if file.may_grow and not is_whole and len(line) <= LINE_LIMIT and not _is_object(line):
                return
            file.from_line += file.memory.get(TAIL, b"\n").endswith(b"\n")
            _pass(file, line)
            number = file.from_line
            if source.fault is not None and not is_whole:
                yield _of_source(source, number, line)
                return
            if len(line) > LINE_LIMIT and not is_whole:
                while piece := source.readline(_PIECE):  # none of it kept
                    _pass(file, piece)
                    if piece.endswith(b"\n"):
                        break
                yield reject(number, line[:_RAW_OF_LONG], "invalid", _TOO_LONG)
            elif not line.isspace():
                yield number, line
        if source.fault is not None:
            yield _of_source(source, file.from_line + 1, b"")


def cuts(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Places where a file can be read on from, but for its beginning: how many lines come before, and the byte.

    From one to the next it is `size` bytes, up to the end of their last line.
    """
    line = byte = 0
    with path.open("rb") as file:
        while True:
            end = byte + size
            while byte < end and (piece := file.read(min(_PIECE, end - byte))):
                line, byte = line + piece.count(b"\n"), byte + len(piece)
            while (piece := file.readline(_PIECE)) and not piece.endswith(b"\n"):
                byte += len(piece)
            byte += len(piece)
            if not file.peek(1):
                return
            line += 1
            yield line, byte


def reject(number: int, line: bytes, reason: str, message: str) -> Reject:
    """The reject of a line."""
    raw = line.decode("utf-8", errors="backslashreplace").rstrip("\n")
    return Reject(position=number, reason=reason, message=message, raw=excerpt(raw))


def is_cut(line: bytes, message: str) -> bool:
    """Whether a line is damaged because the file ends inside it, by what the decoder says of it."""
    if line.endswith(b"\n"):
        return False
    return "truncated" in message or ("invalid number" in message and _NUMBER_BEGUN.search(line) is not None)


def _is_at_end(file: Input) -> bool:
    return file.until_byte is not None and file.from_byte >= file.until_byte


def _pass(file: Input, data: bytes) -> None:
    """Move on behind what was read."""
    file.from_byte += len(data)
    file.meter.done += len(data)
    if file.may_grow:
        file.memory[TAIL] = (file.memory.get(TAIL, b"") + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]


def _is_object(line: bytes) -> bool:
    if not line.rstrip().endswith(b"}"):
        return False
    try:
        return isinstance(msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf")), dict)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _of_source(source: Source, number: int, line: bytes) -> Reject:
    return reject(number, line, "truncated" if source.is_cut else "malformed", source.fault or "")
