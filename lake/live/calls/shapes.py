"""Requests and answers of the four APIs that are recorded, in the one form of chats (`lake.formats.chat`).

Chat completions, completions, OpenAI's Responses, Anthropic's messages: what a file of their requests means and what a
call that passes by means is decided by the same readers.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import whole
from lake.formats.base.rows import ShapeError, rest
from lake.formats.base.secrets import without_secrets
from lake.formats.chat.answers import of_output
from lake.formats.chat.chat_completions import Completion, completion
from lake.formats.chat.chat_messages import chat_messages
from lake.formats.chat.messages import Message, checked
from lake.formats.chat.response_items import chat_tool, item_messages
from lake.formats.tracing.shapes import split
from lake.records import Index, sampling_of

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
APIS = {f"/v1/{name}": name for name in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
"""Path of a call that is recorded -> its API."""
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, or nested too deeply for it."""
_NO_SETTING = (
    "messages",
    "prompt",
    "input",
    "instructions",
    "system",
    "model",
    "tools",
    "stream",
    "stream_options",
    "user",
)
_ASKED_FOR = (
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "previous_response_id",
    "conversation",
    "metadata",
    "store",
)
_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Keys of a request under which engines take a grammar."""
_BIASES = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
}
"""Keys under which they take what favours some tokens -> values that change nothing; null does not either."""


class Asked(msgspec.Struct, kw_only=True):
    """What a model was given."""

    messages: list[Message]
    """Empty if only its tokens are known."""
    model: str | None = None
    tools: list[Any] | None = None
    settings: dict[str, Any] | None = None
    """Sampling parameters and whatever else it says, without keys."""
    text: str | None = None
    """The prompt, where it is a text and no messages."""
    is_echoed: bool = False
    """The answer repeats that text before its own."""
    previous: str | None = None
    """Id of the answer, or of the conversation, that the messages go on from, where the engine keeps the history."""
    is_constrained: bool = False
    """A grammar or a bias changes what may be sampled, so that it is not the policy's own distribution."""

    def sampling(self) -> dict[str, Any]:
        """The fields of `TokensRecord` that say how tokens were sampled."""
        return sampling_of(self.settings)


def asked(api: str, body: dict[str, Any]) -> Asked:
    """A request.

    Raises:
        ShapeError: its messages are not of the API's form.
    """
    messages, tools = _given(api, body)
    settings = without_secrets(rest(body, *_NO_SETTING, *_ASKED_FOR)) or None
    is_text = api == COMPLETIONS and bool(messages)
    return Asked(
        messages=messages,
        model=_text(body.get("model")),
        tools=tools or None,
        settings=settings,
        text=messages[0]["content"] if is_text else None,
        is_echoed=is_text and bool(body.get("echo")),
        previous=(_text(body.get("previous_response_id")) or conversation_of(body)) if api == RESPONSES else None,
        is_constrained=_is_constrained(body),
    )


def conversation_of(holder: dict[str, Any]) -> str | None:
    """Id of the conversation that a request or an answer of the Responses API names."""
    found = holder.get("conversation")
    return _text(found.get("id") if isinstance(found, dict) else found)


def answered(api: str, body: Any) -> Completion:
    """A whole answer; what is not known of it is None or empty.

    Raises:
        ShapeError: it is not of the API's form, or says that there is none.
    """
    if api in (CHAT, COMPLETIONS):
        return _sampled(completion(body))
    if not isinstance(body, dict):
        raise ShapeError(f"the answer is {type(body).__name__}; valid: an object")
    usage = body["usage"] if isinstance(body.get("usage"), dict) else {}
    found = Completion(
        model=_text(body.get("model")),
        prompt_tokens=whole(usage.get("input_tokens")),
        completion_tokens=whole(usage.get("output_tokens")),
        extra=rest(body, "output", "content", "model", "usage", "object", "type", "role", "stop_reason", *_echoed(api))
        or {},
    )
    if more := rest(usage, "input_tokens", "output_tokens", "total_tokens"):
        found.extra["usage"] = more
    if api == RESPONSES:
        status = body.get("status")
        if status not in (None, "completed", "incomplete"):
            why = (
                msgspec.json.encode(body["error"]).decode() if body.get("error") else "only whole answers are recorded"
            )
            raise ShapeError(f"the answer is {status}: {why}")
        found.message = of_output(body["output"], "output") if body.get("output") else None
        reason = body.get("incomplete_details")
        found.finish_reason = reason.get("reason") if isinstance(reason, dict) else _text(status)
    else:
        found.message = split(body["content"], "assistant")[-1] if body.get("content") else None
        found.finish_reason = _text(body.get("stop_reason"))
    return found


