"""One spelling of what several mean, so that an episode that left a lake is known where it came from.

A lake does not keep whether a default was spelled out, a time's zone, the digits of a log-probability beyond float32,
or the order of spans, and all of these are in the content hash of a record. So records of formats are spelled as they
come back out of a lake.
"""

from datetime import UTC, datetime

from msgspec import UNSET

from lake.records import EpisodeRecord, SpanRecord, TokensRecord

_EARLIEST = datetime.min.replace(tzinfo=UTC)


def spell(record: EpisodeRecord) -> None:
    """Spell a record that has been checked as a lake does."""
    record.started_at, record.ended_at = _utc(record.started_at), _utc(record.ended_at)
    for index, step in enumerate(record.steps):
        step.started_at = _utc(step.started_at)
        if step.tokens is not None:
            _spell_tokens(step.tokens, index)
    for span in record.spans:
        span.started_at, span.ended_at = _utc(span.started_at), _utc(span.ended_at)
    record.spans.sort(key=in_order)


def in_order(span: SpanRecord) -> tuple[datetime, str, str]:
    """The order of an episode's spans."""
    return span.started_at or _EARLIEST, span.trace_id, span.span_id


def _spell_tokens(tokens: TokensRecord, index: int) -> None:
    if tokens.prefix_step_index == (index - 1 if index else None):
        tokens.prefix_step_index = UNSET
    if tokens.action_mask is not None and all(tokens.action_mask):
        tokens.action_mask = None
    if tokens.action_logprobs:
        import numpy as np

        # The shortest number that is the same in float32.
        tokens.action_logprobs = [float(str(value)) for value in np.asarray(tokens.action_logprobs, np.float32)]


def _utc(time: datetime | None) -> datetime | None:
    if time is None or time.tzinfo is UTC:
        return time
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
