"""Answers of chat, completion and Responses APIs: their messages, their exact tokens, and what they add to a step.

Responses come complete or as the chunks of a stream. Engines that are asked for token ids (vLLM: `return_token_ids`)
give `prompt_token_ids` next to the choices or in the first choice, and `token_ids` in each choice. In a stream, the ids
of the prompt are in the first chunk, and those of each chunk in the chunk.

Engines report the complete prompt of every call. Stored that way, an episode would grow with the square of its turns.
`Lineage` stores each prompt as the earlier call that it extends and the tokens added since. That stays linear, and
shows where a history was cut: a prompt that extends no earlier call opens a new sequence.

One call of the Responses API returns several items: reasoning, messages, calls of tools. They are one message, which
ends with the next item that the model was given, or with an item that carries the tokens of its call.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from lake.formats.base.fields import as_list, as_object, parse_count, parse_time
from lake.formats.base.rows import ShapeError, omit_fields
from lake.formats.chat.messages import Message, check_message
from lake.formats.tracing.payloads import split_content, to_messages, to_text
from lake.records import Index, StepRecord, TokensRecord, find_logprob_fault

LOGPROBS_LEFT_OUT = "logprobs_left_out"
"""Key in `extra` of a step for the reason why the log-probabilities of its engine are not stored."""
_RESULTS = ("function_call_output", "custom_tool_call_output")
_PACK, _UNPACK = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


class Completion(msgspec.Struct, kw_only=True):
    """An answer of a model."""

    message: Message | None = None
    """None if the model answered nothing."""
    model: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: list[int] = []
    action_ids: list[int] = []
    logprobs: list[float] | None = None
    """One for each of `action_ids`."""
    extra: dict[str, Any] = {}
    """Further fields, the other choices among them."""


class _ResponseChoice(msgspec.Struct):
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: list[Index] | None = None
    prompt_token_ids: list[Index] | None = None
    provider_specific_fields: dict[str, Any] | None = None


class _ApiResponse(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[Index] | None = None
    response_token_ids: list[list[Index]] | None = None


_RESPONSE_KEYS = ("choices", "model", "usage", "prompt_token_ids", "response_token_ids", "object")
_CHOICE_KEYS = ("index", "message", "text", "finish_reason", "logprobs", "token_ids", "prompt_token_ids")


def parse_completion(response: Any, location: str = "response") -> Completion:
    """Parse a response, or the chunks of one. Raises ShapeError: it is neither, or a field has the wrong type."""
    try:
        if isinstance(response, list):
            stream = CompletionStream()
            for chunk in response:
                stream.add(chunk)
            response = stream.build_response()
        return _parse_response(response)
    except msgspec.ValidationError as error:
        raise ShapeError(f"{error} of `{location}`") from error


def _parse_response(fields: Any) -> Completion:
    response = msgspec.convert(fields, _ApiResponse)
    extra = omit_fields(fields, *_RESPONSE_KEYS) or {}
    usage = response.usage or {}
    answer = Completion(
        model=response.model or None,
        prompt_tokens=parse_count(usage.get("prompt_tokens")),
        completion_tokens=parse_count(usage.get("completion_tokens")),
        extra=extra,
    )
    if extra_usage := omit_fields(usage, "prompt_tokens", "completion_tokens", "total_tokens"):
        extra["usage"] = extra_usage
    if not response.choices:
        return answer
    choice = msgspec.convert(response.choices[0], _ResponseChoice)
    provider_fields = choice.provider_specific_fields or {}
    ids = choice.token_ids or msgspec.convert(provider_fields.get("token_ids"), list[Index] | None)
    answer.prompt_ids = response.prompt_token_ids or choice.prompt_token_ids or []
    answer.action_ids = ids or (response.response_token_ids or [[]])[0]
    answer.finish_reason = choice.finish_reason
    answer.message = normalise_message(choice.message) if choice.message else None
    if answer.message is None and choice.text is not None:
        answer.message = {"role": "assistant", "content": choice.text}
    answer.logprobs = parse_logprobs(choice.logprobs, len(answer.action_ids))
    if answer.logprobs is None and choice.logprobs:
        extra["logprobs"] = choice.logprobs
    if len(response.choices) > 1:
        extra["choices"] = response.choices[1:]
    mapped_keys = _CHOICE_KEYS + (("provider_specific_fields",) if provider_fields.keys() <= {"token_ids"} else ())
    if extra_choice := omit_fields(response.choices[0], *mapped_keys):
        extra["choice"] = extra_choice
    return answer


def normalise_message(message: dict[str, Any]) -> Message:
    """Return the message of a choice; some engines call its reasoning `reasoning`."""
    fields = {key: field for key, field in message.items() if field is not None and field != []}
    if isinstance(fields.get("reasoning"), str):
        reasoning = fields.pop("reasoning")
        if fields.setdefault("reasoning_content", reasoning) != reasoning:
            fields["reasoning"] = reasoning
    return {"role": "assistant"} | fields


def parse_logprobs(logprobs: Any, count: int) -> list[float] | None:
    """Return the log-probabilities of the sampled tokens; None unless there is one for each of `count` tokens."""
    if not isinstance(logprobs, dict) or not count:
        return None
    candidates = as_list(logprobs.get("token_logprobs"))
    if isinstance(content := logprobs.get("content"), list):
        candidates = [as_object(token).get("logprob") for token in content]
    numbers = [float(v) for v in candidates if isinstance(v, int | float) and not isinstance(v, bool)]
    return numbers if len(numbers) == len(candidates) == count else None


def drop_invalid_logprobs(answer: Completion) -> None:
    """Remove invalid log-probabilities of an answer, and write the reason to `extra`; rounded ones above 0 become 0.

    A loss with ratios refuses tokens without them. A number in place of a wrong one would count as the sampled one.
    """
    if answer.logprobs is None:
        return
    if (fault := find_logprob_fault(answer.logprobs)) is not None:
        answer.extra[LOGPROBS_LEFT_OUT] = f"the engine tells log-probability {fault}"
    answer.logprobs = None if fault else [min(logprob, 0.0) for logprob in answer.logprobs]


# ---------------------------------------------------------------- streams


class _StreamChunk(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[Index] | None = None


class _ChoiceDelta(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: Any = None
    token_ids: list[Index] | None = None
    prompt_token_ids: list[Index] | None = None


class CompletionStream:
    """Assembles a response from the chunks of a stream."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._prompt_ids: list[int] | None = None
        self._choices: dict[int, _StreamedChoice] = {}

    def add(self, fields: Any) -> None:
        """Add one chunk. Raises msgspec.ValidationError: it is not a chunk."""
        chunk = msgspec.convert(fields, _StreamChunk)
        self._fields |= omit_fields(fields, "choices", "object", "prompt_token_ids") or {}
        self._prompt_ids = self._prompt_ids or chunk.prompt_token_ids
        for choice in chunk.choices or ():
            delta = msgspec.convert(choice, _ChoiceDelta)
            self._prompt_ids = self._prompt_ids or delta.prompt_token_ids
            self._choices.setdefault(delta.index, _StreamedChoice()).add(delta, choice)

    def build_response(self) -> dict[str, Any]:
        """Return the response in the form of one that did not stream."""
        choices = [{"index": index} | choice.build() for index, choice in sorted(self._choices.items())]
        return {**self._fields, "prompt_token_ids": self._prompt_ids, "choices": choices}


