"""Calls of models in Inspect logs: which decision each led to, what it adds to it, and what was new in its prompt."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import msgspec

from lake.formats.base.fields import as_object, as_text, moment, number, whole
from lake.formats.inspect_logs.messages import Resolve, filled, key_of, list_of
from lake.records import StepRecord


def matched(answers: Iterable[tuple[str, Any]], given: Sequence[Any], resolve: Resolve) -> dict[str, int]:
    """The span of a call -> the place of the decision that it led to.

    Args:
        answers: of each call, its span and the message that it gave.
        given: the messages of the decisions, as the sample has them.
        resolve: puts texts in the place of references.
    """
    wanted: dict[str | bytes, list[int]] = defaultdict(list)
    for index, message in enumerate(given):
        wanted[key_of(message, resolve)].append(index)
    found: dict[str | bytes, list[str]] = defaultdict(list)
    for span_id, answer in answers:
        found[key_of(answer, resolve)].append(span_id)
    pairs: dict[str, int] = {}
    for key, places in wanted.items():
        spans = found[key]
        if isinstance(key, str) and len(places) == 1:
            spans = spans[-1:]
        if len(spans) == len(places):
            pairs |= dict(zip(spans, places, strict=True))
    return pairs


class Inputs:
    """The messages of prompts, each once."""

    def __init__(self, messages: Sequence[Any], pool: Sequence[Any], resolve: Resolve) -> None:
        self._pool, self._resolve = pool, resolve
        self._seen: set[str | bytes] = {key_of(message, resolve) for message in messages if isinstance(message, dict)}
        self._taken = bytearray(len(pool))
        """1 for each message of the pool that was looked at."""

    def new(self, event: Mapping[str, Any]) -> list[Any]:
        """The messages of a prompt that stand nowhere else."""
        messages = list(list_of(event.get("input")))
        for ref in list_of(event.get("input_refs")):
            match ref:
                case [int(start), int(end)] if 0 <= start <= end:
                    while (start := self._taken.find(0, start, end)) >= 0:
                        messages.append(self._pool[start])
                        self._taken[start] = 1
        return [self._resolve(message) for message in messages if isinstance(message, dict) and self._is_new(message)]

    def _is_new(self, message: dict[str, Any]) -> bool:
        if not isinstance(message.get("id"), str):
            # Prompts repeat it as it is: so most are known without a look at what they refer to.
            raw = msgspec.json.encode(message)
            if raw in self._seen:
                return False
            self._seen.add(raw)
        key = key_of(message, self._resolve)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def utc(value: Any) -> datetime | None:
    """A time as UTC: logs that were written again by a newer version spell it so."""
    time = moment(value) if isinstance(value, str) else None
    try:
        return time and time.astimezone(UTC)
    except OverflowError:
        return None


def complete(step: StepRecord, output: Mapping[str, Any], resolve: Resolve) -> None:
    """Give a step what the output of its call says."""
    choices = output.get("choices")
    choice = as_object(choices[0]) if isinstance(choices, list) and choices else {}
    usage = as_object(output.get("usage"))
    step.model = step.model or as_text(output.get("model"))
    step.finish_reason = as_text(choice.get("stop_reason"))
    step.latency = finite(output.get("time"))
    step.cost = finite(usage.get("total_cost"))
    step.completion_tokens = whole(usage.get("output_tokens"))
    # What was read from a cache, or written to one, is counted apart.
    counted = [whole(usage.get(key)) for key in ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")]
    if counted[0] is not None:
        step.prompt_tokens = sum(count or 0 for count in counted)
    step.extra = (step.extra or {}) | resolve(filled(choice, "message", "stop_reason")) or None


def finite(value: Any) -> float | None:
    """A number that a column can hold."""
    found = None if isinstance(value, bool) else number(value)
    return found if found is not None and isfinite(found) else None


def answer_of(output: Mapping[str, Any]) -> dict[str, Any]:
    """The message that an output holds; an empty one if it holds none."""
    choices = output.get("choices")
    return as_object(as_object(choices[0]).get("message")) if isinstance(choices, list) and choices else {}