def _sampled(found: Completion) -> Completion:
    """An answer whose tokens are counted, where they were told, and the other samples of its prompt brought in form.

    Those are in `extra.choices`: message, finish_reason, token_ids, logprobs.
    """
    others = [completion({"choices": [choice]}) for choice in found.extra.get("choices", ())]
    if others:
        found.extra["choices"] = [
            {
                "message": other.message,
                "finish_reason": other.finish_reason,
                "token_ids": other.action_ids or None,
                "logprobs": other.logprobs,
            }
            for other in others
        ]
    if found.prompt_tokens is None and found.prompt_ids:
        found.prompt_tokens = len(found.prompt_ids)
    if found.completion_tokens is None and found.action_ids:
        found.completion_tokens = sum(len(one.action_ids) for one in (found, *others))
    return found


def _given(api: str, body: dict[str, Any]) -> tuple[list[Message], list[Any]]:
    """The messages and the tools of a request."""
    tools = body["tools"] if isinstance(body.get("tools"), list) else []
    if api == CHAT:
        found = chat_messages(body.get("messages"), "messages")
    elif api == COMPLETIONS:
        text = body.get("prompt")
        found = [] if _are_ids(text) else [{"role": "user", "content": _prompt_text(text)}]
    elif api == RESPONSES:
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise ShapeError(f"`input` is {type(given).__name__}; valid: a text or a list of items")
        instructions = body.get("instructions")
        found = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
        found += [message for message, _ in item_messages(items, "input")]
        tools = [chat_tool(tool) for tool in tools]
    else:
        found = split(body["system"], "system") if body.get("system") else []
        given = body.get("messages") or []
        if not isinstance(given, list):
            raise ShapeError(f"`messages` is {type(given).__name__}; valid: a list")
        for index, message in enumerate(given):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ShapeError(f"`messages[{index}]` is no message; valid: an object with `role` and `content`")
            found += split(message.get("content"), message["role"])
        tools = [_chat_tool(tool) for tool in tools]
    return [checked(message, f"messages[{index}]") for index, message in enumerate(found)], tools


def _chat_tool(tool: Any) -> Any:
    """A tool of Anthropic's messages as chat APIs write it; those that its server runs stay as they are."""
    if not isinstance(tool, dict) or "input_schema" not in tool:
        return tool
    return {
        "type": "function",
        "function": (rest(tool, "type", "input_schema") or {}) | {"parameters": tool["input_schema"]},
    }


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise ShapeError(f"`prompt` is {type(prompt).__name__}; valid: one text, or one list of token ids")
    return prompt


def _are_ids(prompt: Any) -> bool:
    """Whether a prompt is token ids, alone or as the only one of a list."""
    inner = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list) else prompt
    try:
        return bool(msgspec.convert(inner, list[Index])) and isinstance(inner, list)
    except msgspec.ValidationError:
        return False


def _is_constrained(body: dict[str, Any]) -> bool:
    form, choice, tools = body.get("response_format"), body.get("tool_choice"), body.get("tools")
    return (
        (isinstance(form, dict) and form.get("type") not in (None, "text"))
        or choice == "required"
        or isinstance(choice, dict)
        or (isinstance(tools, list) and choice != "none" and any(map(_is_strict, tools)))
        or any(body.get(key) is not None for key in _GRAMMARS)
        or any(body.get(key) not in (None, *neutral) for key, neutral in _BIASES.items())
    )


def _is_strict(tool: Any) -> bool:
    """Whether calls of a tool are held to its schema: vLLM then writes all calls under a grammar, also by `auto`."""
    given = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(given, dict) and bool(given.get("strict"))


def _echoed(api: str) -> tuple[str, ...]:
    """Keys of an answer that repeat the request."""
    settings = ("instructions", "tools", "tool_choice", "temperature", "top_p", "top_logprobs", "metadata", "text")
    more = ("parallel_tool_calls", "truncation", "max_output_tokens", "previous_response_id", "store", "user", "status")
    return (*settings, *more, "incomplete_details") if api == RESPONSES else ()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