class _StreamedChoice:
    """One choice of a stream."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._token_ids: list[int] = []
        self._texts: dict[str, list[str]] = {}
        self._lists: dict[str, Any] = {}
        """Fields of the message that are lists, without its calls."""
        self._calls: dict[int, tuple[dict[str, Any], dict[str, list[str]]]] = {}
        """Fields of each call, and the texts of its function."""
        self._logprobs: dict[str, list[bytes]] = {}
        """Lists of them as JSON: millions of small objects would slow down the garbage collector."""

    def add(self, delta: _ChoiceDelta, fields: dict[str, Any]) -> None:
        """Add one chunk's part of the choice. Raises msgspec.ValidationError."""
        self._fields |= omit_fields(fields, *_ChoiceDelta.__struct_fields__) or {}
        self._token_ids += delta.token_ids or []
        if isinstance(delta.logprobs, dict):
            for key in ("content", "token_logprobs"):
                if isinstance(logprobs := delta.logprobs.get(key), list):
                    self._logprobs.setdefault(key, []).append(_PACK(logprobs))
        if delta.text is not None:
            self._texts.setdefault("text", []).append(delta.text)
        for key, field in (delta.delta or {}).items():
            if isinstance(field, str) and key != "role":
                self._texts.setdefault(key, []).append(field)
            elif key == "tool_calls" and field:
                for call in msgspec.convert(field, list[dict[str, Any]]):
                    self._add_call(call)
            elif isinstance(field, list):
                self._lists.setdefault(key, []).extend(field)

    def _add_call(self, delta: dict[str, Any]) -> None:
        index = number if isinstance(number := delta.get("index"), int) else len(self._calls)
        fields, texts = self._calls.setdefault(index, ({}, {"name": [], "arguments": []}))
        fields |= omit_fields(delta, "index", "function") or {}
        for key, text in msgspec.convert(delta.get("function") or {}, dict[str, str | None]).items():
            texts.setdefault(key, []).append(text or "")

    def build(self) -> dict[str, Any]:
        """Return the choice in the form of one that did not stream."""
        message = {key: "".join(texts) for key, texts in self._texts.items() if key != "text"} | self._lists
        if self._calls:
            message["tool_calls"] = [
                {"function": {key: "".join(pieces) for key, pieces in texts.items()}} | fields
                for _, (fields, texts) in sorted(self._calls.items())
            ]
        choice = {**self._fields, "token_ids": self._token_ids, "message": message or None}
        if "text" in self._texts and not message:
            choice["text"] = "".join(self._texts["text"])
        if self._logprobs:
            lists = {key: [_UNPACK(packed) for packed in packs] for key, packs in self._logprobs.items()}
            choice["logprobs"] = {key: [lp for logprobs in lps for lp in logprobs] for key, lps in lists.items()}
        return choice


