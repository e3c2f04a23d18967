"""Calls of simulated agents as the proxy's session registry takes them, with what each of them saw and got."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from lake.live.calls.address import RolloutAddress
from lake.live.calls.apis import CHAT, COMPLETIONS, parse_answer, parse_request
from lake.live.calls.steps import Call
from lake.live.frames import NO_KEY, EndFrame, Frame, assemble_episode, decode, encode
from lake.live.proxy.sessions import SessionRegistry
from lake.records import EpisodeRecord, StepRecord
from testkit.engine_server import encoded, rendered, said_ids

START = datetime(2026, 1, 1, tzinfo=UTC)
Message = dict[str, Any]


class Recording:
    """A session registry whose frames are kept."""

    def __init__(self, **limits: Any) -> None:
        self.frames: dict[bytes, list[Frame]] = {}
        self._limits = limits
        self.registry = SessionRegistry(self._emit, **limits)

    def _emit(self, key: bytes, number: int, frame: Frame, _: bool) -> None:
        frames = self.frames.setdefault(key, [])
        assert number == len(frames)
        # As the spool gives it back: what is changed later is not in it.
        frames.append(_copied(frame))

    def resumed(self) -> "Recording":
        """Another process continues with what is open."""
        recording = Recording(**self._limits)
        for key, frames in self.frames.items():
            recording.frames[key] = list(frames)
            if not isinstance(frames[-1], EndFrame):
                recording.registry.resume(key, map(_copied, frames))
        return recording

    def records(self) -> list[EpisodeRecord]:
        """The episodes, all of them ended, in the order in which they began."""
        self.registry.stop(START)
        return [assemble_episode(frames) for frames in self.frames.values()]


def _copied(frame: Frame) -> Frame:
    return decode(encode(NO_KEY, 0, frame))


def answer_of(text: str, *tools: str) -> Message:
    """An answer, by its words and the ids of its tool calls."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": name})}}
        for name in tools
    ]
    return {"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {})


def result(name: str, text: str) -> Message:
    """What a tool gave back."""
    return {"role": "tool", "tool_call_id": name, "content": text}


def chat(
    address: RolloutAddress,
    messages: list[Message],
    *samples: Message,
    number: int = 0,
    error: str | None = None,
    has_ids: bool = True,
    **body: Any,
) -> Call:
    """A call of a chat, whose answer has some samples; or that failed."""
    body = {"model": "policy", "messages": messages} | body
    choices = [
        {"index": index, "message": message, "finish_reason": "stop"}
        | ({"token_ids": ids_of(message), "logprobs": _logprobs(message)} if has_ids else {})
        for index, message in enumerate(samples)
    ]
    payload: dict[str, Any] = {"id": f"a{number}", "model": "policy", "choices": choices}
    payload |= {"prompt_token_ids": rendered(messages)} if has_ids else {}
    return _call(CHAT, address, body, None if error else payload, number, error)


def completion(address: RolloutAddress, prompt: Any, text: str, *, number: int = 0, **body: Any) -> Call:
    """A call of a text or of token ids, with its answer; a text's tokens are its bytes."""
    prompt_ids = encoded(prompt) if isinstance(prompt, str) else prompt
    choice = {"index": 0, "text": text, "finish_reason": "stop", "token_ids": encoded(text)}
    payload = {"id": f"a{number}", "model": "policy", "choices": [choice | {"prompt_token_ids": prompt_ids}]}
    return _call(COMPLETIONS, address, {"model": "policy", "prompt": prompt} | body, payload, number, None)


def answered_call(
    api: str, address: RolloutAddress, body: dict[str, Any], answer: dict[str, Any], *, number: int = 0
) -> Call:
    """A call by its request and its answer, as an API writes them."""
    return _call(api, address, body, answer, number, None)


def _call(
    api: str,
    address: RolloutAddress,
    body: dict[str, Any],
    payload: dict[str, Any] | None,
    number: int,
    error: str | None,
) -> Call:
    return Call(
        address=address,
        api=api,
        request=parse_request(api, body),
        answer=None if payload is None else parse_answer(api, payload),
        started_at=START + timedelta(seconds=number),
        latency=0.5,
        error=error,
    )


def ids_of(message: Message) -> list[int]:
    """Tokens of an answer."""
    return said_ids(message["content"] or "", message.get("tool_calls", []))


def _logprobs(message: Message) -> dict[str, Any]:
    return {"content": [{"logprob": -1.0} for _ in ids_of(message)]}


def prompt_ids(record: EpisodeRecord, index: int) -> list[int]:
    """The tokens of a step's prompt, from its row and those that it extends."""
    tokens = record.steps[index].tokens
    assert tokens is not None
    prefix = tokens.prefix_step_index
    if not isinstance(prefix, int):
        return tokens.context_ids
    before = record.steps[prefix].tokens
    assert before is not None
    return [*prompt_ids(record, prefix), *before.action_ids, *tokens.context_ids]


def prompt_messages(record: EpisodeRecord, index: int) -> list[Message]:
    """The messages of a step's prompt, from its row and those that it continues from."""
    if not index:
        return record.initial_messages or []
    step = record.steps[index]
    extra = step.extra or {}
    follows = extra.get("follows", None if extra.get("history") == "rewritten" else index - 1)
    if follows is None:
        return step.context
    choice = extra.get("follows_choice", 0)
    before = record.steps[follows]
    answer = before.extra["choices"][choice - 1]["message"] if choice and before.extra else _answer(before)
    return [*prompt_messages(record, follows), answer, *step.context]


def _answer(step: StepRecord) -> Message:
    return {"role": "assistant", "content": step.action or None} | (
        {"tool_calls": step.tool_calls} if step.tool_calls else {}
    )
