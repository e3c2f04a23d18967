"""A call that passed by as a step of its episode, or as the span of a call that failed."""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from lake.formats.chat.calls import step_of
from lake.formats.chat.chat_completions import Completion
from lake.formats.chat.messages import Message, checked
from lake.live.frames import Step
from lake.live.proxy.keys import Address
from lake.live.proxy.prefixes import Heads, Known, Prefixes, token_hash
from lake.live.proxy.shapes import Asked
from lake.records import EpisodeRecord, SpanRecord, StepRecord, TokensRecord

_PARTIAL = 64 << 10
"""Characters that are kept of an answer that did not get through."""
_SILENCE: Message = {"role": "assistant", "content": ""}


class Call(msgspec.Struct, kw_only=True):
    """One call that passed by."""

    address: Address
    api: str
    asked: Asked
    answer: Completion | None
    """None if it failed."""
    started_at: datetime
    latency: float
    """Seconds."""
    error: str | None = None
    partial: Any = None
    """What there is of the answer of a call that failed."""
    policy_version: int | None = None
    engine: str | None = None
    logprobs_mode: str | None = None
    extra: dict[str, Any] = {}


class Made(msgspec.Struct, frozen=True):
    """A step, and where it stands among the calls of its episode."""

    frame: Step
    known: Known
    before: Known | None
    """The call that it goes on from."""


def made_step(
    call: Call,
    answer: Completion,
    record: EpisodeRecord,
    prefixes: Prefixes,
    owner: bytes,
    index: int,
    *,
    is_first: bool,
) -> Made:
    """The step of a call that was answered.

    Args:
        call: what passed by.
        answer: its answer.
        record: what is known of the episode from its beginning; it is not said again.
        prefixes: calls among which are those of the episode.
        owner: the episode's key.
        index: the step's.
        is_first: no step of the episode is known yet.
    """
    asked = call.asked
    message = checked(answer.message or _SILENCE, "the answer")
    before, start = _before(asked, prefixes, owner)
    if before is not None and not start:  # the engine keeps the history: all that was sent is new
        step = step_of([_SILENCE, *asked.messages], 1, message, is_first=False)
    else:
        step = step_of(asked.messages, start, message, is_first=is_first)
    if not asked.messages:
        step.state = None
    head = Heads() if before is None or start else before.end
    known = Known(owner, index, head.then([*asked.messages, message]), response=_response(answer.extra))
    step.tokens = tokens_of(call, answer, prefixes, known)
    notes: dict[str, Any] = answer.extra | call.extra
    if before is None and not is_first:
        notes["history"] = "rewritten"
    elif before is not None and before.step != index - 1:
        notes["follows"] = before.step
    for name, value, first in (("sampling", asked.settings, record.sampling), ("tools", asked.tools, record.tools)):
        if value != first:
            notes[name] = value
    step.extra = (step.extra or {}) | {key: value for key, value in notes.items() if value is not None} or None
    describe(step, call, answer)
    return Made(Step(index=index, step=step, initial_messages=asked.messages if is_first else None), known, before)


def describe(step: StepRecord, call: Call, answer: Completion) -> None:
    """Write on a step what is known of its call, and of its answer beside the message."""
    step.model = answer.model or call.asked.model
    step.agent_id = call.address.agent
    step.policy_version = call.policy_version
    step.finish_reason = answer.finish_reason
    step.prompt_tokens, step.completion_tokens = answer.prompt_tokens, answer.completion_tokens
    step.started_at, step.latency = call.started_at, call.latency


def known_step(owner: bytes, frame: Step, prefixes: Prefixes) -> Known:
    """Where a step that an earlier process recorded stands; those before it are among the prefixes."""
    step, extra = frame.step, frame.step.extra or {}
    follows = extra.get("follows", frame.index - 1 if frame.index and extra.get("history") != "rewritten" else None)
    before = None if follows is None else prefixes.known(owner, follows)
    answer: Message = {"role": "assistant", "content": extra.get("content", step.action), "tool_calls": step.tool_calls}
    end = (before.end if before else Heads()).then([*(frame.initial_messages or step.context), answer])
    known = Known(owner, frame.index, end, response=_response(extra))
    if (tokens := step.tokens) is not None:
        prefix = tokens.prefix_step_index
        earlier = prefixes.known(owner, prefix) if isinstance(prefix, int) else None
        known.tokens = token_hash(earlier, [*tokens.context_ids, *tokens.action_ids])
        known.length = (earlier.length if earlier else 0) + len(tokens.context_ids) + len(tokens.action_ids)
    return known


def unanswered_step(call: Call) -> Step:
    """What is known of an episode no call of which was answered: what the policy saw, and nothing to train on."""
    step = step_of(call.asked.messages, 0, _SILENCE, is_first=True)
    step.trainable, step.model, step.started_at = False, call.asked.model, call.started_at
    return Step(index=0, step=step, initial_messages=call.asked.messages)


def span_of(call: Call, span_id: str, steps: int) -> SpanRecord:
    """A call that failed, behind some steps: when, why, and what of its answer was there; not its prompt again."""
    partial = call.partial
    if partial is not None and not isinstance(partial, str):
        partial = msgspec.json.encode(partial).decode()
    attributes = {
        "model": call.asked.model,
        "messages": len(call.asked.messages),
        "partial": partial and partial[:_PARTIAL],
        **call.extra,
    }
    return SpanRecord(
        trace_id="proxy",
        span_id=span_id,
        kind="call",
        name=call.api,
        step_index=steps - 1 if steps else None,
        started_at=call.started_at,
        ended_at=call.started_at + timedelta(seconds=call.latency),
        error=call.error or "it answered nothing",
        attributes={key: value for key, value in attributes.items() if value is not None},
    )


def _before(asked: Asked, prefixes: Prefixes, owner: bytes) -> tuple[Known | None, int]:
    """The call of an episode that a prompt goes on from, and how many of its messages are not new."""
    if asked.previous_response is not None:
        known = prefixes.by_response(asked.previous_response)
        return (known, 0) if known is not None and known.owner == owner else (None, 0)
    match = prefixes.by_messages(asked.messages, owner)
    return (None, 0) if match is None else (match.known, match.length)


def tokens_of(call: Call, answer: Completion, prefixes: Prefixes, known: Known) -> TokensRecord | None:
    """The exact tokens of a call, if the engine told them; `known` gets their hash."""
    if not answer.prompt_ids or not answer.action_ids:
        return None
    match = prefixes.by_tokens(answer.prompt_ids, known.owner)
    context = answer.prompt_ids[match.length if match else 0 :]
    known.tokens = token_hash(match.known if match else None, [*context, *answer.action_ids])
    known.length = len(answer.prompt_ids) + len(answer.action_ids)
    return TokensRecord(
        context_ids=context,
        action_ids=answer.action_ids,
        action_logprobs=None if answer.logprobs is None else [min(value, 0.0) for value in answer.logprobs],
        constrained=[True] * len(answer.action_ids) if call.asked.is_constrained else None,
        prefix_step_index=match.known.step if match else None,
        logprobs_mode=call.logprobs_mode if answer.logprobs is not None else None,
        engine=call.engine,
        policy_version=call.policy_version,
        **call.asked.sampling(),
    )


def _response(extra: dict[str, Any]) -> str | None:
    """The id of an answer."""
    found = extra.get("id")
    return found if isinstance(found, str) else None