# ---------------------------------------------------------------- tokens and answers of steps


class Lineage:
    """The token sequences of an episode so far."""

    def __init__(self) -> None:
        self._sequences: list[tuple[int, list[int]]] = []
        """Step index and its complete sequence, prompt and action."""

    def add(
        self,
        step_index: int,
        prompt_ids: Sequence[int],
        action_ids: Sequence[int],
        action_logprobs: Sequence[float] | None = None,
        **fields: Any,
    ) -> TokensRecord:
        """Add one call and return its tokens; `fields` are further ones of the record."""
        prompt = list(prompt_ids)
        # The longest match counts, of equals the newest. Longest first, because the last call mostly is the match.
        longest_first = sorted(self._sequences, key=lambda pair: (len(pair[1]), pair[0]), reverse=True)
        matches = ((i, len(s)) for i, s in longest_first if len(s) <= len(prompt) and prompt[: len(s)] == s)
        prefix, length = next(matches, (None, 0))
        self._sequences.append((step_index, [*prompt, *action_ids]))
        return TokensRecord(
            context_ids=prompt[length:],
            action_ids=list(action_ids),
            action_logprobs=None if action_logprobs is None else list(action_logprobs),
            prefix_step_index=prefix,
            **fields,
        )


def apply_answer(step: StepRecord, response: Any, lineage: Lineage, index: int) -> Any:
    """Write the fields of an answer to a step, and return those without a column.

    An answer of the wrong shape is returned unchanged: the message already describes the step.
    """
    try:
        answer = parse_completion(response)
    except ShapeError:
        return response
    extra = answer.extra
    usage = as_object(extra.get("usage"))
    step.model = answer.model or step.model
    step.finish_reason = answer.finish_reason or step.finish_reason
    for name, count, key in (
        ("prompt_tokens", answer.prompt_tokens, "input_tokens"),
        ("completion_tokens", answer.completion_tokens, "output_tokens"),
    ):
        counts = (count, parse_count(usage.get(key)), getattr(step, name))
        setattr(step, name, next((number for number in counts if number is not None), None))
    for key in ("created", "created_at"):
        if (time := parse_time(extra.get(key))) is not None:
            step.started_at = time
            del extra[key]
    if answer.prompt_ids and answer.action_ids:
        drop_invalid_logprobs(answer)
        step.tokens = lineage.add(index, answer.prompt_ids, answer.action_ids, answer.logprobs)
    message = answer.message or {}
    reasoning = message.get("reasoning_content")
    if step.reasoning is None and isinstance(reasoning, str):
        step.reasoning = reasoning or None
    repeated = ["role", "content", *(["reasoning_content"] if step.reasoning == reasoning else [])]
    repeated += ["tool_calls"] if len(message.get("tool_calls") or ()) == len(step.tool_calls or ()) else []
    if extra_fields := omit_fields(message, *repeated):
        extra["message"] = extra_fields
    extra.pop("output", None)
    return extra or None


