"""Frames: what is said of an episode while it runs, one thing at a time; `lake.live.assembly` makes its record of them.

A frame in a spool is a head (its kind, the episode's key, the frame's number in its episode) and a body in MessagePack.
The head alone tells which episodes are whole. A frame that is there twice, because a log was carried over when its
process died, is told by its number. No frame repeats what another one of its episode says.
"""

import contextlib
import secrets
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from lake.errors import LakeVersionError
from lake.formats.base.secrets import BY_NAME, NO_REQUEST, TEXT_FIELDS, TOKENS_SPELL_KEY, has_signs
from lake.formats.chat.messages import Message
from lake.records import (
    EpisodeRecord,
    Index,
    Json,
    Reject,
    ScoreRecord,
    SpanRecord,
    StepRecord,
    as_str,
    printable,
    shown,
)

SOURCE_FORMAT = "live"
"""`source_format` of what is recorded live."""
KEY_BYTES = 16
HEAD = struct.Struct(f"<B{KEY_BYTES}sI")
NO_KEY = bytes(KEY_BYTES)
_S = TypeVar("_S", bound=msgspec.Struct)
_F = TypeVar("_F", bound=msgspec.Struct)
_DEEPEST = 64
"""Levels of a value that are kept as they are."""
_MOST_PARTS = 1_000_000
_TOO_MUCH = "(too much to be kept)"
_LONGEST_NUMBER = 10_000
"""Bits; Python refuses to spell numbers that are much longer."""


