"""What logs of one agent session have in common: one event a line, and few episodes that stand anywhere in the file.

A line that cannot be read is a reject with its number, and the session is built from the others; how many are lost is
said in `extra` of its first episode. Half surrogate pairs, which are left where a tool cut a text in the middle of a
character, are no damage: they become escapes. Lines are decoded once and nothing is encoded, for speed; only where a
record cannot be stored each line is looked at again, and those that nest too deeply are lost like damaged ones.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from lake.formats.base.documents import is_array
from lake.formats.base.json_array import Element
from lake.formats.base.json_faults import Rewriter, not_a_number
from lake.formats.base.lines import is_cut, read_lines, reject
from lake.formats.base.rows import Item, UnsupportedError, array_values, explained, finished
from lake.formats.base.source import Input
from lake.formats.chat.messages import INSTRUCTIONS, Conversation
from lake.records import EpisodeRecord, Reject, SpanRecord, excerpt, printable, shown

Line = tuple[int, dict[str, Any]]
"""A line's number from 1, and its object."""
Build = Callable[[list[Line], int], list[Item]]
"""The episodes of a session's lines, and rejects of those that are of the wrong shape. The number is that of the lines
that are lost already."""
_DECODE = msgspec.json.Decoder().decode
_NOT_DECODED = (msgspec.MsgspecError, ValueError, RecursionError)
_WRONG = (*_NOT_DECODED, TypeError, LookupError, AttributeError, OverflowError)
_HALF_PAIR = re.compile(rb"\\[uU][dD][89a-fA-F]")
"""The escape of a half of a surrogate pair, alone or not."""
_MAJOR = re.compile(r"v?(\d{1,9})\b")


def session_items(objects: Iterable[Line | Reject], name: str, build: Build) -> Iterator[Item]:
    """Records and rejects of the lines of one session. `name` is the format's."""
    lines: list[Line] = []
    lost = 0
    for item in objects:
        if isinstance(item, Reject):
            lost += 1
            yield item
        else:
            lines.append(item)
    if not lines:
        return
    items = _built(lines, lost, name, build)
    if any(isinstance(item, Reject) for item in items):
        kept, dropped = _storable(lines)
        yield from dropped
        if dropped:
            items = _built(kept, lost + len(dropped), name, build)
    yield from items


def read_objects(file: Input) -> Iterator[Line | Reject]:
    """The objects of a file's lines, or of its array with indices from 0, and rejects of what is none."""
    if is_array(file.path):
        yield from elements(array_values(file))
        return
    for item in read_lines(file):
        if isinstance(item, Reject):
            yield item
            continue
        number, line = item
        text = line.removeprefix(b"\xef\xbb\xbf")
        try:
            value = _decoded(text)
        except _NOT_DECODED as error:
            reason = "truncated" if is_cut(line, str(error)) else "malformed"
            yield reject(number, line, reason, not_a_number(text) or f"not JSON: {error}")
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            yield reject(number, line, "invalid", f"Expected `object`, got `{type(value).__name__}`")


def elements(items: Iterable[Element | Reject]) -> Iterator[Line | Reject]:
    """The objects of an array, and rejects of what is none."""
    for item in items:
        if isinstance(item, Reject):
            yield item
        elif item.problem is None and isinstance(item.value, dict):
            yield item.index, item.value
        else:
            problem = item.problem or f"Expected `object`, got `{type(item.value).__name__}`"
            yield Reject(position=item.index, reason="invalid", message=problem, raw=item.raw)


def _decoded(text: bytes) -> Any:
    try:
        return _DECODE(text)
    except msgspec.DecodeError:
        if _HALF_PAIR.search(text) is None:
            raise
        try:
            return _printable(json.loads(text, parse_constant=_no_constant))
        except json.JSONDecodeError:
            pass
        raise


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def line_reject(line: Line, problem: str) -> Reject:
    """The reject of a line that was decoded."""
    try:
        raw = excerpt(msgspec.json.encode(line[1]).decode())
    except _WRONG:
        raw = excerpt(shown(line[1]))
    return Reject(position=line[0], reason="invalid", message=problem, raw=raw)


@lru_cache
def known_version(version: str | None, newest: int, tool: str) -> None:
    """Do nothing for a version of a tool up to its newest known major one. Raises UnsupportedError: it is newer."""
    if version is not None and (found := _MAJOR.match(version)) and int(found[1]) > newest:
        raise UnsupportedError(
            f"it was written by {tool} {version}; known: 0 to {newest}.x. Update the reader before the file is read"
        )


