"""Responses of chat and completion servers, whole or as the chunks of a stream: what was said, with which tokens.

Engines that are asked for token ids (vLLM: `return_token_ids`) give `prompt_token_ids` beside the choices or in the
first, and `token_ids` in each choice; in a stream, the prompt's in the first chunk and those of each chunk in it.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import whole
from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.messages import Message
from lake.records import Index, logprob_fault

_PACK, _UNPACK = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


class Completion(msgspec.Struct, kw_only=True):
    """What a model answered."""

    message: Message | None = None
    """None if it answered nothing."""
    model: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: list[int] = []
    action_ids: list[int] = []
    logprobs: list[float] | None = None
    """One for each of the action's ids."""
    extra: dict[str, Any] = {}
    """What it says besides; other choices among it."""


def completion(response: Any, place: str = "response") -> Completion:
    """A response.

    Raises:
        ShapeError: it is neither an object nor a list of chunks, or its parts are of wrong types; the message names it.
    """
    try:
        return _completion(_assembled(response) if isinstance(response, list) else response)
    except msgspec.ValidationError as error:
        raise ShapeError(f"{error} of `{place}`") from error


class _Choice(msgspec.Struct):
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: list[Index] | None = None
    prompt_token_ids: list[Index] | None = None
    provider_specific_fields: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[Index] | None = None
    response_token_ids: list[list[Index]] | None = None


def _completion(value: Any) -> Completion:
    response = msgspec.convert(value, _Response)
    extra = rest(value, "choices", "model", "usage", "prompt_token_ids", "response_token_ids", "object") or {}
    usage = response.usage or {}
    found = Completion(
        model=response.model or None,
        prompt_tokens=whole(usage.get("prompt_tokens")),
        completion_tokens=whole(usage.get("completion_tokens")),
        extra=extra,
    )
    if more := rest(usage, "prompt_tokens", "completion_tokens", "total_tokens"):
        extra["usage"] = more
    if not response.choices:
        return found
    choice = msgspec.convert(response.choices[0], _Choice)
    own = choice.provider_specific_fields or {}
    ids = choice.token_ids or msgspec.convert(own.get("token_ids"), list[Index] | None)
    found.prompt_ids = response.prompt_token_ids or choice.prompt_token_ids or []
    found.action_ids = ids or (response.response_token_ids or [[]])[0]
    found.finish_reason = choice.finish_reason
    found.message = said(choice.message) if choice.message else None
    if found.message is None and choice.text is not None:
        found.message = {"role": "assistant", "content": choice.text}
    found.logprobs = logprobs_of(choice.logprobs, len(found.action_ids))
    if found.logprobs is None and choice.logprobs:
        extra["logprobs"] = choice.logprobs
    if len(response.choices) > 1:
        extra["choices"] = response.choices[1:]
    known = ("index", "message", "text", "finish_reason", "logprobs", "token_ids", "prompt_token_ids")
    if more := rest(
        response.choices[0], *known, *(("provider_specific_fields",) if own.keys() <= {"token_ids"} else ())
    ):
        extra["choice"] = more
    return found


def said(message: dict[str, Any]) -> Message:
    """The message of a choice; some engines call its reasoning `reasoning`."""
    found = {key: value for key, value in message.items() if value is not None and value != []}
    if isinstance(found.get("reasoning"), str):
        reasoning = found.pop("reasoning")
        if found.setdefault("reasoning_content", reasoning) != reasoning:
            found["reasoning"] = reasoning
    return {"role": "assistant"} | found


def logprobs_of(logprobs: Any, count: int) -> list[float] | None:
    """Log-probabilities of the chosen tokens; None unless there is one for each of `count`."""
    if not isinstance(logprobs, dict) or not count:
        return None
    given = logprobs.get("content")
    if isinstance(given, list):
        values = [item.get("logprob") if isinstance(item, dict) else None for item in given]
    else:
        values = logprobs["token_logprobs"] if isinstance(logprobs.get("token_logprobs"), list) else []
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return numbers if len(numbers) == len(values) == count else None


LOGPROBS_LEFT_OUT = "logprobs_left_out"
"""In `extra` of a step: why the log-probabilities that its engine told are not stored."""


