"""What an API's answer says of a decision: chat completions and the Responses API, as harnesses keep them."""

from typing import Any

import msgspec

from lake.formats.chat_completions import completion
from lake.formats.fields import whole
from lake.formats.message_shapes import messages_of
from lake.formats.messages import Message
from lake.formats.payloads import merged
from lake.formats.rows import ShapeError, rest
from lake.formats.tokens import Lineage
from lake.records import StepRecord


def of_items(items: Any, place: str) -> Message:
    """The assistant's message that output items of the Responses API are. Raises ShapeError: they are none."""
    if not isinstance(items, list):
        raise ShapeError(f"`{place}` is {type(items).__name__}; valid: a list of output items")
    said = [message for item in items for message in messages_of(item, "assistant")]
    return merged(said) if said else {"role": "assistant", "content": None}


def tell(step: StepRecord, response: dict[str, Any], lineage: Lineage, index: int) -> dict[str, Any] | None:
    """Write on a decision what its response says besides the message; what is left of it, None if nothing is."""
    if "choices" in response:
        try:
            found = completion(response)
        except (ShapeError, msgspec.ValidationError):
            return response
        step.model, step.finish_reason = found.model, found.finish_reason
        step.prompt_tokens, step.completion_tokens = found.prompt_tokens, found.completion_tokens
        if found.prompt_ids and found.action_ids:
            step.tokens = lineage.add(index, found.prompt_ids, found.action_ids, found.logprobs)
        return found.extra or None
    usage = response.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    step.model = model if isinstance(model := response.get("model"), str) else None
    step.prompt_tokens = whole(usage.get("input_tokens", usage.get("prompt_tokens")))
    step.completion_tokens = whole(usage.get("output_tokens", usage.get("completion_tokens")))
    step.finish_reason = status if isinstance(status := response.get("status"), str) else None
    return rest(response, "output", "model", "object", "status")