def count(value: Any) -> int | None:
    """A number of tokens that a column can hold; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def is_content(value: Any) -> bool:
    """Whether a value can be the content of a message: text, parts of some type, or nothing."""
    if not isinstance(value, list):
        return value is None or isinstance(value, str)
    return all(
        isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("type", ""), str)) for part in value
    )


def project(cwd: str | None) -> str | None:
    """The last part of a working directory, which is what people call the project; None if there is none."""
    parts = [part for part in re.split(r"/+" if cwd and cwd.startswith("/") else r"[\\/]+", cwd or "") if part]
    return parts[-1] if parts else None


class Told:
    """What events of an episode have said so far, so that what stays the same is said once."""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def new(self, value: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        """Fields of an event that have no place elsewhere, without those that the event before had alike."""
        found = {key: item for key, item in value.items() if key not in known and self._said.get(key) != item}
        self._said |= found
        return {key: item for key, item in found.items() if item is not None}

    def last(self, key: str) -> Any:
        """What was said last under a key; None if nothing was."""
        return self._said.get(key)


class Spans:
    """The events of an episode that are no messages, each under an id of its own."""

    def __init__(self, trace_id: str) -> None:
        self.records: list[SpanRecord] = []
        self._trace_id = trace_id
        self._seen: set[str] = set()

    def add(
        self,
        kind: str,
        name: str,
        place: str,
        *,
        steps: int,
        started_at: datetime | None = None,
        error: str | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        """Add one that came after a number of steps; `place` is its id, a second one of a place is left out."""
        if place not in self._seen:
            self._seen.add(place)
            self.records.append(
                SpanRecord(
                    trace_id=self._trace_id,
                    span_id=place,
                    kind=kind,
                    name=name,
                    step_index=steps - 1 if steps else None,
                    started_at=started_at,
                    error=error,
                    attributes=attributes or None,
                )
            )


def complete(record: EpisodeRecord, chat: Conversation) -> None:
    """Set what a record's messages and steps say: the messages, the totals, the model that acted most."""
    record.initial_messages = chat.initial_messages
    record.final_observation = chat.final_observation
    record.steps = chat.steps
    if chat.steps and all(message["role"] in INSTRUCTIONS for message in chat.initial_messages):
        # What was asked is not in the file.
        chat.steps[0].state = chat.steps[0].state_is_error = None
    own = [step for step in chat.steps if not step.is_copied_context]
    for name in ("prompt_tokens", "completion_tokens", "cost"):
        values = [getattr(step, name) for step in own]
        if values and None not in values and getattr(record, name) is None:
            setattr(record, name, sum(values))
    models = Counter(step.model for step in own or chat.steps if step.model is not None)
    if models:
        record.policy = models.most_common(1)[0][0]


def is_waiting(chat: Conversation, calls: Collection[str]) -> bool:
    """Whether the last decision made calls that gave no result: the session was ended before."""
    return bool(calls) and not any(message.get("tool_call_id") in calls for message in chat.final_observation)


def _built(lines: list[Line], lost: int, name: str, build: Build) -> list[Item]:
    try:
        items = build(lines, lost)
    except UnsupportedError as error:
        return [_of_session(lines[0], "unsupported", str(error))]
    except _WRONG as error:
        return [_of_session(lines[0], "invalid", explained(error))]
    return [_checked(item, name) for item in items]


def _checked(item: Item, name: str) -> Item:
    if isinstance(item, Reject) or (problem := finished(item[1], name)) is None:
        return item
    return Reject(position=item[0], reason="invalid", message=problem, raw=excerpt(shown(item[1].task_id)))


def _of_session(line: Line, reason: str, message: str) -> Reject:
    found = line_reject(line, message)
    found.reason = reason
    return found


def _storable(lines: list[Line]) -> tuple[list[Line], list[Reject]]:
    """The lines that do not nest too deeply, and rejects of the others."""
    rewriter = Rewriter()
    kept, dropped = [], []
    for line in lines:
        try:
            is_plain, _ = rewriter.compared(msgspec.json.encode(line[1]), line[1])
        except _NOT_DECODED:
            is_plain = False
        if is_plain:
            kept.append(line)
        else:
            dropped.append(line_reject(line, "it cannot be stored as JSON: it is nested too deeply"))
    return kept, dropped


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value