class Begin(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An episode begins; number 0 of its frames. What a record needs (a rollout index, a start) is chosen by now."""

    episode: EpisodeRecord
    """Without steps."""


class Step(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A decision was taken."""

    index: int
    """Steps are in the order of this number; it may have gaps."""
    step: StepRecord
    """`tokens.prefix_step_index` is an `index`."""
    saw_results: bool = False
    """What it saw are the results of the tool calls before it; `context` and the state are empty."""
    initial_messages: list[Message] | None = None
    """Of the first step: all that stood before it."""


class Tool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool was called and gave something back, or failed."""

    number: int
    """Among the tool calls of the episode."""
    step_index: int | None = None
    name: str
    arguments: Json = None
    call_id: str | None = None
    result: Json = None
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


class Reward(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the environment gave for a step, or for the episode; the last one counts."""

    value: float
    step_index: int | None = None


class Score(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a scorer said; the last one of a scorer counts."""

    score: ScoreRecord


class Span(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A raw trace event."""

    span: SpanRecord


class End(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An episode is finished: what is known by now, by the names of `EpisodeRecord`."""

    status: str = "completed"
    environment: str | None = None
    split: str | None = None
    expected_group_size: Index | None = None
    ended_at: datetime | None = None
    error: str | None = None
    stop_reason: str | None = None
    terminated: bool | None = None
    env_return: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    ground_truth: Json = None
    final_observation: list[Message] | None = None
    """The results of the last tool calls unless given."""
    final_value_estimate: float | None = None
    extra: dict[str, Json] | None = None


class Traced(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Spans, or log records, that were received from an exporter of OpenTelemetry."""

    trace_id: str = ""
    """Of all of them; empty if they name none."""
    document: Json
    """OTLP JSON, decoded."""


class Whole(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A finished episode in one frame."""

    episode: EpisodeRecord


class Lost(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A frame of the episode could not be taken, so it is not going to be whole and is left out."""

    reason: str = ""


class Refused(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that is no episode, in one frame: it goes to the table `rejects`."""

    reject: Reject


class Delivered(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Episodes whose frames nobody needs any more."""

    keys: list[bytes]


Frame = Begin | Step | Tool | Reward | Score | Span | End | Whole | Lost | Delivered | Traced | Refused
_KINDS: tuple[type[Frame], ...] = (
    Begin,
    Step,
    Tool,
    Reward,
    Score,
    Span,
    End,
    Whole,
    Lost,
    Delivered,
    Traced,
    Refused,
)
"""By number in the head; new ones go to the end."""
_KIND_OF = {kind: number for number, kind in enumerate(_KINDS)}
LAST = frozenset((_KIND_OF[End], _KIND_OF[Whole], _KIND_OF[Refused]))
"""Kinds of frames after which an episode is finished."""
LOST, DELIVERED = _KIND_OF[Lost], _KIND_OF[Delivered]


class FrameError(ValueError):
    """A frame holds a value that its record cannot."""


def new_key() -> bytes:
    """A key for an episode: 128 random bits."""
    return secrets.token_bytes(KEY_BYTES)


def encode(key: bytes, number: int | Iterator[int], frame: Frame) -> bytes:
    """A frame as the payload of a spool.

    Args:
        key: the episode's.
        number: in its episode, or the numbers that are left: one is taken if the frame is right, so that a number that
            is missing in a spool is a frame that was lost.
        frame: what was said.

    Values that JSON has no form for become what they say of themselves (`model_dump`, `tolist`), else their text.

    Raises:
        FrameError: a field is of a type that its record does not take.
    """
    kind = _KIND_OF[type(frame)]
    try:
        body = _ENCODER.encode(frame)
        # MessagePack has keys that JSON has not; a table would refuse the whole episode for one.
        text = _JSON.encode(frame)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError):
        spoken = plain(frame)
        body, text = msgspec.msgpack.encode(spoken), _JSON.encode(spoken)
    try:
        # Structs that are built in Python are not checked; a wrong type would be found when nobody can mend it.
        decoded = _DECODERS[kind].decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if (clean := _without_keys(decoded, text)) is not decoded:
        body = _ENCODER.encode(clean)
    return HEAD.pack(kind, key, number if isinstance(number, int) else next(number)) + body


def _without_keys(frame: _F, text: bytes) -> _F:
    """A frame without keys and passwords; without the tokens of a step, too, if these spell one.

    Args:
        frame: as it was said.
        text: the same in JSON.
    """
    secrets = NO_REQUEST if has_signs(text.decode()) else BY_NAME
    clean: _F = secrets.without_keys(frame)
    if isinstance(frame, Step) and isinstance(clean, Step):
        _leave_out_tokens([frame.step], [clean.step], is_spelled=clean.initial_messages != frame.initial_messages)
    elif isinstance(frame, Whole) and isinstance(clean, Whole):
        before, after = frame.episode, clean.episode
        is_spelled = after.initial_messages != before.initial_messages
        _leave_out_tokens(before.steps, after.steps, is_spelled=is_spelled)
    return clean


def _leave_out_tokens(originals: list[StepRecord], steps: list[StepRecord], *, is_spelled: bool) -> None:
    """Take the tokens from the steps whose text lost a key, and from those that extend them.

    Args:
        originals: the steps as they were.
        steps: the same steps without keys.
        is_spelled: the messages before the first one lost a key.
    """
    if originals is steps and not is_spelled:
        return
    without: set[int] = set()
    for index, (before, step) in enumerate(zip(originals, steps, strict=True)):
        prefix = None if step.tokens is None else step.tokens.prefix_step_index
        extended = index - 1 if prefix is msgspec.UNSET else prefix
        is_changed = step is not before and any(getattr(step, name) != getattr(before, name) for name in TEXT_FIELDS)
        if is_changed or extended in without or (is_spelled and not index):
            without.add(index)
            if step.tokens is not None:
                step.tokens = None
                step.extra = (step.extra or {}) | {"tokens_left_out": TOKENS_SPELL_KEY}


def head(payload: bytes) -> tuple[int, bytes, int]:
    """Kind, key and number of a frame."""
    kind, key, number = HEAD.unpack_from(payload)
    return kind, key, number


def decode(payload: bytes) -> Frame:
    """A frame. Raises LakeVersionError: of a kind that this version does not know; FrameError: of another shape."""
    kind = payload[0]
    if kind >= len(_KINDS):
        raise LakeVersionError(f"a frame of kind {kind} was written by a newer trajlake; record with that version once")
    try:
        frame: Frame = _DECODERS[kind].decode(memoryview(payload)[HEAD.size :])
    except msgspec.MsgspecError as error:
        raise FrameError(f"a frame of kind {_KINDS[kind].__name__}: {error}") from error
    return frame


def fitted(record: _S) -> tuple[_S, dict[str, Json]]:
    """A record without the values that its fields do not take, and these values by the names of their fields."""
    wrong: dict[str, Json] = {}
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(record)):
        value = getattr(record, field.name)
        spoken = plain(value)
        values[field.name] = [] if field.default_factory is list else field.default
        # What has no other form than its text is no value of a field.
        if isinstance(spoken, str) and not isinstance(value, str):
            wrong[field.name] = spoken
            continue
        try:
            values[field.name] = msgspec.convert(spoken, field.type)
        except (msgspec.MsgspecError, RecursionError):
            wrong[field.name] = spoken
    return type(record)(**values), wrong


def plain(value: Any) -> Any:
    """A value of what JSON and MessagePack can hold.

    What is of no such type, or too deep, is its text; so is a value inside itself, and what is left of a value of more
    than a million parts.
    """
    return _Plain().of(value, 0)


class _Plain:
    """One value on its way to be plain."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        """Ids of the containers around the value at hand."""
        self._left = _MOST_PARTS

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return printable(value)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            bits = value.bit_length()
            return str(value) if bits < _LONGEST_NUMBER else f"(a number of {bits:,} bits)"
        if value is None or isinstance(value, int | float | datetime):
            return value
        self._left -= 1
        if depth > _DEEPEST or id(value) in self._inside or self._left < 0:
            return shown(value) if self._left >= 0 else _TOO_MUCH
        self._inside.add(id(value))
        try:
            return self._of_container(value, depth)
        finally:
            self._inside.discard(id(value))

    def _of_container(self, value: Any, depth: int) -> Any:
        if isinstance(value, msgspec.Struct):
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            value = {name: item for name, item in fields.items() if item is not msgspec.UNSET}
        if isinstance(value, dict):
            return {as_str(key): self.of(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.of(item, depth + 1) for item in value]
        return self.of(said(value), depth + 1)


def said(value: Any) -> Any:
    """What an object says of itself: messages of client libraries, numbers and arrays of others; else its text."""
    for method in ("model_dump", "tolist"):
        # Whatever an object of somebody else does when it is looked at, it must not reach the agent.
        with contextlib.suppress(Exception):
            if callable(tell := getattr(value, method, None)) and not isinstance(value, type):
                return tell()
    return shown(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=said)
_JSON = msgspec.json.Encoder()
_DECODERS: list[Any] = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
