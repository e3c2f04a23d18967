"""A call that passed by as a step of its episode, or as the span of a call that failed.

What the columns of a step do not say is in its `extra`, beside what the answer says of itself (its id, for example):

.. code-block:: text

    follows        the step that its prompt goes on from, where that is not the step before
    follows_choice which sample of that step, where that is not the first one
    history        `rewritten`: the prompt holds answers that were not given here, or goes on from no step: all that is
                   new is the context. `edited`: answers are there in other words than they were given
    choices        further samples of the same prompt. The agent may have gone on from any, so it is not trained on
    sampling       the settings, where they are not those of the episode
    tools          likewise
    api            where it is not chat/completions
    request_not_read  why the prompt is not known. Such a step is not trained on
"""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from lake.formats.base.fields import prompt_task
from lake.formats.chat.calls import step_of
from lake.formats.chat.chat_completions import Completion, settle_logprobs
from lake.formats.chat.messages import Message, checked, is_assistant, text_of
from lake.live.calls.address import Address
from lake.live.calls.prefixes import Heads, Known, Match, Prefixes, Prompt, Run, as_bytes, instructions_of
from lake.live.calls.shapes import CHAT, COMPLETIONS, Asked, conversation_of
from lake.live.frames import Step
from lake.records import EpisodeRecord, SpanRecord, StepRecord, TokensRecord

_ID_BYTES = len(as_bytes([0]))
_PARTIAL = 64 << 10
"""Characters that are kept of an answer that did not get through."""
_SILENCE: Message = {"role": "assistant", "content": ""}
_OURS = frozenset(
    ("follows", "follows_choice", "history", "choices", "sampling", "tools", "api", "content", "request_not_read")
)
"""Names in `extra` that an answer may not use for something else."""


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
    defaults: dict[str, float | int] = {}
    """How the engine samples where the request does not say: fields of `TokensRecord`."""
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Take nothing for a log-probability that is none."""
        if self.answer is not None:
            settle_logprobs(self.answer)

    @property
    def sampling(self) -> dict[str, Any]:
        """How it was sampled, as far as somebody said: fields of `TokensRecord`."""
        return self.defaults | {name: value for name, value in self.asked.sampling().items() if value is not None}


class Made(msgspec.Struct, frozen=True):
    """A step, and where it stands among the calls of its episode."""

    frame: Step
    samples: list[Known]
    before: Known | None
    """The call that it goes on from."""


def made_step(
    call: Call,
    answer: Completion,
    prompt: Prompt,
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
        prompt: the call's, ready to be compared.
        record: what is known of the episode from its beginning; it is not said again.
        prefixes: calls among which are those of the episode.
        owner: the episode's key.
        index: the step's.
        is_first: no step of the episode is known yet.

    Raises:
        ShapeError: the answer is no message.
    """
    asked = call.asked
    message = checked(_without_echo(asked, answer.message or _SILENCE), "the answer")
    match = prefixes.by_prompt(prompt, owner)
    since = asked.messages if match is None else prompt.behind(match)
    if match is not None and not match.is_exact and _holds_answers(since):
        match, since = None, asked.messages  # little of it is as it was: all of it is told
    step = step_of(since, 0, message, is_first=is_first)
    if not asked.messages:
        step.state = None
    step.tokens = tokens_of(call, answer, prompt, prefixes, owner)
    step.trainable = "choices" not in answer.extra and "request_not_read" not in call.extra
    said = {f"answer_{key}" if key in _OURS - {"choices"} else key: value for key, value in answer.extra.items()}
    place = {} if is_first else _place(match, since, index)
    step.extra = said | call.extra | _settings(call, record) | place | (step.extra or {}) or None
    describe(step, call, answer)
    frame = Step(index=index, step=step, initial_messages=asked.messages if is_first else None)
    before = match.known if match else None
    return Made(frame, _samples(owner, frame, before, prefixes), before)


def describe(step: StepRecord, call: Call, answer: Completion) -> None:
    """Write on a step what is known of its call, and of its answer beside the message."""
    step.model = answer.model or call.asked.model
    step.agent_id = call.address.agent
    step.policy_version = call.policy_version
    step.finish_reason = answer.finish_reason
    step.prompt_tokens, step.completion_tokens = answer.prompt_tokens, answer.completion_tokens
    step.started_at, step.latency = call.started_at, call.latency


def known_step(owner: bytes, frame: Step, prefixes: Prefixes) -> Made:
    """A step that an earlier process recorded; those before it are among the prefixes.

    Raises:
        LookupError: it goes on from a step that is not there.
    """
    extra = frame.step.extra or {}
    opens = frame.initial_messages is not None or extra.get("history") == "rewritten"
    follows = extra.get("follows", None if opens else frame.index - 1)
    before = None if follows is None else prefixes.known(owner, follows, extra.get("follows_choice", 0))
    return Made(frame, _samples(owner, frame, before, prefixes), before)


