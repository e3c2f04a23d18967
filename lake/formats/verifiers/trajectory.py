"""The trajectory of a verifiers result: every model call, with its tokens, where the evaluation was told to keep it.

See `lake.formats.verifiers.results`.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import whole
from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.calls import Calls
from lake.formats.chat.messages import Conversation, Message
from lake.formats.chat.tokens import Lineage
from lake.formats.verifiers.messages import as_object, chat
from lake.records import StepRecord, TokensRecord


def calls_of(trajectory: Any) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The policy's calls of a trajectory, and those of each sub-model; none if it does not tell them."""
    if not isinstance(trajectory, list) or not all(map(_is_call, trajectory)):
        return [], []
    mains: list[dict[str, Any]] = []
    subs: dict[str, list[dict[str, Any]]] = {}
    for call in trajectory:
        extras, name = as_object(call.get("extras")), call.get("trajectory_id")
        if not extras.get("is_sub_llm_call") and (not mains or name == mains[0].get("trajectory_id")):
            mains.append(call)
        else:
            key = str([name, extras.get("batch_id"), extras.get("request_id")])
            subs.setdefault(key, []).append(call)
    return mains, list(subs.values())


def _is_call(value: Any) -> bool:
    """Whether an entry is a call that was answered: by one message of the assistant."""
    answers = value.get("completion") if isinstance(value, dict) else None
    return isinstance(answers, list) and len(answers) == 1 and as_object(answers[0]).get("role") == "assistant"


def retold(calls: list[dict[str, Any]], completion: list[Message]) -> Conversation:
    """A chat as its calls tell it; what stands behind the last answer, as the completion does."""
    found = Calls()
    for index, call in enumerate(calls):
        place = f"trajectory[{index}]"
        (answer,) = chat(call["completion"], "completion")
        found.add(chat(call.get("prompt"), "prompt"), answer, place=f"{place}.prompt")
    behind = 0
    while behind < len(completion) and completion[-1 - behind].get("role") != "assistant":
        behind += 1
    return Conversation(found.initial_messages, found.steps, completion[len(completion) - behind :])


def learn(steps: list[StepRecord], calls: list[dict[str, Any]], total: float | None) -> None:
    """What the trajectory says of each decision: tokens, rewards, usage."""
    lineage = Lineage()
    rewards = [call.get("reward") for call in calls]
    is_repeated = all(reward is None or reward == total for reward in rewards)
    for index, (step, call) in enumerate(zip(steps, calls, strict=True)):
        response = as_object(call.get("response"))
        said = as_object(response.get("message"))
        usage = as_object(response.get("usage"))
        left = None
        if (tokens := call.get("tokens")) is not None:
            step.tokens, left = _tokens(tokens, index, lineage, f"trajectory[{index}].tokens")
        step.reward = None if is_repeated else msgspec.convert(rewards[index], float | None)
        step.model = response.get("model") if isinstance(response.get("model"), str) else None
        step.finish_reason = reason if isinstance(reason := said.get("finish_reason"), str) else None
        step.prompt_tokens = whole(usage.get("prompt_tokens"))
        step.completion_tokens = whole(usage.get("completion_tokens"))
        extra = {
            **(step.extra or {}),
            **(rest(call, "prompt", "completion", "response", "tokens", "reward") or {}),
            "response": rest(response, "message", "model", "usage"),
            "usage": rest(usage, "prompt_tokens", "completion_tokens"),
            "tokens": left,
        }
        step.extra = {key: item for key, item in extra.items() if item not in (None, {}, [])} or None


def _tokens(value: Any, index: int, lineage: Lineage, place: str) -> tuple[TokensRecord | None, dict[str, Any] | None]:
    """The tokens of one call, and what of them is no exact record: those that a limit of the trainer has cut."""
    if not isinstance(value, dict):
        raise ShapeError(f"`{place}` is {type(value).__name__}; valid: an object, or null")
    if value.get("overlong_prompt") or value.get("is_truncated"):
        return None, value
    prompt, action = (msgspec.convert(value.get(f"{name}_ids") or [], list[int]) for name in ("prompt", "completion"))
    logprobs = msgspec.convert(value.get("completion_logprobs") or None, list[float] | None)
    mask = value.get("completion_mask") or None
    if not prompt or not action:
        return None, rest({key: item for key, item in value.items() if item})
    if logprobs is not None and len(logprobs) != len(action):
        raise ShapeError(f"`{place}.completion_logprobs` has {len(logprobs)} entries for {len(action)} completion ids")
    sampled = None if mask is None else [bool(flag) for flag in msgspec.convert(mask, list[int | bool])]
    record = lineage.add(
        index, prompt, action, logprobs, action_mask=None if sampled is None or all(sampled) else sampled
    )
    known = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
    return record, rest({key: item for key, item in value.items() if item}, *known)
