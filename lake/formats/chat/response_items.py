"""Items of OpenAI's Responses API as chat messages, each of the model's with the items that it was made of.

One call of a model writes several items: reasoning, messages, calls of tools. They are one message. A run of them ends
where the model was given something, or with an item that carries the tokens of its call.
"""

from typing import Any

from lake.formats.base.rows import ShapeError, rest
from lake.formats.chat.answers import of_input
from lake.formats.chat.messages import Message
from lake.formats.tracing.shapes import split, text

_RESULTS = ("function_call_output", "custom_tool_call_output")


def item_messages(items: list[Any], place: str) -> list[tuple[Message, list[dict[str, Any]]]]:
    """Items as messages, each of the model's with its items, each that it was given with none.

    Raises:
        ShapeError: an item that is no object, or neither a message nor a known item.
    """
    found: list[tuple[Message, list[dict[str, Any]]]] = []
    run: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ShapeError(f"Expected `object`, got `{type(item).__name__}` - at `$.{place}[{index}]`")
        if not _acts(item):
            if run:
                found.append((_said(run), run))
            found.append((_observed(item, f"{place}[{index}]"), []))
            run = []
            continue
        run.append(item)
        if item.get("generation_token_ids"):
            found.append((_said(run), run))
            run = []
    if run:
        found.append((_said(run), run))
    return found


def _acts(item: dict[str, Any]) -> bool:
    """Whether the model wrote an item: a message, reasoning, or a call."""
    if item.get("role") is not None:
        return bool(item["role"] == "assistant")
    kind = item.get("type")
    return isinstance(kind, str) and kind != "message" and not kind.endswith(("_output", "_response", "_reference"))


def _said(items: list[dict[str, Any]]) -> Message:
    parts: list[Any] = []
    for item in items:
        if "role" not in item:
            parts.append(item)
        elif isinstance(content := item.get("content"), list):
            parts += content
        elif content is not None:
            parts.append({"type": "text", "text": content})
    message = split(parts, "assistant")[-1]
    ids = [item["id"] for item in items if item.get("id") is not None]
    return message | ({"item_ids": ids} if ids else {})


def _observed(item: dict[str, Any], place: str) -> Message:
    kind = item.get("type")
    if "role" not in item and isinstance(kind, str) and kind not in _RESULTS:
        return {"role": "tool", "content": text(item.get("output", "")), "item": rest(item, "output")}
    return of_input(rest(item, "type") if "role" in item else item, place)


def chat_tool(tool: Any) -> Any:
    """A tool of the Responses API as chat APIs write it."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": rest(tool, "type") or {}}
    return tool