# ---------------------------------------------------------------- items of the Responses API


def build_output_message(items: Any, location: str) -> Message:
    """Return the message of the output items of an answer. Raises ShapeError: they are not a list."""
    if not isinstance(items, list):
        raise ShapeError(f"`{location}` is {type(items).__name__}; valid: a list of output items")
    output_parts: list[Any] = []
    for item in items:
        content = as_object(item).get("content") if as_object(item).get("type") == "message" else None
        output_parts += content if isinstance(content, list) else [item]
    return split_content(output_parts, "assistant")[-1]


def build_input_message(item: Any, location: str) -> Message:
    """Return the message of an input item; one with a role is a message already. Raises ShapeError: it is neither."""
    if isinstance(item, dict) and "role" not in item and isinstance(item.get("type"), str):
        message = to_messages(item, "user")[0]
        return (omit_fields(item, "type", "call_id", "output", "content", "summary", "id") or {}) | message
    message = check_message(item, location)
    return {key: field for key, field in message.items() if field is not None or key == "content"}


def group_items(items: list[Any], location: str) -> list[tuple[Message, list[dict[str, Any]]]]:
    """Group items into messages: each message of the model with its items, each input message with none.

    Raises ShapeError: an item is not an object, or neither a message nor a known item.
    """
    messages: list[tuple[Message, list[dict[str, Any]]]] = []
    run: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ShapeError(f"Expected `object`, got `{type(item).__name__}` - at `$.{location}[{index}]`")
        kind = item.get("type")
        if _is_output(item):
            run.append(item)
            if not item.get("generation_token_ids"):
                continue
            observed = None
        elif "role" not in item and isinstance(kind, str) and kind not in _RESULTS:
            output = to_text(item.get("output", ""))
            observed = {"role": "tool", "content": output, "item": omit_fields(item, "output")}
        else:
            input_item = omit_fields(item, "type") if "role" in item else item
            observed = build_input_message(input_item, f"{location}[{index}]")
        if run:
            messages.append((_merge_items(run), run))
        messages += [] if observed is None else [(observed, [])]
        run = []
    if run:
        messages.append((_merge_items(run), run))
    return messages


def _is_output(item: dict[str, Any]) -> bool:
    """Return whether the model wrote an item: a message, reasoning, or a call."""
    if item.get("role") is not None:
        return bool(item["role"] == "assistant")
    kind = item.get("type")
    return isinstance(kind, str) and kind != "message" and not kind.endswith(("_output", "_response", "_reference"))


def _merge_items(items: list[dict[str, Any]]) -> Message:
    item_parts: list[Any] = []
    for item in items:
        if "role" not in item:
            item_parts.append(item)
        elif isinstance(content := item.get("content"), list):
            item_parts += content
        elif content is not None:
            item_parts.append({"type": "text", "text": content})
    message = split_content(item_parts, "assistant")[-1]
    ids = [item["id"] for item in items if item.get("id") is not None]
    return message | ({"item_ids": ids} if ids else {})


def to_chat_tool(tool: Any) -> Any:
    """Return a tool of the Responses API in the form of chat APIs."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": omit_fields(tool, "type") or {}}
    return tool
