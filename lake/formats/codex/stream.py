"""What `codex exec --json` prints, as the lines of a rollout: threads, turns, and items that begin and are completed.

.. code-block:: text

    thread.started      thread_id, which is the session's
    turn.started, turn.completed {usage}, turn.failed {error {message}}, error {message}
    item.started, item.updated, item.completed      item {id, type, ...}, type:
        agent_message, reasoning        text
        command_execution               command, aggregated_output, exit_code, status
        mcp_tool_call                   server, tool, arguments, result, error, status
        file_change, web_search, todo_list, collab_tool_call, ...

What was asked is not printed. A call is made where its item begins, so that calls of one response stand together; its
output is what its item has more when it is completed. The usage is that of a turn, and stays with the turn's end.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from lake.formats.base.rows import rest
from lake.formats.chat.sessions import Line
from lake.records import Reject

_TURNS = {"turn.started": "task_started", "turn.completed": "task_complete"}
_THREADS = frozenset((*_TURNS, "thread.started", "turn.failed", "error"))
_ITEMS = frozenset(("item.started", "item.updated", "item.completed"))
_GIVEN = frozenset(("command", "arguments", "server", "tool", "changes", "query", "items", "prompt"))
"""What a call is made with; the rest of its item is what came back."""


def is_streamed(value: dict[str, Any]) -> bool:
    """Whether a line is one of a stream."""
    kind = value.get("type")
    if kind == "thread.started":
        return isinstance(value.get("thread_id"), str)
    item = value.get("item")
    return isinstance(kind, str) and kind in _ITEMS and isinstance(item, dict) and isinstance(item.get("type"), str)


def unrolled(lines: Iterable[Line | Reject]) -> Iterator[Line | Reject]:
    """Lines with those of a stream as a rollout has them; all others stay as they are."""
    begun: dict[str, dict[str, Any]] = {}
    for line in lines:
        kind = None if isinstance(line, Reject) else line[1].get("type")
        if isinstance(line, Reject) or not isinstance(kind, str) or "payload" in line[1]:
            yield line
        elif kind in _ITEMS and isinstance(item := line[1].get("item"), dict):
            is_done = kind == "item.completed"
            yield from ((line[0], value) for value in _of_item(item, begun, is_done=is_done))
        else:
            yield (line[0], _of_thread(kind, line[1])) if kind in _THREADS else line


def _of_thread(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    more = rest(value, "type") or {}
    if kind == "thread.started":
        return {"type": "session_meta", "payload": (rest(more, "thread_id") or {}) | {"id": value.get("thread_id")}}
    if kind in _TURNS:
        return {"type": "event_msg", "payload": more | {"type": _TURNS[kind]}}
    error = value.get("error")
    said = error if isinstance(error, dict) else value
    return {"type": "event_msg", "payload": more | {"type": "error", "message": said.get("message")}}


def _of_item(item: dict[str, Any], begun: dict[str, dict[str, Any]], *, is_done: bool) -> Iterator[dict[str, Any]]:
    kind, name = item.get("type"), str(item.get("id"))
    if kind in ("agent_message", "reasoning", "user_message"):
        if is_done:
            yield _response(_said(item))
        return
    if kind == "error" or not isinstance(kind, str):
        yield {"type": "event_msg", "payload": (rest(item, "type") or {}) | {"type": "item_error"}}
        return
    given = {key: value for key, value in item.items() if key in _GIVEN}
    if name not in begun or (kind == "todo_list" and begun[name] != given):
        begun[name] = given
        yield _response({"type": "function_call", "name": kind, "call_id": name, "arguments": given})
    if is_done:
        made = begun.pop(name)
        yield _response(_output({key: value for key, value in item.items() if made.get(key) != value}))


def _said(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return (rest(item, "text") or {}) | {"summary": [{"type": "summary_text", "text": item.get("text")}]}
    role = "user" if item["type"] == "user_message" else "assistant"
    content = item.get("content", item.get("text"))
    return (rest(item, "text") or {}) | {"type": "message", "role": role, "content": content}


def _output(item: dict[str, Any]) -> dict[str, Any]:
    """What came back of a call: the output of a command as it is, anything else as JSON text."""
    said = item.get("aggregated_output")
    if not isinstance(said, str):
        said = msgspec.json.encode(rest(item, "id", "type", "status") or {}).decode()
    kept = rest(item, "id", "type", "aggregated_output") or {}
    output = {"content": said, "success": item.get("status") != "failed" and item.get("exit_code") in (None, 0)}
    return kept | {"type": "function_call_output", "call_id": str(item.get("id")), "output": output}


def _response(payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response_item", "payload": payload}