def _samples(owner: bytes, frame: Step, before: Known | None, prefixes: Prefixes) -> list[Known]:
    """Where prompts may go on from a step: from each of its samples."""
    step, extra = frame.step, frame.step.extra or {}
    since = step.context if frame.initial_messages is None else frame.initial_messages
    instructed = instructions_of(since)
    start = before.end if before else Heads()
    first: Message = {"role": "assistant", "content": extra.get("content", step.action), "tool_calls": step.tool_calls}
    found = []
    for choice, message in enumerate([first, *(other["message"] or _SILENCE for other in extra.get("choices", ()))]):
        text = None
        # Every prompt of the same text would go on from one that was answered with nothing.
        if extra.get("api") == COMPLETIONS and step.state is not None and message.get("content"):
            new = "".join(text_of(part.get("content")) for part in (*since, message))
            text = Run.of(as_bytes(new), before.text if before else None)
        found.append(
            Known(
                owner=owner,
                step=frame.index,
                choice=choice,
                end=start.then(*since, message),
                instructions=instructed or (before.instructions if before else b""),
                text=text,
                names=_names(extra),
            )
        )
    found[0].tokens = run_of(step.tokens, prefixes, owner)
    return found


def run_of(tokens: TokensRecord | None, prefixes: Prefixes, owner: bytes) -> Run | None:
    """All tokens up to the end of a step."""
    if tokens is None:
        return None
    prefix = tokens.prefix_step_index
    earlier = prefixes.known(owner, prefix).tokens if isinstance(prefix, int) else None
    return Run.of(as_bytes([*tokens.context_ids, *tokens.action_ids]), earlier)


def unanswered_step(messages: list[Message], model: str | None, started_at: datetime | None) -> Step:
    """What is known of an episode no call of which was answered: what the policy saw, and nothing to train on."""
    step = step_of(messages, 0, _SILENCE, is_first=True)
    step.trainable, step.model, step.started_at = False, model, started_at
    return Step(index=0, step=step, initial_messages=messages)


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


def begun_by(call: Call, answer: Completion | None) -> dict[str, Any]:
    """What a call says of the episode that it begins: fields of `EpisodeRecord`."""
    asked = call.asked
    return {
        "task_id": call.address.task or prompt_task(asked.messages or (answer and answer.prompt_ids)),
        "policy": (answer and answer.model) or asked.model,
        "started_at": call.started_at,
        "initial_messages": [] if answer else asked.messages,
        "tools": asked.tools,
        "sampling": asked.settings,
    }


def _place(match: Match | None, since: list[Message], index: int) -> dict[str, Any]:
    """What is said of where the prompt of a later step goes on."""
    if match is None:
        return {"history": "rewritten"}
    found: dict[str, Any] = {}
    if _holds_answers(since):
        found["history"] = "rewritten"
    elif not match.is_exact:
        found["history"] = "edited"
    if match.known.step != index - 1 or found.get("history") == "rewritten":
        found["follows"] = match.known.step
    if match.known.choice:
        found["follows_choice"] = match.known.choice
    return found


def _holds_answers(since: list[Message]) -> bool:
    """Whether messages tell answers, and not only how the next one begins."""
    return any(is_assistant(message) for message in since[:-1])


def _settings(call: Call, record: EpisodeRecord) -> dict[str, Any]:
    """What a call was asked otherwise than the episode says."""
    asked = call.asked
    given = (("sampling", asked.settings, record.sampling), ("tools", asked.tools, record.tools))
    found: dict[str, Any] = {name: value for name, value, first in given if value != first and value is not None}
    if asked.settings is None and record.sampling:
        # Else those of the episode, which are those of its first call, would hold for this one.
        found["sampling"] = {}
    return found if call.api == CHAT else found | {"api": call.api}


def tokens_of(call: Call, answer: Completion, prompt: Prompt, prefixes: Prefixes, owner: bytes) -> TokensRecord | None:
    """The exact tokens of a call, if the engine told them."""
    if not answer.prompt_ids or not answer.action_ids:
        return None
    match = prefixes.by_tokens(prompt, owner)
    return TokensRecord(
        context_ids=answer.prompt_ids[match.length // _ID_BYTES if match else 0 :],
        action_ids=answer.action_ids,
        action_logprobs=answer.logprobs,
        constrained=[True] * len(answer.action_ids) if call.asked.is_constrained else None,
        prefix_step_index=match.known.step if match else None,
        logprobs_mode=call.logprobs_mode if answer.logprobs is not None else None,
        engine=call.engine,
        policy_version=call.policy_version,
        **call.sampling,
    )


def _without_echo(asked: Asked, message: Message) -> Message:
    """An answer without the prompt that it repeats because it was asked to."""
    content = message.get("content")
    if not asked.is_echoed or asked.text is None or not isinstance(content, str):
        return message
    return message | {"content": content.removeprefix(asked.text)}


def _names(extra: dict[str, Any]) -> tuple[str, ...]:
    """Ids by which later calls name an answer."""
    found = (extra.get("id"), conversation_of(extra))
    return tuple(name for name in found if isinstance(name, str))
