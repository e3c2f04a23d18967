"""Texts of an opened step: which blocks there are, what is cut and folded, and that nothing foreign stays dangerous."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viewer.queries.transcripts import LONG_REASONING, TEXT
from viewer.transcript import blocks
from viewer.transcript.blocks import Block
from viewer.transcript.outline import FAILED
from viewer.transcript.view_model import split_badges

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def step(**fields: Any) -> dict[str, Any]:
    """A row of `transcripts.steps`."""
    texts = {name: fields.get(name) for name in ("state", "action", "reasoning", "context", "tool_calls")}
    for name in ("context", "tool_calls"):
        texts[name] = None if texts[name] is None else json.dumps(texts[name])
    lengths = {f"{name}_length": len(text or "") for name, text in texts.items()}
    incoming = len(fields.get("context") or ()) or int(bool(fields.get("state")))
    return {"state_role": fields.get("state_role"), "incoming": incoming, **texts, **lengths}


def named(block_list: list[Block]) -> dict[str, str]:
    return {block.name: block.text for block in block_list}


def call(name: str, arguments: Any, key: str | None = None) -> dict[str, Any]:
    return {"id": key, "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(text: str, key: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": key}


def test_a_step_of_words() -> None:
    block_list = blocks.list_step_blocks(step(state="A room.", reasoning="Think.", action="go"), [])
    assert [(block.kind, block.text) for block in block_list] == [
        ("state", "A room."),
        ("reasoning", "Think."),
        ("action", "go"),
    ]


def test_results_stand_behind_their_calls_whatever_their_order() -> None:
    row = step(state="Go on.", action="", tool_calls=[call("find", {"q": 1}, "a"), call("read", {"p": 2}, "b")])
    block_list = blocks.list_step_blocks(
        row, [result("second", "b"), result("first", "a"), {"role": "user", "content": "third"}]
    )
    assert [(block.name, block.kind) for block in block_list][1:] == [
        ("call/0", "call"),
        ("result/0", "result"),
        ("call/1", "call"),
        ("result/1", "result"),
    ]
    assert named(block_list)["result/0"] == "first"
    assert named(block_list)["result/1"] == "second"
    assert "action" not in named(block_list), "an action that is nothing but calls is no empty text"


def test_badges_of_failed_and_cancelled_calls_stand_at_the_call_and_calls_keep_their_order() -> None:
    calls = [call(name, {}, name) for name in ("good", "late", "bad", "lost")]
    cancelled = result("Cancelled: a parallel call failed.", "late") | {"is_error": True}
    after = [result("Error: no.", "bad"), cancelled, result("Fine.", "good")]
    block_list = blocks.list_step_blocks(step(state="Go.", action="I call.", tool_calls=calls), after)
    of_calls, of_message = split_badges(block_list, [FAILED])
    labels = [(block.label, [mark[0] for mark in of_calls[block.name]]) for block in block_list if block.kind == "call"]
    assert labels == [("good", []), ("late", ["cancelled"]), ("bad", ["failed: error"]), ("lost", ["no result"])]
    assert of_message == []
    alone = blocks.list_step_blocks(step(state="Go.", action="", tool_calls=calls[:1]), [])
    assert split_badges(alone, [FAILED]) == ({"call/0": [FAILED]}, [])
    words = blocks.list_step_blocks(step(state="Go.", action="open the door"), [])
    assert split_badges(words, [FAILED]) == ({}, [FAILED]), "an action without a call keeps its badges"


def test_a_state_alone_is_the_result_of_the_call_before_it() -> None:
    after = blocks.list_following_messages(step(state="It is 7.", state_role="tool", action="thanks"))
    block_list = blocks.list_step_blocks(step(state="?", action="", tool_calls=[call("add", {})]), after)
    assert named(block_list)["result/0"] == "It is 7."
    assert blocks.list_following_messages(step(state="Hello", state_role="user", action="hi")) == []
    assert blocks.list_following_messages(None) == []


@pytest.mark.parametrize(
    ("text", "fields", "source", "failed"),
    [
        ("<returncode>1</returncode>\n<output>x</output>", {}, None, True),
        ("<returncode>0</returncode>\n<output>x</output>", {}, None, False),
        ("OBSERVATION: done", {}, None, False),
        ("File updated.", {"message_type": "observation"}, None, False),
        ("8.2", {}, "swe_agent", False),
        ("src", {"observation": "run", "extras": {"exit_code": 0}}, "openhands", False),
        ("No such tool.", {"observation": "error"}, "openhands", True),
        ("ERROR:\nNo replacement was performed.", {"observation": "edit"}, "openhands", True),
        ("Your proposed edit has introduced new syntax error(s). Retry.", {}, "swe_agent", True),
        ("OBSERVATION:\n[No exact match found in a.py for\n```x```]", {}, None, True),
    ],
)
def test_an_observation_of_a_user_is_the_result_of_an_action_in_text(
    text: str, fields: dict[str, Any], source: str | None, failed: bool
) -> None:
    row = step(state="Go.", action="ls") | {"source_format": source}
    message = {"role": "user", "content": text} | fields
    block = blocks.list_step_blocks(row, [message])[-1]
    assert (block.kind, block.text, block.place, block.is_failed) == ("result", text, 2, failed)
    assert block.label == "result from user"
    (incoming, *_) = blocks.list_step_blocks(step(action="stop", context=[message]), [], row)
    assert incoming.is_repeated
    for calls in ([], [None]):
        silent = step(state="Go.", action="") | {"tool_calls": json.dumps(calls), "tool_calls_length": 2}
        kinds = [block.kind for block in blocks.list_step_blocks(silent | {"source_format": source}, [message])]
        assert kinds[-2:] == ["action", "result"], "a result stands below its action, though this is empty"
    assert blocks.match_results(row, [{"role": "user", "content": "Now the next task."}]) == (
        {0: 0} if source == "swe_agent" else {}
    ), "people speak between the steps of other agents"
    assert blocks.match_results(None, [message]) == {}, "before the first step it is the task"


@pytest.mark.parametrize(
    "fields",
    [
        {"is_error": True},
        {"observation": {"exit_code": 1}},
        {"extras": {"metadata": {"exit_code": 2}}},
        {"content": "Exit code 1\nno such file"},
        {"content": "x\n[The command completed with exit code 1.]"},
    ],
)
def test_a_result_fails_by_its_field_or_its_exit_code(fields: dict[str, Any]) -> None:
    row = step(state="?", action="", tool_calls=[call("run", {})])
    for message, expected in ((result("x") | fields, True), (result("exit code 1 is bad"), False)):
        assert blocks.list_step_blocks(row, [message])[-1].is_failed is expected


def test_messages_that_are_the_state_are_not_shown_twice() -> None:
    context = [{"role": "user", "content": "More  of it."}, {"role": "assistant", "content": "Aside."}]
    block_list = blocks.list_step_blocks(step(state="More of it.", action="go", context=context), [])
    assert named(block_list) == {"context/0": "More  of it.", "context/1": "Aside.", "action": "go"}
    context = [{"role": "user", "content": "Less of it."}]
    block_list = blocks.list_step_blocks(step(state="More of it.", action="go", context=context), [])
    assert named(block_list) == {"context/0": "Less of it.", "state": "More of it.", "action": "go"}


def test_long_output_of_tools_long_reasoning_and_system_prompts_are_folded() -> None:
    long = "y" * (blocks.LONG_OUTPUT + 1)
    (state, _) = blocks.list_step_blocks(step(state=long, state_role="tool", action="go"), [])
    (short, _) = blocks.list_step_blocks(step(state="y", state_role="tool", action="go"), [])
    assert (state.is_folded, short.is_folded) == (True, False)
    thoughts = ["y" * length for length in (LONG_REASONING, LONG_REASONING + 1)]
    folds = [blocks.list_step_blocks(step(reasoning=thought, action="go"), [])[-2] for thought in thoughts]
    assert [thought.is_folded for thought in folds] == [False, True]
    messages = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Go."}]
    assert [block.is_folded for block in blocks.list_message_blocks(messages, "before")] == [True, False]


def test_demonstrations_before_the_task_are_one_folded_message() -> None:
    demo = [{"role": role, "content": f"{role} of the demo", "is_demo": True} for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be good."}, *demo, {"role": "user", "content": "Go."}]
    _, example, task = blocks.list_message_blocks(blocks.merge_demonstrations(messages), "before")
    assert (example.role, example.is_folded, task.is_folded) == ("demonstration", True, False)
    assert example.text == "user: user of the demo\n\nassistant: assistant of the demo"
    assert blocks.merge_demonstrations(demo) == demo, "a file that is a demonstration has no other task"


def test_a_text_is_cut_at_first_and_whole_when_asked_for() -> None:
    block = Block("action", "action", "action", "x" * (TEXT + 5), TEXT + 5)
    assert (len(block.sent()["text"]), block.sent()["shown"], block.sent()["length"]) == (TEXT, TEXT, TEXT + 5)
    assert len(block.sent(TEXT + 5)["text"]) == TEXT + 5


def test_images_are_shown_and_named_in_the_text() -> None:
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    (block,) = blocks.list_message_blocks([{"role": "user", "content": content}], "before")
    assert block.images == (PIXEL,)
    assert block.text == f"Look:\n[image: data:image/png;base64, {len(PIXEL)} characters]"
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert blocks.list_images({"content": [{"type": "image", "source": source}]}) == [PIXEL]


@pytest.mark.parametrize(
    "address",
    [
        "http://beacon.invalid/x.png",
        "javascript:alert(1)",
        "data:text/html;base64,PHNjcmlwdD4=",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:image/png;base64,<script>",
        "data:image/png;base64," + "A" * blocks.IMAGE,
    ],
)
def test_no_other_address_is_an_image(address: str) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": address}]}
    assert blocks.list_images(message) == []
    assert blocks.extract_text(message).startswith("[image: ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=3), st.lists(json_values, max_size=3), st.lists(json_values, max_size=3))
def test_a_step_of_any_shape_can_be_shown(context: list[Any], calls: list[Any], after: list[Any]) -> None:
    for block in blocks.list_step_blocks(step(state="s", action="a", context=context, tool_calls=calls), after):
        json.dumps(block.sent(), allow_nan=False).encode()