def settle_logprobs(answer: Completion) -> None:
    """Take out log-probabilities of an answer that are none, and say why in its `extra`; what engines round becomes 0.

    A loss with ratios refuses such tokens; any number in place of a wrong one would be taken for what was sampled.
    """
    if answer.logprobs is None:
        return
    if (fault := logprob_fault(answer.logprobs)) is not None:
        answer.extra[LOGPROBS_LEFT_OUT] = f"the engine tells log-probability {fault}"
    answer.logprobs = None if fault else [min(value, 0.0) for value in answer.logprobs]


class _Chunk(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[Index] | None = None


class _Piece(msgspec.Struct):
    """One choice of a chunk."""

    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: Any = None
    token_ids: list[Index] | None = None
    prompt_token_ids: list[Index] | None = None


class Stream:
    """The chunks of a stream, put together as they come."""

    def __init__(self) -> None:
        self._about: dict[str, Any] = {}
        self._prompt_ids: list[int] | None = None
        self._choices: dict[int, _StreamedChoice] = {}

    def add(self, given: Any) -> None:
        """One chunk. Raises msgspec.ValidationError: it is none."""
        chunk = msgspec.convert(given, _Chunk)
        self._about |= rest(given, "choices", "object", "prompt_token_ids") or {}
        self._prompt_ids = self._prompt_ids or chunk.prompt_token_ids
        for item in chunk.choices or ():
            piece = msgspec.convert(item, _Piece)
            self._prompt_ids = self._prompt_ids or piece.prompt_token_ids
            self._choices.setdefault(piece.index, _StreamedChoice()).add(piece, item)

    def response(self) -> dict[str, Any]:
        """As if it had come whole."""
        choices = [{"index": index} | choice.whole() for index, choice in sorted(self._choices.items())]
        return {**self._about, "prompt_token_ids": self._prompt_ids, "choices": choices}


class _StreamedChoice:
    """One choice of a stream."""

    def __init__(self) -> None:
        self._about: dict[str, Any] = {}
        self._token_ids: list[int] = []
        self._texts: dict[str, list[str]] = {}
        self._said: dict[str, Any] = {}
        """What the message says besides texts and calls."""
        self._calls: dict[int, tuple[dict[str, Any], dict[str, list[str]]]] = {}
        """What each says of itself, and the texts of its function."""
        self._logprobs: dict[str, list[bytes]] = {}
        """Lists of them as JSON: millions of small objects would keep the collector of garbage busy."""

    def add(self, piece: _Piece, given: dict[str, Any]) -> None:
        """What one chunk says of it. Raises msgspec.ValidationError."""
        self._about |= rest(given, *_Piece.__struct_fields__) or {}
        self._token_ids += piece.token_ids or []
        if isinstance(piece.logprobs, dict):
            for key in ("content", "token_logprobs"):
                if isinstance(values := piece.logprobs.get(key), list):
                    self._logprobs.setdefault(key, []).append(_PACK(values))
        if piece.text is not None:
            self._texts.setdefault("text", []).append(piece.text)
        for key, value in (piece.delta or {}).items():
            if isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
            elif key == "tool_calls" and value:
                for call in msgspec.convert(value, list[dict[str, Any]]):
                    self._add_call(call)
            elif isinstance(value, list):
                self._said.setdefault(key, []).extend(value)

    def _add_call(self, delta: dict[str, Any]) -> None:
        given = delta.get("index")
        index = given if isinstance(given, int) else len(self._calls)
        about, texts = self._calls.setdefault(index, ({}, {"name": [], "arguments": []}))
        about |= rest(delta, "index", "function") or {}
        for key, value in msgspec.convert(delta.get("function") or {}, dict[str, str | None]).items():
            texts.setdefault(key, []).append(value or "")

    def whole(self) -> dict[str, Any]:
        """As if it had come whole."""
        message = {key: "".join(parts) for key, parts in self._texts.items() if key != "text"} | self._said
        if self._calls:
            message["tool_calls"] = [
                {"function": {key: "".join(parts) for key, parts in texts.items()}} | about
                for _, (about, texts) in sorted(self._calls.items())
            ]
        choice = {**self._about, "token_ids": self._token_ids, "message": message or None}
        if "text" in self._texts and not message:
            choice["text"] = "".join(self._texts["text"])
        if self._logprobs:
            lists = {key: [_UNPACK(part) for part in parts] for key, parts in self._logprobs.items()}
            choice["logprobs"] = {key: [value for part in parts for value in part] for key, parts in lists.items()}
        return choice


def _assembled(chunks: list[Any]) -> dict[str, Any]:
    """Chunks as the response that they stream."""
    stream = Stream()
    for chunk in chunks:
        stream.add(chunk)
    return stream.response()
