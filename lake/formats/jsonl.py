"""Our own format: JSON Lines, one episode a line, fields exactly those of `lake.records.EpisodeRecord`.

Optional throughout: token ids, behaviour log-probabilities, sampling parameters, policy version. A malformed line, also
a truncated last one, becomes a reject with its line number, and the rest is read on. Blank lines are skipped. Of a key
that an object has twice the last value counts, as in every common parser: seeing the first would take a parser of our
own, and what was taken is what `content_hash` covers. The reference page docs/reference/jsonl.md is generated from the
record types.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lake.formats.json_array import is_shallow
from lake.formats.meter import Meter
from lake.records import EpisodeRecord, Reject, check, excerpt

NAME = "jsonl"
_BUFFER = 1 << 20
_NUMBER_BEGUN = re.compile(rb"(?:-|\.|[eE][+-]?)\Z")
_DECODER = msgspec.json.Decoder(EpisodeRecord)


def recognise(head: str) -> bool:
    """Whether a file starts with a JSON object."""
    return head.lstrip().startswith("{")


def read(path: Path, meter: Meter | None = None) -> Iterator[tuple[int, EpisodeRecord] | Reject]:
    """Records and rejects of a file, with line numbers from 1."""
    meter = meter or Meter()
    with path.open("rb", buffering=_BUFFER) as file:
        for number, line in enumerate(file, start=1):
            meter.done += len(line)
            if not line.isspace():
                yield read_line(number, line)


def read_line(number: int, line: bytes) -> tuple[int, EpisodeRecord] | Reject:
    """One line as a record, or as a reject that says what is wrong with it."""
    try:
        record = _DECODER.decode(line.removeprefix(b"\xef\xbb\xbf"))
    except msgspec.ValidationError as error:
        return _reject(number, line, "invalid", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "truncated" if _is_cut(line, str(error)) else "malformed"
        return _reject(number, line, reason, f"not JSON: {error}")
    if problem := check(record, is_plain=is_shallow(line)):
        return _reject(number, line, "invalid", problem)
    record.source_format = NAME
    return number, record


def _is_cut(line: bytes, message: str) -> bool:
    """Whether a line is damaged because the file ends inside it."""
    if line.endswith(b"\n"):
        return False
    return "truncated" in message or ("invalid number" in message and _NUMBER_BEGUN.search(line) is not None)


def _reject(number: int, line: bytes, reason: str, message: str) -> Reject:
    raw = line.decode("utf-8", errors="backslashreplace").rstrip("\n")
    return Reject(position=number, reason=reason, message=message, raw=excerpt(raw))
