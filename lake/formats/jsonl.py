"""Our own format: JSON Lines, one episode a line, fields exactly those of `lake.records.EpisodeRecord`.

Optional throughout: token ids, behaviour log-probabilities, sampling parameters, policy version. A malformed line, also
a truncated last one, becomes a reject with its line number, and the rest is read on. Blank lines are skipped. An object
that has a key twice is rejected, because nobody can say which of the two was meant. The reference page
docs/reference/jsonl.md is generated from the record types.
"""

import re
from collections.abc import Iterator

import msgspec

from lake.formats.base.format import Format
from lake.formats.base.json_faults import Rewriter, not_a_number, repeated_key
from lake.formats.base.lines import is_cut, read_lines, reject
from lake.formats.base.look import Look
from lake.formats.base.source import Input
from lake.formats.base.unseen import marked
from lake.records import EpisodeRecord, Reject, check, tell_sampling

NAME = "jsonl"
_FIELDS = frozenset(EpisodeRecord.__struct_fields__)
_BOM = b"\xef\xbb\xbf"
_NO_ACTION = re.compile(r"missing required field `action` - at `\$\.steps\[(\d+)\]`")
_TYPED = msgspec.json.Decoder(EpisodeRecord)
_ANY = msgspec.json.Decoder()


def recognise(look: Look) -> bool:
    """Whether lines are episodes of our own: with a task or steps, and mostly of our fields."""
    return look.kind in ("lines", "object") and any(
        not value.keys().isdisjoint(("task_id", "steps")) and 2 * len(value.keys() & _FIELDS) >= len(value)
        for value in look.objects
    )


def no_trajectory(look: Look) -> str | None:
    """What lies beside the files of an export."""
    return "it says what an export of a lake holds" if look.has("package_version", "snapshot", "shards") else None


def read(file: Input) -> Iterator[tuple[int, EpisodeRecord] | Reject]:
    """Records and rejects of a file, with line numbers from 1."""
    lines = Lines()
    for item in read_lines(file):
        yield item if isinstance(item, Reject) else lines.read(*item)


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
            return reject(number, line, "invalid", problem)
        record.steps = marked(record)
        tell_sampling(record)
        return number, record


def _undecoded(number: int, line: bytes, text: bytes) -> Reject:
    """The reject of a line that does not decode, which is decoded once more for the place of the fault."""
    try:
        _TYPED.decode(text)
    except msgspec.ValidationError as error:
        return reject(number, line, "invalid", _explained(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "truncated" if is_cut(line, str(error)) else "malformed"
        return reject(number, line, reason, not_a_number(text) or f"not JSON: {error}")
    msg = "it decodes by type, but not as plain JSON"
    return reject(number, line, "malformed", msg)


def _explained(message: str) -> str:
    """What is wrong with a line of the wrong shape, and for a shape that is met often, what to do about it."""
    if (found := _NO_ACTION.search(message)) and int(found[1]):
        return f"{message}. {_AFTER_THE_LAST}"
    return message


_AFTER_THE_LAST = (
    "What came after the last action goes to `final_observation`; a reward given at the end is the `reward` of the "
    "last step, or, if it rates the whole episode, `env_return`"
)


FORMAT = Format(
    NAME,
    "one episode a line; docs/reference/jsonl.md",
    recognise,
    read,
    no_trajectory,
    by_line=True,
    any_line=True,
)
