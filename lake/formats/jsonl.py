"""Our own format: JSON Lines, one episode a line, fields exactly those of `lake.records.EpisodeRecord`.

Optional throughout: token ids, behaviour log-probabilities, sampling parameters, policy version. A malformed line, also
a truncated last one, becomes a reject with its line number, and the rest is read on. Blank lines are skipped. An object
that has a key twice is rejected, because nobody can say which of the two was meant. The reference page
docs/reference/jsonl.md is generated from the record types.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lake.formats.json_faults import Rewriter, not_a_number, repeated_key
from lake.formats.source import Meter, Source
from lake.records import EpisodeRecord, Reject, check, excerpt

NAME = "jsonl"
LINE_LIMIT = 64 << 20
"""Bytes of a line; decoding and storing one takes about ten times as much memory."""
_RAW_OF_LONG = 64 << 10
_BOM = b"\xef\xbb\xbf"
_NUMBER_BEGUN = re.compile(rb"(?:-|\.|[eE][+-]?)\Z")
_NO_ACTION = re.compile(r"missing required field `action` - at `\$\.steps\[(\d+)\]`")
_TYPED = msgspec.json.Decoder(EpisodeRecord)
_ANY = msgspec.json.Decoder()
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


def recognise(head: str) -> bool:
    """Whether a file starts with a JSON object."""
    return head.lstrip().startswith("{")


def read(path: Path, meter: Meter | None = None) -> Iterator[tuple[int, EpisodeRecord] | Reject]:
    """Records and rejects of a file, with line numbers from 1."""
    meter = meter or Meter()
    lines = Lines()
    number = 0
    with Source(path) as file:
        while line := file.readline(LINE_LIMIT + 1):
            number += 1
            meter.done += len(line)
            is_whole = line.endswith(b"\n")
            if file.fault is not None and not is_whole:
                yield _of_source(file, number, line)
                return
            if len(line) > LINE_LIMIT and not is_whole:
                while piece := file.readline(1 << 20):  # none of it kept
                    meter.done += len(piece)
                    if piece.endswith(b"\n"):
                        break
                yield _reject(number, line[:_RAW_OF_LONG], "invalid", _TOO_LONG)
            elif not line.isspace():
                yield lines.read(number, line)
        if file.fault is not None:
            yield _of_source(file, number + 1, b"")


class Lines:
    """Reads lines, one after the other.

    A record is decoded by type and written again: as many colons as in its line, and no key was lost. A line that
    spells out what a record leaves out (a null, a default) has more. After the first such line every one is decoded as
    plain JSON before it becomes a record, which costs half as much again, and shows lost keys whatever is spelled out.
    """

    def __init__(self) -> None:
        self._rewriter = Rewriter()
        self._spells_out = False

    def read(self, number: int, line: bytes) -> tuple[int, EpisodeRecord] | Reject:
        """One line as a record, or as a reject that says what is wrong with it."""
        text = line.removeprefix(_BOM)
        try:
            value = _ANY.decode(text) if self._spells_out else _TYPED.decode(text)
            record = msgspec.convert(value, EpisodeRecord) if self._spells_out else value
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return _undecoded(number, line, text)
        is_plain, may_repeat = self._rewriter.compared(text, value)
        if may_repeat and not self._spells_out:
            self._spells_out = True
            return self.read(number, line)
        problem = repeated_key(text) if may_repeat else None
        if problem := problem or check(record, is_plain=is_plain):
            return _reject(number, line, "invalid", problem)
        record.source_format = NAME
        return number, record


def _undecoded(number: int, line: bytes, text: bytes) -> Reject:
    """The reject of a line that does not decode, which is decoded once more for the place of the fault."""
    try:
        _TYPED.decode(text)
    except msgspec.ValidationError as error:
        return _reject(number, line, "invalid", _explained(str(error), text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "truncated" if _is_cut(line, str(error)) else "malformed"
        return _reject(number, line, reason, not_a_number(text) or f"not JSON: {error}")
    msg = "it decodes by type, but not as plain JSON"
    return _reject(number, line, "malformed", msg)


def _explained(message: str, text: bytes) -> str:
    """What is wrong with a line of the wrong shape, and for shapes that are met often, what to do about it."""
    if found := _NO_ACTION.search(message):
        return f"{message}. {_AFTER_THE_LAST}" if int(found[1]) else message
    try:
        names = _NAMES.decode(text)
    except msgspec.MsgspecError:
        return message
    return _CHAT if "messages" in names and "steps" not in names else message


_TOO_LONG = (
    f"the line is longer than {LINE_LIMIT >> 20} MB; keep images and other payloads in files and write their paths, or "
    'write several episodes that continue one another (`"relation": "continuation"`)'
)
_AFTER_THE_LAST = (
    "What came after the last action goes to `final_observation`; a reward given at the end is the `reward` of the "
    "last step, or, if it rates the whole episode, `env_return`"
)
_CHAT = (
    "this is a chat (`messages`), and no command converts chats yet: docs/reference/jsonl.md has a function that does. "
    "Each assistant message is a step, with `action` (its content), `tool_calls`, `state` (the message it answers) "
    "and `context` (the messages since the assistant message before); what comes before is `initial_messages`"
)


def _of_source(file: Source, number: int, line: bytes) -> Reject:
    return _reject(number, line, "truncated" if file.is_cut else "malformed", file.fault or "")


def _is_cut(line: bytes, message: str) -> bool:
    """Whether a line is damaged because the file ends inside it."""
    if line.endswith(b"\n"):
        return False
    return "truncated" in message or ("invalid number" in message and _NUMBER_BEGUN.search(line) is not None)


def _reject(number: int, line: bytes, reason: str, message: str) -> Reject:
    raw = line.decode("utf-8", errors="backslashreplace").rstrip("\n")
    return Reject(position=number, reason=reason, message=message, raw=excerpt(raw))
