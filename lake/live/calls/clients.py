"""Calls of a model as an agent has them: the arguments of a client library, and what it gave back.

They are brought into the form that they have on the wire, and read from there as the proxy reads them: a call that is
recorded in process and the same call through the proxy are the same rows.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from lake.formats.base.rows import WRONG, ShapeError, explained
from lake.formats.chat.chat_completions import Completion
from lake.formats.chat.messages import checked
from lake.live.calls.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Asked, answered, asked
from lake.live.calls.streams import gathering
from lake.live.frames import plain, said

_OF_CLIENTS = ("extra_body", "extra_headers", "extra_query", "timeout")
"""Arguments that are no part of a body."""
_NOT_GIVEN = ("NotGiven", "Omit")
"""Types of arguments that OpenAI's and Anthropic's clients leave out."""
_OF_MESSAGES = ("message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "ping")
"""Types of the events of Anthropic's messages."""


def body_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the request that a client makes of its arguments."""
    body = {
        name: value
        for name, value in arguments.items()
        if name not in _OF_CLIENTS and type(value).__name__ not in _NOT_GIVEN
    }
    more = arguments.get("extra_body")
    found: dict[str, Any] = sent(body | (dict(more) if isinstance(more, Mapping) else {}))
    return found


def sent(value: Any) -> Any:
    """A value as it is once it was sent as JSON; a copy."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_dumped))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return plain(value)


def api_of(request: Mapping[str, Any], answer: Any = None) -> str:
    """Which API a call is of, by what only its requests or answers have."""
    first = answer[0] if isinstance(answer, list) and answer else answer
    said = first if isinstance(first, dict) else {}
    kind = str(said.get("type"))
    if "input" in request or "output" in said or kind.startswith("response."):
        return RESPONSES
    if "prompt" in request:
        return COMPLETIONS
    is_message = kind in _OF_MESSAGES or (kind == "message" and isinstance(said.get("content"), list))
    return MESSAGES if is_message or "system" in request else CHAT


def read_request(api: str, body: dict[str, Any]) -> Asked:
    """What a model was asked. Raises ShapeError: the messages are not of the API's form."""
    if api == RESPONSES and "input" not in body and "messages" in body:
        body = body | {"input": body["messages"]}
    try:
        return asked(api, body)
    except ShapeError:
        raise
    except WRONG as error:
        raise ShapeError(explained(error)) from error


def read_answer(api: str, answer: Any, given: Any) -> Completion:
    """What a model answered: a whole answer, the list of a stream's chunks, or only its text.

    Args:
        api: of the call.
        answer: as it was sent.
        given: as the agent has it.

    Raises:
        ShapeError: it is none of these, or says nothing.
    """
    if isinstance(given, str):
        return Completion(message={"role": "assistant", "content": answer})
    if not isinstance(answer, dict | list):
        kind = type(given).__name__
        raise ShapeError(f"it is {kind}; valid: what the client library gave back, or a list of chunks")
    try:
        if isinstance(answer, list):
            gathered = gathering(api)
            for chunk in answer:
                gathered.add(chunk)
            answer = gathered.answer() or {}
        found = answered(api, answer)
        if found.message is not None:
            checked(found.message, "the answer")
    except ShapeError:
        raise
    except WRONG as error:
        raise ShapeError(explained(error)) from error
    if found.message is None and not found.action_ids:
        raise ShapeError("it says nothing")
    return found


def _dumped(value: Any) -> Any:
    """An object of a client library as it was sent: what was never set is left out."""
    try:
        return value.model_dump(mode="json", exclude_none=True, warnings=False)
    except Exception:
        return said(value)
