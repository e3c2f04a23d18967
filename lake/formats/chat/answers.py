"""What a model's answer, written down beside the message that a harness made of it, adds to a decision."""

from typing import Any

from lake.formats.base.fields import moment, whole
from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.chat_completions import completion, settle_logprobs
from lake.formats.chat.messages import Message, checked
from lake.formats.chat.tokens import Lineage
from lake.formats.tracing.shapes import messages_of, split
from lake.records import StepRecord


def tell(step: StepRecord, answer: Any, lineage: Lineage, index: int) -> Any:
    """Write on a step what its answer says beyond the message, and give back what no column holds.

    An answer of the wrong shape is given back as it is: the step is known without it.
    """
    try:
        found = completion(answer)
    except ShapeError:
        return answer
    left = found.extra
    usage = left.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    step.model = found.model or step.model
    step.finish_reason = found.finish_reason or step.finish_reason
    step.prompt_tokens = _first(found.prompt_tokens, whole(counts.get("input_tokens")), step.prompt_tokens)
    step.completion_tokens = _first(found.completion_tokens, whole(counts.get("output_tokens")), step.completion_tokens)
    for key in ("created", "created_at"):
        if (time := moment(left.get(key))) is not None:
            step.started_at = time
            del left[key]
    if found.prompt_ids and found.action_ids:
        settle_logprobs(found)
        step.tokens = lineage.add(index, found.prompt_ids, found.action_ids, found.logprobs)
    message = found.message or {}
    reasoning = message.get("reasoning_content")
    if step.reasoning is None and isinstance(reasoning, str):
        step.reasoning = reasoning or None
    repeated = ["role", "content", *(["reasoning_content"] if step.reasoning == reasoning else [])]
    repeated += ["tool_calls"] if len(message.get("tool_calls") or ()) == len(step.tool_calls or ()) else []
    if more := rest(message, *repeated):
        left["message"] = more
    left.pop("output", None)
    return left or None


def of_output(items: Any, place: str) -> Message:
    """The message that the output items of an answer of the Responses API are. Raises ShapeError: they are no list."""
    if not isinstance(items, list):
        raise ShapeError(f"`{place}` is {type(items).__name__}; valid: a list of output items")
    parts: list[Any] = []
    for item in items:
        is_text = isinstance(item, dict) and item.get("type") == "message" and isinstance(item.get("content"), list)
        parts += item["content"] if is_text else [item]
    return split(parts, "assistant")[-1]


def of_input(item: Any, place: str) -> Message:
    """The message that an input item of the Responses API is; one that has a role is a message already.

    Raises:
        ShapeError: it is neither.
    """
    if isinstance(item, dict) and "role" not in item and isinstance(item.get("type"), str):
        message = messages_of(item, "user")[0]
        return (rest(item, "type", "call_id", "output", "content", "summary", "id") or {}) | message
    message = checked(item, place)
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
