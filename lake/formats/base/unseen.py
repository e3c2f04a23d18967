"""Steps whose exact tokens do not say what the policy saw, which are therefore not trained on.

Of an image or a sound the engine's token ids are placeholders: every image of a size has the same. From such a message
on, the steps with tokens are recorded as not trainable, whichever door they came through. Which later step still sees
it (a prompt may be cut, agents may take turns) is not told apart: what cannot be known is not trained on.

Steps without tokens stay as they are: rendering reads their messages, and refuses what is no text.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from lake.records import EpisodeRecord, StepRecord

_REASON = "not_trainable"
"""Key of `steps.extra` that says why."""
_TEXTS = frozenset(("text", "input_text", "output_text", "summary_text", "refusal", "thinking", "reasoning"))
"""Types of parts that engines turn into tokens of their own."""


def marked(record: EpisodeRecord) -> list[StepRecord]:
    """The steps of a record that was read or recorded; those that tokens do not determine are marked."""
    if all(step.tokens is None for step in record.steps):
        return record.steps
    found, kinds = [], not_text(record.initial_messages or ())
    for step in record.steps:
        kinds = kinds or not_text([*step.context, {"content": (step.extra or {}).get("content")}])
        is_marked = kinds and step.tokens is not None and step.trainable
        found.append(_marked(step, kinds[0]) if is_marked else step)
    return found


def not_text(messages: Iterable[Any]) -> list[str]:
    """The types of the parts of some messages that are no text: `image_url`, `input_audio`."""
    return [
        kind
        for message in messages
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list)
        for part in parts
        if isinstance(part, dict) and (kind := str(part.get("type", "text"))) not in _TEXTS
    ]


def _marked(step: StepRecord, kind: str) -> StepRecord:
    why = f"a message holds a part of type {kind!r}, for which its tokens are placeholders"
    return msgspec.structs.replace(step, trainable=False, extra={_REASON: why} | (step.extra or {}))
