"""The record of a call without keys: what all of it says, and its tokens, which spell what it says."""

from typing import Any

import msgspec

from lake.formats.base.secrets import Secrets
from lake.formats.chat.chat_completions import Completion
from lake.live.calls.shapes import Asked
from lake.live.calls.steps import Call

_RECORDED = ("asked", "answer", "error", "partial", "extra")
"""Fields of a call that others have filled."""
_SPELLED = ("messages", "tools", "text")
"""Fields of a request that its prompt is made of."""


class _Recorded(msgspec.Struct, kw_only=True):
    asked: Asked
    answer: Completion | None
    error: str | None
    partial: Any
    extra: dict[str, Any]


def call_without_keys(call: Call, secrets: Secrets) -> Call:
    """A call without keys; without its tokens too, if the prompt or the answer held one.

    Args:
        call: as it passed by.
        secrets: what its request brought.
    """
    record = {name: getattr(call, name) for name in _RECORDED}
    try:
        packed = msgspec.msgpack.encode(record)
    except OverflowError:
        packed = msgspec.json.encode(record)  # slower, and takes numbers of any size
    if not secrets.may_stand_in(packed.decode("utf-8", "replace")):
        return call
    fields: dict[str, Any] = msgspec.to_builtins(record)
    clean = {name: secrets.without_keys(value, name) for name, value in fields.items()}
    if clean == fields:
        return call
    clean["extra"] |= {"keys_redacted": True}
    answer, before = clean["answer"], fields["answer"]
    is_spelled = any(clean["asked"].get(name) != fields["asked"].get(name) for name in _SPELLED)
    if answer is not None and (is_spelled or answer != before):
        answer["prompt_ids"], answer["action_ids"], answer["logprobs"] = [], [], None
    recorded = msgspec.convert(clean, _Recorded)
    return msgspec.structs.replace(call, **{name: getattr(recorded, name) for name in _RECORDED})
