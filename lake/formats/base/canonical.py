"""The canonical form of a record that a format or a recorder made.

A lake does not store whether a default was written out, the zone of a time, the digits of a log-probability beyond
float32, or the order of spans. All of these are in the content hash of a record. Records of formats therefore take the
form in which they come back out of a lake, so that an exported episode is recognised where it came from.

Steps whose tokens do not determine the prompt are marked as not trainable. For an image or a sound, the engine's token
ids are placeholders: every image of a size has the same ids. From such a message on, steps with tokens are recorded as
not trainable, whichever way they were recorded. A later prompt may no longer contain the message (it was cut, or
agents take turns), but the tokens cannot show that. Steps without tokens stay unchanged: rendering reads their
messages, and refuses parts that are not text.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET

from lake.records import EpisodeRecord, SpanRecord, StepRecord

_EARLIEST = datetime.min.replace(tzinfo=UTC)
_REASON = "not_trainable"
"""Key of `steps.extra` for the reason."""
_TEXTS = frozenset(("text", "input_text", "output_text", "summary_text", "refusal", "thinking", "reasoning"))
"""Types of parts for which engines have tokens."""


def canonicalise(record: EpisodeRecord) -> None:
    """Bring a checked record into the form in which a lake returns it."""
    record.started_at, record.ended_at = _to_utc(record.started_at), _to_utc(record.ended_at)
    for index, step in enumerate(record.steps):
        step.started_at = _to_utc(step.started_at)
        if (tokens := step.tokens) is not None:
            if tokens.prefix_step_index == (index - 1 if index else None):
                tokens.prefix_step_index = UNSET
            if tokens.action_mask is not None and all(tokens.action_mask):
                tokens.action_mask = None
            if tokens.action_logprobs:
                import numpy as np

                # The shortest number that is the same in float32.
                tokens.action_logprobs = [float(str(lp)) for lp in np.asarray(tokens.action_logprobs, np.float32)]
    for span in record.spans:
        span.started_at, span.ended_at = _to_utc(span.started_at), _to_utc(span.ended_at)
    record.spans.sort(key=span_sort_key)


def span_sort_key(span: SpanRecord) -> tuple[datetime, str, str]:
    """Return the key that orders an episode's spans."""
    return span.started_at or _EARLIEST, span.trace_id, span.span_id


def _to_utc(time: datetime | None) -> datetime | None:
    if time is None or time.tzinfo is UTC:
        return time
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def mark_untrainable_steps(record: EpisodeRecord) -> list[StepRecord]:
    """Return the steps of a record; those whose tokens do not determine the prompt are marked as not trainable."""
    if all(step.tokens is None for step in record.steps):
        return record.steps
    steps, kinds = [], list_non_text_parts(record.initial_messages or ())
    for step in record.steps:
        kinds = kinds or list_non_text_parts([*step.context, {"content": (step.extra or {}).get("content")}])
        if kinds and step.tokens is not None and step.trainable:
            reason = f"a message holds a part of type {kinds[0]!r}, for which its tokens are placeholders"
            steps.append(msgspec.structs.replace(step, trainable=False, extra={_REASON: reason} | (step.extra or {})))
        else:
            steps.append(step)
    return steps


def list_non_text_parts(messages: Iterable[Any]) -> list[str]:
    """Return the types of message parts that are not text: `image_url`, `input_audio`."""
    return [
        kind
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and (kind := str(part.get("type", "text"))) not in _TEXTS
    ]
