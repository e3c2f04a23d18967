"""Stored rows become the messages a chat template takes."""

import json
from typing import Any

from trainer.data.render import collect_texts, read_turns


def step(index: int = 0, **fields: Any) -> dict[str, Any]:
    defaults = {
        "step_index": index,
        "context": "[]",
        "state": "seen",
        "state_role": None,
        "action": "done",
        "reasoning": None,
        "tool_calls": None,
    }
    return defaults | fields


def test_initial_messages_open_the_first_turn_and_context_the_others() -> None:
    first = json.dumps([{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}])
    later = json.dumps([{"role": "user", "content": "more"}])
    turns = read_turns(first, [step(0, action="a"), step(1, context=later, action="b")])
    assert [message["content"] for message in turns[0].added] == ["S", "hi"]
    assert turns[1].added == [{"role": "user", "content": "more"}]
    assert [turn.action for turn in turns] == [{"role": "assistant", "content": c} for c in "ab"]


def test_without_messages_the_state_is_what_the_user_said() -> None:
    turns = read_turns(None, [step(0, state="a room"), step(1, state="a hall", state_role="tool")])
    assert turns[0].added == [{"role": "user", "content": "a room"}]
    assert turns[1].added == [{"role": "tool", "content": "a hall"}]


def test_tool_call_arguments_become_objects_and_null_content_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    context = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "name": None},
    ]
    (turn,) = read_turns(None, [step(context=json.dumps(context), action="", tool_calls=json.dumps([call]))])
    assert turn.added[0]["content"] == ""
    assert turn.added[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert turn.added[1] == {"role": "tool", "content": "ok"}
    assert turn.action["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    calls = [{"name": "f", "arguments": text} for text in ("{broken", "[1, 2]")]
    (turn,) = read_turns(None, [step(tool_calls=json.dumps([*calls, "odd"]))])
    assert turn.action["tool_calls"] == [*calls, "odd"]


def test_reasoning_stands_beside_the_content() -> None:
    (turn,) = read_turns(None, [step(reasoning="because")])
    assert turn.action == {"role": "assistant", "content": "done", "reasoning_content": "because"}


def test_texts_are_found_at_any_depth() -> None:
    context = json.dumps([{"role": "user", "content": [{"type": "text", "text": "deep"}]}])
    texts = collect_texts(read_turns(None, [step(context=context, reasoning="why")]))
    assert {"deep", "done", "why"} <= set(texts)
    nested = json.dumps([{"function": {"name": "f", "arguments": {"x": ["deeper"]}}}])
    assert "deeper" in collect_texts(read_turns(None, [step(tool_calls=nested)]))
