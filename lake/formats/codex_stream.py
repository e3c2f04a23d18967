"""The output of `codex exec --json` as lines of a rollout (`lake.formats.codex`).

.. code-block:: text

    {type, ...}, type:
    thread.started      thread_id, which is the session's
    turn.started, turn.completed {usage}, turn.failed {error {message}}, error {message}
    item.started, item.updated, item.completed      item {id, type, ...}, type:
        agent_message, reasoning        text
        command_execution               command, aggregated_output, exit_code, status
        mcp_tool_call                   server, tool, arguments, result, error, status
        file_change, web_search, todo_list, collab_tool_call, ...

The prompt is not there. A call begins where its item begins, so that the calls of one response stay together, and its
output is what its completed item adds. Usage covers a turn and stays with the turn's end.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from lake.formats.base.rows import omit_fields
from lake.formats.chat.sessions import Line
from lake.records import Reject

_TURN_EVENTS = {"turn.started": "task_started", "turn.completed": "task_complete"}
_STREAM_EVENTS = frozenset((*_TURN_EVENTS, "thread.started", "turn.failed", "error"))
_STREAM_ITEMS = frozenset(("item.started", "item.updated", "item.completed"))
_ARGUMENT_KEYS = frozenset(("command", "arguments", "server", "tool", "changes", "query", "items", "prompt"))
"""Keys of a call's arguments; the other keys of its item are its output."""


def is_stream_line(value: dict[str, Any]) -> bool:
    """Return whether a line belongs to the output of `codex exec --json`."""
    kind = value.get("type")
    if kind == "thread.started":
        return isinstance(value.get("thread_id"), str)
    item = value.get("item")
    return (
        isinstance(kind, str) and kind in _STREAM_ITEMS and isinstance(item, dict) and isinstance(item.get("type"), str)
    )


def convert_stream(lines: Iterable[Line | Reject]) -> Iterator[Line | Reject]:
    """Yield lines, with those of a stream as a rollout has them."""
    calls: dict[str, dict[str, Any]] = {}
    for line in lines:
        kind = None if isinstance(line, Reject) else line[1].get("type")
        if isinstance(line, Reject) or not isinstance(kind, str) or "payload" in line[1]:
            yield line
        elif kind in _STREAM_ITEMS and isinstance(item := line[1].get("item"), dict):
            is_done = kind == "item.completed"
            yield from ((line[0], value) for value in _convert_item(item, calls, is_done=is_done))
        else:
            yield (line[0], _convert_event(kind, line[1])) if kind in _STREAM_EVENTS else line


def _convert_event(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    fields = omit_fields(value, "type") or {}
    if kind == "thread.started":
        payload = (omit_fields(fields, "thread_id") or {}) | {"id": value.get("thread_id")}
        return {"type": "session_meta", "payload": payload}
    if kind in _TURN_EVENTS:
        return {"type": "event_msg", "payload": fields | {"type": _TURN_EVENTS[kind]}}
    error = value.get("error")
    message = (error if isinstance(error, dict) else value).get("message")
    return {"type": "event_msg", "payload": fields | {"type": "error", "message": message}}


def _convert_item(item: dict[str, Any], calls: dict[str, dict[str, Any]], *, is_done: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of an item; `calls` has the arguments of each open call."""
    kind, name = item.get("type"), str(item.get("id"))
    if kind in ("agent_message", "reasoning", "user_message"):
        if not is_done:
            return
        fields = omit_fields(item, "text") or {}
        if kind == "reasoning":
            yield _wrap_item(fields | {"summary": [{"type": "summary_text", "text": item.get("text")}]})
        else:
            role, content = "user" if kind == "user_message" else "assistant", item.get("content", item.get("text"))
            yield _wrap_item(fields | {"type": "message", "role": role, "content": content})
        return
    if kind == "error" or not isinstance(kind, str):
        yield {"type": "event_msg", "payload": (omit_fields(item, "type") or {}) | {"type": "item_error"}}
        return
    arguments = {key: value for key, value in item.items() if key in _ARGUMENT_KEYS}
    if name not in calls or (kind == "todo_list" and calls[name] != arguments):
        calls[name] = arguments
        yield _wrap_item({"type": "function_call", "name": kind, "call_id": name, "arguments": arguments})
    if is_done:
        arguments = calls.pop(name)
        fields = {key: field for key, field in item.items() if arguments.get(key) != field}
        text = fields.get("aggregated_output")
        if not isinstance(text, str):  # not a command: all fields as JSON text
            text = msgspec.json.encode(omit_fields(fields, "id", "type", "status") or {}).decode()
        is_success = fields.get("status") != "failed" and fields.get("exit_code") in (None, 0)
        output = {"call_id": str(fields.get("id")), "output": {"content": text, "success": is_success}}
        fields = omit_fields(fields, "id", "type", "aggregated_output") or {}
        yield _wrap_item(fields | {"type": "function_call_output"} | output)


def _wrap_item(payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response_item", "payload": payload}
