"""Tool calls in what a model wrote: how models spell them, behind one parser.

`hermes`: JSON objects {"name", "arguments"}, each between <tool_call> and </tool_call> (Qwen, Hermes, SmolLM). `llama`:
the whole answer is one JSON object {"name", "parameters"}, or several with semicolons between them, perhaps behind
<|python_tag|> (Llama 3). What begins as a call and cannot be read as one is no exception, but a fault that is told: the
text stays in the answer, for the environment to judge.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lake.errors import UsageError
from lake.records import printable

ToolFormat = Literal["auto", "hermes", "llama", "none"]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_HERMES_END, _LLAMA_LEAD = "</tool_call>", "<|python_tag|>"
_THINKING, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, taken apart."""

    text: str
    """Without reasoning and without the calls that were read."""
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As in an OpenAI message, their ids left out."""
    fault: str | None = None
    """Why a call cannot be read."""


class _UnreadableError(Exception):
    """A call that is none."""


def format_of(name: ToolFormat, chat_template: str) -> ToolFormat:
    """The format that is meant; `auto`: the one that the chat template writes.

    Raises:
        UsageError: `auto`, and the template writes neither.
    """
    if name != "auto":
        return name
    if "<tool_call>" in chat_template:
        return "hermes"
    if _LLAMA_LEAD in chat_template or '"parameters": ' in chat_template:
        return "llama"
    raise UsageError(
        "the chat template does not say how the model writes tool calls; name it: --tool-format hermes, llama, or none "
        "to leave them in the text"
    )


def take_apart(text: str, tool_format: ToolFormat, *, is_thinking: bool = False) -> Said:
    """Split an answer into reasoning, text and calls.

    Args:
        text: the answer, without the marker of its end.
        tool_format: how calls are spelled; `none`: they are not looked for.
        is_thinking: the prompt opened the reasoning already, so that the answer begins inside it.
    """
    reasoning, rest = _reasoning(text, is_thinking=is_thinking)
    if tool_format not in _READERS:
        return Said(rest, reasoning)
    try:
        left, calls = _READERS[tool_format](rest)
    except _UnreadableError as error:
        return Said(rest, reasoning, fault=str(error))
    return Said(left, reasoning, calls)


def _reasoning(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """What was thought, and what was said after that."""
    opened = text.lstrip()
    if not is_thinking and not opened.startswith(_THINKING):
        return None, text
    thought, closed, rest = opened.removeprefix(_THINKING).partition(_THOUGHT)
    return thought.strip("\n"), rest.lstrip("\n") if closed else ""


def _hermes(text: str) -> tuple[str, list[dict[str, Any]]]:
    found = list(_HERMES.finditer(text))
    for match in found:
        if not match.group().endswith(_HERMES_END):
            raise _UnreadableError(f"a <tool_call> is not closed by {_HERMES_END}")
    calls = [_call(_decoded(match.group(1)), "arguments") for match in found]
    return (_HERMES.sub("", text).strip() if calls else text), calls


def _llama(text: str) -> tuple[str, list[dict[str, Any]]]:
    body = text.strip()
    is_marked = body.startswith(_LLAMA_LEAD)
    body = body.removeprefix(_LLAMA_LEAD).strip()
    if not is_marked and not body.startswith("{"):
        return text, []
    try:
        objects = list(_objects(body))
    except _UnreadableError:
        if is_marked or '"name"' in body:
            raise
        return text, []
    if not is_marked and not all(isinstance(value, dict) and "name" in value for value in objects):
        return text, []  # an answer in JSON is no call
    return "", [_call(value, "parameters") for value in objects]


def _objects(body: str) -> Iterator[Any]:
    """JSON values with semicolons between them."""
    rest = body
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise _UnreadableError(f"a tool call is no JSON: {error}") from error
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise _UnreadableError("behind a tool call stands something that is none")
        yield value
        rest = rest[1:].lstrip()


def _decoded(text: str) -> Any:
    values = list(_objects(text.strip()))
    if len(values) != 1:
        raise _UnreadableError(f"a tool call is {len(values)} JSON values instead of one")
    return values[0]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _call(value: Any, arguments: str) -> dict[str, Any]:
    """A call as in an OpenAI message; some models call the arguments by the name that another format has for them."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _UnreadableError("a tool call names no function")
    other = "parameters" if arguments == "arguments" else "arguments"
    given = value.get(arguments, value.get(other, {}))
    if isinstance(given, str):
        given = _decoded(given)
    if not isinstance(given, dict):
        raise _UnreadableError(f"the arguments of a call of {value['name']!r} are no object")
    written = json.dumps(given, ensure_ascii=False)
    if printable(written + value["name"]) != written + value["name"]:
        raise _UnreadableError(f"a call of {printable(value['name'])!r} holds half a character")
    return {"type": "function", "function": {"name": value["name"], "arguments": written}}


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_READERS: dict[str, Callable[[str], tuple[str, list[dict[str, Any]]]]] = {"hermes": _hermes, "llama": _llama}
