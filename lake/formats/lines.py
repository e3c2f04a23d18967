"""Lines of a file, numbered from 1, and what is wrong with one that cannot be read."""

import re
from collections.abc import Iterator

from lake.formats.source import Input, Source
from lake.records import Reject, excerpt

LINE_LIMIT = 64 << 20
"""Bytes of a line; decoding and storing one takes about ten times as much memory."""
_RAW_OF_LONG = 64 << 10
_NUMBER_BEGUN = re.compile(rb"(?:-|\.|[eE][+-]?)\Z")
_TOO_LONG = (
    f"the line is longer than {LINE_LIMIT >> 20} MB; keep images and other payloads in files and write their paths, or "
    'write several episodes that continue one another (`"relation": "continuation"`)'
)


def read_lines(file: Input) -> Iterator[tuple[int, bytes] | Reject]:
    """The lines of a file that are not blank, and rejects of those that are too long or of damaged packed data.

    `file.from_line` and `file.from_byte` say where to begin, and where the next reading has to, once this one is done.
    """
    with Source(file.path) as source:
        if file.from_byte:
            source.seek(file.from_byte)
        while line := source.readline(LINE_LIMIT + 1):
            is_whole = line.endswith(b"\n")
            if file.may_grow and not is_whole and len(line) <= LINE_LIMIT:
                return
            file.from_line += 1
            file.from_byte += len(line)
            file.meter.done += len(line)
            number = file.from_line
            if source.fault is not None and not is_whole:
                yield _of_source(source, number, line)
                return
            if len(line) > LINE_LIMIT and not is_whole:
                while piece := source.readline(1 << 20):  # none of it kept
                    file.from_byte += len(piece)
                    file.meter.done += len(piece)
                    if piece.endswith(b"\n"):
                        break
                yield reject(number, line[:_RAW_OF_LONG], "invalid", _TOO_LONG)
            elif not line.isspace():
                yield number, line
        if source.fault is not None:
            yield _of_source(source, file.from_line + 1, b"")


def reject(number: int, line: bytes, reason: str, message: str) -> Reject:
    """The reject of a line."""
    raw = line.decode("utf-8", errors="backslashreplace").rstrip("\n")
    return Reject(position=number, reason=reason, message=message, raw=excerpt(raw))


def is_cut(line: bytes, message: str) -> bool:
    """Whether a line is damaged because the file ends inside it, by what the decoder says of it."""
    if line.endswith(b"\n"):
        return False
    return "truncated" in message or ("invalid number" in message and _NUMBER_BEGUN.search(line) is not None)


def _of_source(source: Source, number: int, line: bytes) -> Reject:
    return reject(number, line, "truncated" if source.is_cut else "malformed", source.fault or "")
