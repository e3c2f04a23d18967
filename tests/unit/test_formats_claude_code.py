"""Claude Code sessions: what is a decision, what is a fork, what is a sub-agent, and what a damaged line costs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.export.target import list_predecessors
from lake.formats import claude_code
from lake.formats.base.format import read_head
from lake.formats.base.rows import make_episode_text_id
from lake.formats.base.source import Input
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden/formats/claude_code"
(SESSION,) = (GOLDEN / "2.1.330").glob("*.jsonl")
AGENTS = sorted((GOLDEN / "2.1.330" / SESSION.stem / "subagents").glob("*.jsonl"))


def line(kind: str, uuid: str, parent: str | None, **fields: Any) -> dict[str, Any]:
    """A line of a session."""
    common = {"parentUuid": parent, "isSidechain": False, "cwd": "/home/user/shop", "sessionId": "s1"}
    times = {"version": "2.0.14", "type": kind, "uuid": uuid, "timestamp": "2026-01-02T10:00:00.000Z"}
    return common | times | fields


def user_line(uuid: str, parent: str | None, content: Any = "Do it.", **fields: Any) -> dict[str, Any]:
    return line("user", uuid, parent, message={"role": "user", "content": content}, **fields)


def model_line(uuid: str, parent: str | None, *content: Any, name: str | None = None, **fields: Any) -> dict[str, Any]:
    """A line of the model; texts become parts, `name` is the response's."""
    blocks = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    message = {"id": name or f"msg_{uuid}", "role": "assistant", "model": "claude", "content": blocks}
    message["usage"] = {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 3}
    return line("assistant", uuid, parent, message=message | fields.pop("message", {}), **fields)


def call(number: Any, name: str = "Bash", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": fields}


def result(uuid: str, parent: str | None, number: Any, content: Any = "ok", **fields: Any) -> dict[str, Any]:
    part = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": content}
    return user_line(uuid, parent, [part], **fields)


def write(path: Path, *lines: Any) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("".join(text + "\n" for text in texts), "utf-8")
    return path


def read(path: Path, *lines: Any) -> list[EpisodeRecord]:
    """The episodes of lines without rejects."""
    records, rejects = read_file(write(path / "s.jsonl", *lines))
    assert rejects == []
    return records


def read_one(path: Path, *lines: Any) -> EpisodeRecord:
    (record,) = read(path, *lines)
    return record


def id_of(record: EpisodeRecord) -> str:
    return make_episode_text_id(record, Input(Path("s.jsonl"), "run"))


# ---------------------------------------------------------------- real files


def counted(path: Path) -> tuple[int, int, int]:
    """Decisions, tool calls and characters of the model's text, from the JSON alone."""
    calls, tools, characters = set(), set(), 0
    for text in path.read_text().splitlines():
        value = json.loads(text)
        message = value.get("message")
        if value["type"] != "assistant" or message["model"] == "<synthetic>":
            continue
        calls.add(message["id"])
        for part in message["content"]:
            if part["type"] == "tool_use":
                tools.add(part["id"])
            elif part["type"] == "text":
                characters += len(part["text"])
    return len(calls), len(tools), characters


@pytest.mark.parametrize(
    ("name", "expected"),
    [("agentlogs_crud.jsonl", (10, 9, 525)), ("agentlogs_subagent.jsonl", (3, 1, 840))],
)
def test_a_real_session_holds_what_its_lines_hold(name: str, expected: tuple[int, int, int]) -> None:
    path = shared_data("formats", "claude_code", name)
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records)[1:3] + counts(records)[4:] == counted(path) == expected
    assert {record.run_id for record in records} == {"claudecode" if "crud" in name else "studio"}


@pytest.mark.parametrize(
    ("path", "agents", "forks"),
    [
        (GOLDEN / "1.0.21.jsonl", 2, 0),
        (GOLDEN / "2.0.14.jsonl", 2, 0),
        (SESSION, 0, 1),
        *((path, 1, 0) for path in AGENTS),
        (GOLDEN / "stream_2.0.14.jsonl", 1, 0),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_each_version_holds_what_its_lines_hold(path: Path, agents: int, forks: int) -> None:
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records)[1:3] + counts(records)[4:] == counted(path)
    relations = [record.relation for record in records]
    assert (relations.count("subagent"), relations.count("fork")) == (agents, forks)
    assert {record.environment for record in records} == {"claude_code"}
    assert {record.run_id for record in records} == {"shop"}


def test_sub_agents_of_a_session_hang_on_the_step_that_asked_for_them() -> None:
    main, greeter, counter = read_file(GOLDEN / "2.0.14.jsonl")[0]
    assert (greeter.agent_id, counter.agent_id) == ("sidechain-1", "sidechain-2")
    assert [step.state for step in greeter.steps + counter.steps] == ["Please greet", "Please count apples", "3"]
    for agent in (greeter, counter):
        assert (agent.parent_episode_id, agent.root_episode_id) == (id_of(main), id_of(main))
        assert agent.parent_step_index == 2
    assert main.steps[2].tool_calls is not None
    assert [tool_call["function"]["name"] for tool_call in main.steps[2].tool_calls] == ["Task", "Task"]


def test_a_compaction_is_an_observation_and_an_error_of_the_api_is_none() -> None:
    main = read_file(GOLDEN / "2.0.14.jsonl")[0][0]
    context = main.steps[4].context
    assert context[0]["isCompactSummary"] is True
    assert [message["role"] for message in context if message.get("model") == "<synthetic>"] == ["assistant"]
    spans = {span.name: span for span in main.spans}
    assert spans["compact_boundary"].step_index == spans["api_error"].step_index == 3
    assert spans["api_error"].error is not None
    assert main.status == "completed", "it went on after the error"


def test_a_file_of_a_sub_agent_finds_the_branch_and_the_step_in_its_sessions_file(tmp_path: Path) -> None:
    main, fork = read_file(SESSION)[0]
    for path in AGENTS:
        (agent,) = read_file(path)[0]
        assert agent.agent_id == path.stem.removeprefix("agent-")
        assert (agent.parent_episode_id, agent.parent_step_index) == (id_of(fork), 0)
        assert agent.root_episode_id == id_of(main)
        assert agent.extra is not None
        assert agent.extra["agent"]["agentType"] == "general-purpose"
        (alone,) = read_file(Path(shutil.copy(path, tmp_path)))[0]
        assert (alone.parent_episode_id, alone.parent_step_index) == (id_of(main), None)
        write(tmp_path / f"{SESSION.stem}.jsonl", "{", '{"type": 5}')
        write(tmp_path / f"{path.stem}.meta.json", "[")
        assert read_file(tmp_path / path.name)[0] == [alone]


def test_a_rewind_leaves_a_fork_that_begins_after_the_last_common_step() -> None:
    main, fork = read_file(SESSION)[0]
    assert (main.rollout_index, fork.rollout_index) == (0, 1)
    assert (fork.relation, fork.parent_episode_id, fork.parent_step_index) == ("fork", id_of(main), 1)
    assert [step.action for step in main.steps] == ["I run two.", "Done with 2.", "Hello."]
    assert fork.steps[0].state == "ask helpers"
    assert not any(step.is_copied_context for step in fork.steps)


def test_requests_give_tools_and_sampling() -> None:
    main = read_file(SESSION)[0][0]
    assert main.tools is not None
    assert main.tools[0]["name"] == "Agent"
    assert main.sampling is not None
    assert main.sampling["max_tokens"] == 128000
    assert main.initial_messages is not None
    assert [m["role"] for m in main.initial_messages if isinstance(m["content"], list)] == ["system"]


def test_a_stream_has_no_prompt_and_ends_with_its_result() -> None:
    main, agent = read_file(GOLDEN / "stream_2.0.14.jsonl")[0]
    assert (main.steps[0].state, main.status, main.stop_reason) == (None, "completed", "success")
    assert (main.terminated, main.cost is not None) == (True, True)
    assert (agent.parent_episode_id, agent.parent_step_index) == (id_of(main), 0)


# ---------------------------------------------------------------- decisions


def test_the_lines_of_one_response_are_one_decision_with_the_last_usage(tmp_path: Path) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
    usage = {
        "usage": {"input_tokens": 1, "cache_creation_input_tokens": 5, "output_tokens": 9},
        "stop_reason": "tool_use",
    }
    lines = [
        model_line("b", "a", thought, name="m"),
        model_line("c", "b", "One. ", name="m"),
        model_line("d", "c", "Two.", name="m"),
    ]
    lines.append(model_line("e", "d", call(1, command="ls"), name="m", message=usage, requestId="req"))
    record = read_one(tmp_path, user_line("a", None), *lines)
    (step,) = record.steps
    assert (step.action, step.reasoning, step.finish_reason) == ("One. Two.", "Hm.", "tool_use")
    assert (step.prompt_tokens, step.completion_tokens) == (6, 9)
    assert (record.prompt_tokens, record.completion_tokens, record.policy) == (6, 9, "claude")
    function = {"name": "Bash", "arguments": {"command": "ls"}}
    assert step.tool_calls == [{"id": "toolu_1", "type": "function", "function": function}]
    assert step.extra is not None
    assert (step.extra["signatures"], step.extra["uuids"]) == (["sig"], ["b", "c", "d", "e"])
    assert (step.extra["message_id"], step.extra["requestId"]) == ("m", "req")
    assert step.extra["usage"]["output_tokens"] == 9


def test_an_id_that_comes_again_after_a_person_spoke_is_another_response(tmp_path: Path) -> None:
    record = read_one(
        tmp_path,
        user_line("a", None),
        model_line("b", "a", "1", name="m"),
        user_line("c", "b"),
        model_line("d", "c", "2", name="m"),
    )
    assert [step.action for step in record.steps] == ["1", "2"]


def test_parallel_results_are_no_forks(tmp_path: Path) -> None:
    """One hangs on the line of the same call, and nothing continues from it."""
    lines = [user_line("a", None), model_line("b", "a", call(1), name="m"), model_line("c", "b", call(2), name="m")]
    lines += [result("r1", "b", 1, "first"), result("r2", "c", 2, "second"), model_line("d", "r2", "Done.")]
    record = read_one(tmp_path, *lines)
    assert [step.state for step in record.steps] == ["Do it.", "first\nsecond"]
    assert [message["name"] for message in record.steps[1].context] == ["Bash", "Bash"]


def test_a_response_goes_on_after_the_result_of_its_first_call(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1), name="m"),
        result("r1", "b", 1),
        model_line("c", "r1", call(2), name="m"),
    ]
    record = read_one(tmp_path, *lines, result("r2", "c", 2), model_line("d", "r2", "Done."))
    assert [len(step.tool_calls or ()) for step in record.steps] == [2, 0]
    assert len(record.steps[1].context) == 2


def test_notes_between_the_lines_of_a_response_do_not_part_it(tmp_path: Path) -> None:
    note = line("attachment", "n", "b", attachment={"type": "hook_success"})
    record = read_one(
        tmp_path,
        user_line("a", None),
        model_line("b", "a", "One. ", name="m"),
        note,
        model_line("c", "n", "Two.", name="m"),
    )
    assert [step.action for step in record.steps] == ["One. Two."]


def test_calls_that_are_numbered_anew_get_the_results_that_follow_them(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1)),
        result("r", "b", 1, "first"),
        model_line("c", "r", call(1, "Read")),
    ]
    record = read_one(tmp_path, *lines, result("q", "c", 1, "second"), model_line("d", "q", "Done."))
    assert [(step.state, step.context[0]["name"]) for step in record.steps[1:]] == [
        ("first", "Bash"),
        ("second", "Read"),
    ]


def test_a_result_of_no_call_is_seen_where_it_stands(tmp_path: Path) -> None:
    lines = [user_line("a", None), model_line("b", "a", call(1)), result("x", "b", 9, "stray"), result("r", "b", 1)]
    record = read_one(tmp_path, *lines, model_line("c", "r", "Done."))
    assert record.steps[1].state == "ok\nstray"


def test_what_a_skill_or_a_hook_adds_beside_the_main_line_was_seen(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1, "Skill"), name="m"),
        model_line("c", "b", call(2), name="m"),
    ]
    lines += [result("r1", "b", 1), user_line("k", "r1", "How to do it.", isMeta=True), result("r2", "c", 2)]
    hook = {"type": "hook_additional_context", "content": ["Mind the gap."]}
    lines += [line("attachment", "h", "r1", attachment=hook), model_line("d", "r2", "Done.")]
    record = read_one(tmp_path, *lines)
    assert [message["content"] for message in record.steps[1].context] == ["ok", "ok", "How to do it.", "Mind the gap."]
    assert record.steps[1].state == "ok\nok\nHow to do it."
    assert record.extra is not None
    assert "loose_ends" not in record.extra


def test_progress_links_lines_and_is_counted(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1), name="m"),
        line("progress", "p", "b", data={"type": "bash_progress"}),
    ]
    lines += [
        model_line("c", "p", call(2), name="m"),
        result("r1", "p", 1),
        result("r2", "c", 2),
        model_line("d", "r1", "Done."),
    ]
    record = read_one(tmp_path, *lines)
    assert [len(step.tool_calls or ()) for step in record.steps] == [2, 0]
    assert record.extra is not None
    assert record.extra["left_out"] == {"progress": 1}


def test_tools_of_the_api_itself_are_calls_and_their_results_stay_with_the_step(tmp_path: Path) -> None:
    search = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "q"}}
    web_result = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{"type": "web_search_result"}]}
    record = read_one(tmp_path, user_line("a", None), model_line("b", "a", "I look. ", search, web_result, "Found."))
    (step,) = record.steps
    assert step.action == "I look. Found."
    assert [tool_call["source_type"] for tool_call in step.tool_calls or ()] == ["server_tool_use"]
    assert step.extra is not None
    assert web_result in step.extra["content"]
    assert record.status == "completed"


def test_a_text_for_content_and_images_are_kept(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    lines = [
        user_line("a", None, [image, {"type": "text", "text": "What is it?"}]),
        model_line("b", "a", message={"content": "A dot."}),
    ]
    record = read_one(tmp_path, *lines)
    assert record.initial_messages is not None
    assert record.initial_messages[0]["content"][0] == image
    assert (record.steps[0].state, record.steps[0].action) == ("What is it?", "A dot.")


def test_a_result_keeps_what_the_tool_reported_unless_that_repeats_it(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1), call(2)),
        result("r1", "b", 1, "no", toolUseResult="Error: no"),
    ]
    lines += [
        result("r2", "r1", 2, "yes", toolUseResult={"stdout": "yes", "stderr": "late"}),
        model_line("c", "r2", "Done."),
    ]
    first, second = read_one(tmp_path, *lines).steps[1].context
    assert "toolUseResult" not in first
    assert second["toolUseResult"]["stderr"] == "late"
    assert (first["is_error"], second["is_error"]) == (False, False)


def test_what_was_typed_meanwhile_is_an_observation(tmp_path: Path) -> None:
    queued = {"type": "queued_command", "prompt": "Faster!", "commandMode": "prompt"}
    attachment = {"rendered": [{"content": "Today is Friday."}], "renderedRole": "system"}
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1)),
        result("r", "b", 1),
        line("attachment", "q", "r", attachment=queued),
    ]
    lines += [line("attachment", "t", "q", attachment={"type": "date"}, **attachment), model_line("c", "t", "Done.")]
    step = read_one(tmp_path, *lines).steps[1]
    assert (step.state, step.state_role) == ("ok\nFaster!", "user")
    assert step.context[2]["content"] == "Today is Friday."


def test_what_was_typed_between_a_call_and_its_result_was_seen_with_the_result(tmp_path: Path) -> None:
    lines = [user_line("a", None), model_line("b", "a", call(1)), user_line("t", "b", "Faster!"), result("r", "t", 1)]
    record = read_one(tmp_path, *lines, model_line("c", "r", "Done."))
    assert (record.steps[1].state, record.steps[1].state_role) == ("ok\nFaster!", "user")
    assert record.extra is not None
    assert "loose_ends" not in record.extra


@pytest.mark.parametrize("link", ["clear", None])
def test_a_cleared_history_begins_a_conversation(tmp_path: Path, link: str | None) -> None:
    clear = user_line("clear", "b", "<command-name>/clear</command-name>")
    lines = [user_line("a", None), model_line("b", "a", "1"), clear, user_line("c", link, "Again.")]
    first, second = read(tmp_path, *lines, model_line("d", "c", "2"), user_line("e", "d"), model_line("f", "e", "3"))
    assert [[step.action for step in record.steps] for record in (first, second)] == [["1"], ["2", "3"]]
    assert (second.relation, second.parent_episode_id, second.parent_step_index) == ("continuation", id_of(first), None)
    assert second.rollout_index == 1
    assert len(read(tmp_path, *lines)) == 1, "until the model answers"


# ---------------------------------------------------------------- forks


def test_the_main_line_leads_to_the_newest_call(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", "1"),
        user_line("c", "b", "Left?"),
        model_line("d", "c", "2"),
        user_line("e", "b", "Right?"),
    ]
    main, fork = read(tmp_path, *lines, model_line("f", "e", "3"))
    assert [step.action for step in main.steps] == ["1", "3"]
    assert [step.action for step in fork.steps] == ["2"]
    assert (fork.parent_step_index, fork.steps[0].state) == (0, "Left?")


def test_the_main_line_is_the_branch_with_the_newest_call_not_the_one_that_began_last(tmp_path: Path) -> None:
    lines = [user_line("a", None), model_line("b", "a", "1"), user_line("c", "b", "Left?"), model_line("d", "c", "2")]
    lines += [
        user_line("e", "b", "Right?"),
        model_line("f", "e", "3"),
        user_line("g", "d", "Left again?"),
        model_line("h", "g", "4"),
    ]
    main, fork = read(tmp_path, *lines)
    assert [step.action for step in main.steps] == ["1", "2", "4"]
    assert [step.action for step in fork.steps] == ["3"]


def test_a_second_answer_to_the_same_prompt_is_a_fork_that_saw_the_prompt(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1)),
        result("r", "b", 1, "seen"),
        model_line("c", "r", "left"),
        model_line("d", "r", "right"),
    ]
    main, fork = read(tmp_path, *lines)
    assert [step.action for step in main.steps] == ["", "right"]
    assert (fork.steps[0].action, fork.steps[0].state, fork.parent_step_index) == ("left", "seen", 0)
    first, second = read(tmp_path, user_line("a", None), model_line("b", "a", "left"), model_line("c", "a", "right"))
    assert (second.parent_episode_id, second.parent_step_index) == (id_of(first), None)
    assert (second.steps[0].action, second.steps[0].state) == ("left", "Do it.")


def test_forks_of_a_fork_name_it_and_come_after_it(tmp_path: Path) -> None:
    lines = [
        user_line("a", None),
        model_line("b", "a", "1"),
        user_line("c", "b"),
        model_line("d", "c", "2"),
        user_line("e", "d"),
        model_line("f", "e", "3"),
    ]
    lines += [user_line("g", "d"), model_line("h", "g", "4"), user_line("i", "b"), model_line("j", "i", "5")]
    main, outer, inner = read(tmp_path, *lines)
    assert [step.action for step in main.steps] == ["1", "5"]
    assert [step.action for step in outer.steps] == ["2", "4"]
    assert [step.action for step in inner.steps] == ["3"]
    assert (inner.parent_episode_id, inner.parent_step_index, inner.root_episode_id) == (id_of(outer), 0, id_of(main))
    assert (outer.rollout_index, inner.rollout_index) == (1, 2)


def test_a_second_beginning_is_a_fork_of_the_first(tmp_path: Path) -> None:
    main, fork = read(
        tmp_path,
        user_line("a", None),
        model_line("b", "a", "1"),
        user_line("c", None, "Again."),
        model_line("d", "c", "2"),
    )
    assert (main.steps[0].action, fork.steps[0].action, fork.parent_step_index) == ("2", "1", None)


def test_what_nobody_answered_is_a_loose_end(tmp_path: Path) -> None:
    record = read_one(
        tmp_path,
        user_line("a", None),
        user_line("b", "a", "Never mind."),
        user_line("c", "a", "Go."),
        model_line("d", "c", "Gone."),
    )
    assert record.steps[0].state == "Do it.\nGo."
    assert record.extra is not None
    assert [message["content"] for message in record.extra["loose_ends"]] == ["Never mind."]


def test_lines_of_another_session_are_copied_context(tmp_path: Path) -> None:
    old = {"sessionId": "s0"}
    lines = [
        user_line("a", None, **old),
        model_line("b", "a", "1", **old),
        user_line("c", "b"),
        model_line("d", "c", "2"),
    ]
    record = read_one(tmp_path, *lines)
    assert [(step.is_copied_context, step.trainable) for step in record.steps] == [(True, False), (False, True)]
    assert (record.task_id, record.relation, record.prompt_tokens) == ("s1", "continuation", 3)
    parent = EpisodeRecord(task_id="s0", steps=[], run_id="shop", source_format="claude_code")
    assert record.parent_episode_id == id_of(parent)
    origin = {"forkedFrom": {"sessionId": "s0", "messageUuid": "b"}}
    record = read_one(
        tmp_path,
        user_line("a", None, **origin),
        model_line("b", "a", "1", **origin),
        user_line("c", "b"),
        model_line("d", "c", "2"),
    )
    assert (record.relation, record.parent_episode_id) == ("fork", id_of(parent))
    assert [step.is_copied_context for step in record.steps] == [True, False]


def test_a_history_that_is_written_twice_is_a_copy_the_second_time() -> None:
    (path,) = shared_data("cases", "05_claude_copied_history", "08_again").glob("*.jsonl")
    main, fork = read_file(path)[0]
    assert [(step.action, step.trainable) for step in main.steps] == [("first answer", True), ("second answer", True)]
    assert [(step.action, step.trainable) for step in fork.steps] == [("first answer", False)]
    assert (main.completion_tokens, fork.completion_tokens, fork.steps[0].is_copied_context) == (30, None, True)


def test_an_id_that_a_server_gives_to_all_responses_shows_no_copies(tmp_path: Path) -> None:
    lines = [user_line("a", None), model_line("b", "a", "Done.", name="m"), user_line("c", "b")]
    lines += [
        model_line("d", "c", "Also done.", name="m"),
        user_line("e", "d"),
        model_line("f", "e", "Done.", name="m"),
    ]
    assert not any(step.is_copied_context for step in read_one(tmp_path, *lines).steps)


def test_a_sub_agent_that_begins_with_its_sessions_history_owns_the_rest(tmp_path: Path) -> None:
    history = [user_line("a", None), model_line("b", "a", "1"), user_line("c", "b"), model_line("d", "c", call(1))]
    write(tmp_path / "s1.jsonl", *history)
    side = {"isSidechain": True, "agentId": "abc"}
    copies = [line | side | {"uuid": f"{line['uuid']}2"} for line in history[:2]]
    copies[1]["parentUuid"] = "a2"
    lines = [*copies, user_line("x", "b2", "Go.", **side), model_line("y", "x", "2", **side)]
    (agent,) = read_file(write(tmp_path / "agent-abc.jsonl", *lines))[0]
    assert [(step.action, step.is_copied_context) for step in agent.steps] == [("1", True), ("2", False)]


def test_a_line_that_is_written_twice_counts_once(tmp_path: Path) -> None:
    lines = [user_line("a", None), model_line("b", "a", "1"), user_line("c", "b"), model_line("d", "c", "2")]
    assert len(read_one(tmp_path, *lines[:2], *lines).steps) == 2


# ---------------------------------------------------------------- compaction and sub-agents


@pytest.mark.parametrize("link", ["b", "gone", None])
def test_a_compaction_goes_on_with_the_same_episode(tmp_path: Path, link: str | None) -> None:
    boundary = {"subtype": "compact_boundary", "logicalParentUuid": link, "compactMetadata": {"trigger": "auto"}}
    lines = [user_line("a", None), model_line("b", "a", "1"), line("system", "x", None, **boundary)]
    lines += [user_line("y", "x", "Summary.", isCompactSummary=True), model_line("c", "y", "2")]
    record = read_one(tmp_path, *lines)
    assert (record.steps[1].state, record.steps[1].context[0]["isCompactSummary"]) == ("Summary.", True)
    assert list_predecessors(record) == [None, None]
    (span,) = record.spans
    assert (span.kind, span.name, span.step_index) == ("system", "compact_boundary", 0)
    assert span.attributes is not None
    assert span.attributes["compactMetadata"] == {"trigger": "auto"}


def test_a_summary_beside_the_messages_that_were_kept_is_part_of_the_line(tmp_path: Path) -> None:
    """The conversation continues from the last kept message, which was written before the boundary."""
    boundary = {"subtype": "compact_boundary", "logicalParentUuid": "b"}
    lines = [user_line("a", None), model_line("b", "a", "1"), line("system", "x", None, **boundary)]
    lines += [
        user_line("y", "x", "Summary.", isCompactSummary=True),
        user_line("c", "b", "Go on."),
        model_line("d", "c", "2"),
    ]
    assert read_one(tmp_path, *lines).steps[1].state == "Summary.\nGo on."


def test_a_sub_agent_is_found_by_its_id_or_by_nothing(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "abc"}
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1, "Agent", prompt="Go.")),
        user_line("s", None, "Other words.", **side),
    ]
    lines += [
        model_line("t", "s", "Sub.", **side),
        result("r", "b", 1, toolUseResult={"agentId": "abc"}),
        model_line("c", "r", "Done."),
    ]
    main, agent = read(tmp_path, *lines)
    assert (agent.agent_id, agent.parent_step_index) == ("abc", 0)
    lines[4] = result("r", "b", 1)
    main, agent = read(tmp_path, *lines)
    assert (agent.parent_episode_id, agent.parent_step_index) == (id_of(main), None)


def test_a_sidechain_that_hangs_on_the_main_line_belongs_to_that_step(tmp_path: Path) -> None:
    side = {"isSidechain": True}
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1, "Task", prompt="Go.")),
        user_line("s", "b", "Go on.", **side),
    ]
    _, agent = read(tmp_path, *lines, model_line("t", "s", "Sub.", **side), result("r", "b", 1))
    assert (agent.agent_id, agent.parent_step_index, len(agent.steps)) == ("sidechain-1", 0, 1)


def test_a_sidechain_that_lost_a_line_is_one_episode(tmp_path: Path) -> None:
    side = {"isSidechain": True}
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1, "Task", prompt="Go.")),
        user_line("s", None, "Go.", **side),
    ]
    _, agent = read(tmp_path, *lines, model_line("t", "s", "One.", **side), model_line("v", "lost", "Two.", **side))
    assert [step.action for step in agent.steps] == ["One.", "Two."]


def test_a_sub_agent_in_another_folder_belongs_to_its_sessions_run(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "abc", "cwd": "/home/user/shop/inner"}
    (tmp_path / "s1/subagents").mkdir(parents=True)
    write(tmp_path / "s1.jsonl", user_line("a", None), model_line("b", "a", call(1, "Agent")), result("r", "b", 1))
    path = write(
        tmp_path / "s1/subagents/agent-abc.jsonl", user_line("s", None, **side), model_line("t", "s", "Sub.", **side)
    )
    (agent,) = read_file(path)[0]
    assert (agent.run_id, agent.parent_step_index) == ("shop", None)
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1, "Agent")),
        result("r", "b", 1, toolUseResult={"agentId": "abc"}),
    ]
    write(tmp_path / "s1.jsonl", *lines)
    assert read_file(path)[0][0].parent_step_index == 0


def test_a_sub_agent_that_goes_on_is_one_episode(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "abc"}
    lines = [
        user_line("a", None, **side),
        model_line("b", "a", "1", **side),
        user_line("c", None, **side),
        model_line("d", "c", "2", **side),
    ]
    record = read_one(tmp_path, *lines)
    assert (record.relation, record.agent_id, len(record.steps)) == ("subagent", "abc", 2)


# ---------------------------------------------------------------- how it ended, and what else is said


def test_how_a_session_ended(tmp_path: Path) -> None:
    begin = [user_line("a", None), model_line("b", "a", call(1), message={"stop_reason": "tool_use"})]
    record = read_one(tmp_path, *begin)
    assert (record.status, record.stop_reason, record.terminated) == ("aborted", "tool_use", None)
    record = read_one(tmp_path, *begin, result("r", "b", 1), user_line("i", "r", "[Request interrupted by user]"))
    assert (record.status, record.stop_reason) == ("aborted", "interrupted")
    failed = model_line("e", "a", "API Error: 529", isApiErrorMessage=True, message={"model": "<synthetic>"})
    record = read_one(tmp_path, *begin, result("r", "b", 1), failed | {"parentUuid": "r"})
    assert (record.status, record.error, len(record.steps)) == ("failed", "API Error: 529", 1)
    record = read_one(
        tmp_path, user_line("a", None), model_line("b", "a", "Half", message={"stop_reason": "max_tokens"})
    )
    assert (record.status, record.terminated) == ("truncated", False)
    record = read_one(tmp_path, user_line("a", None), model_line("b", "a", "All.", message={"stop_reason": "end_turn"}))
    assert (record.status, record.terminated) == ("completed", True)


def test_lines_about_the_session_are_kept_once(tmp_path: Path) -> None:
    about = [{"type": "summary", "summary": "Title", "leafUuid": "b"}, {"type": "ai-title", "aiTitle": "Shop"}]
    about += [{"type": "cost-state", "totalCostUSD": cost} for cost in (1, 2)]
    about += [{"type": "file-history-snapshot", "messageId": "a", "snapshot": {}}]
    record = read_one(tmp_path, *about, user_line("a", None), model_line("b", "a", "1"))
    assert record.extra is not None
    session = {"summary": {"summary": "Title", "leafUuid": "b"}, "ai-title": {"aiTitle": "Shop"}}
    assert record.extra["session"] == session | {"cost-state": {"totalCostUSD": 2}}
    assert record.extra["left_out"] == {"file-history-snapshot": 1}


def test_costs_and_times_of_old_versions_are_steps_own(tmp_path: Path) -> None:
    lines = [
        user_line("a", None, version="0.2.29"),
        model_line("b", "a", "1", version="0.2.29", costUSD=0.5, durationMs=1500),
    ]
    record = read_one(tmp_path, *lines)
    assert (record.source_version, record.cost) == ("0.2.29", 0.5)
    assert (record.steps[0].cost, record.steps[0].latency) == (0.5, 1.5)


def test_what_stays_the_same_is_said_once(tmp_path: Path) -> None:
    lines = [
        user_line("a", None, gitBranch="main"),
        model_line("b", "a", "1", gitBranch="main", cwd="/home/user/other"),
    ]
    record = read_one(tmp_path, *lines)
    assert record.extra == {"cwd": "/home/user/shop", "gitBranch": "main", "version": "2.0.14"}
    assert record.steps[0].extra is not None
    assert record.steps[0].extra["cwd"] == "/home/user/other"
    assert "gitBranch" not in record.steps[0].extra


def test_a_folder_of_windows_names_the_project(tmp_path: Path) -> None:
    assert read_one(tmp_path, user_line("a", None, cwd="C:\\work\\shop"), model_line("b", "a", "1")).run_id == "shop"


# ---------------------------------------------------------------- damage


GOOD = (user_line("a", None), model_line("b", "a", "1"), user_line("c", "b", "More."), model_line("d", "c", "2"))


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        ("[1]", "invalid", "Expected `object`, got `list`"),
        (user_line("c", "b", 5), "invalid", "`$.message.content`"),
        (user_line("c", "b", [{"text": "x"}]), "invalid", "`type` - at `$.message.content[0]`"),
        (user_line("c", "b") | {"message": None}, "invalid", "missing required field `message`"),
        (user_line("c", "b") | {"uuid": 5}, "invalid", "`$.uuid`"),
        (result("c", "b", 1, {"a": 1}), "invalid", "`message.content[0].content` is dict"),
        (model_line("c", "b", {"type": "tool_use", "id": "t"}), "invalid", "missing required field `name`"),
        ('{"type": "user", "uuid": NaN}', "malformed", "NaN"),
        (
            json.dumps(user_line("c", "b", "DEEP")).replace('"DEEP"', "[" * 900 + "]" * 900),
            "invalid",
            "nested too deeply",
        ),
        (
            json.dumps(user_line("c", "b", toolUseResult="D")).replace('"D"', "[" * 900 + "]" * 900),
            "invalid",
            "nested too deeply",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_lost_alone(tmp_path: Path, bad: Any, reason: str, says: str) -> None:
    (record,), (reject,) = read_file(write(tmp_path / "s.jsonl", *GOOD[:2], bad, GOOD[3]))
    assert (reject.position, reject.reason) == (3, reason)
    assert says in reject.message
    assert [step.action for step in record.steps] == ["1", "2"]
    assert record.extra is not None
    assert record.extra["lines_lost"] == 1


def test_a_session_that_is_cut_keeps_what_came_before(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", *GOOD)
    path.write_bytes(path.read_bytes()[:-40])
    (record,), (reject,) = read_file(path)
    assert (reject.position, reject.reason, len(record.steps)) == (4, "truncated", 1)
    assert record.final_observation is not None
    assert record.final_observation[0]["content"] == "More."


def test_bytes_that_are_no_text_cost_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", *GOOD)
    path.write_bytes(path.read_bytes().replace(b"More.", b"M\xffre."))
    (record,), (reject,) = read_file(path)
    assert (reject.position, reject.reason, len(record.steps)) == (3, "malformed", 2)


def test_half_a_surrogate_pair_becomes_an_escape(tmp_path: Path) -> None:
    record = read_one(tmp_path, GOOD[0], json.dumps(model_line("b", "a", "cut ?")).replace("?", "\\ud83d"))
    assert record.steps[0].action == "cut \\ud83d"


def test_a_stream_names_its_version_in_its_first_line(tmp_path: Path) -> None:
    stream = {"session_id": "s1", "parent_tool_use_id": None, "uuid": "b"}
    first = {"type": "system", "subtype": "init", "session_id": "s1", "cwd": "/home/user/shop", "uuid": "a"}
    spoken = stream | {"type": "assistant", "message": model_line("b", None, "Hello.")["message"]}
    ended = {"type": "result", "subtype": "error_max_turns", "session_id": "s1", "total_cost_usd": 0.5}
    record = read_one(tmp_path, first | {"claude_code_version": "2.1.0"}, spoken, ended)
    assert (record.source_version, record.task_id, record.run_id) == ("2.1.0", "s1", "shop")
    assert (record.status, record.terminated, record.cost) == ("truncated", False, 0.5)
    _, (reject,) = read_file(write(tmp_path / "s.jsonl", first | {"claude_code_version": "4.0.0"}, spoken))
    assert reject.reason == "unsupported"


@pytest.mark.parametrize("is_array", [False, True])
def test_a_stream_of_an_early_version_or_in_one_array_is_read(tmp_path: Path, is_array: bool) -> None:
    stream = [
        {"type": "system", "subtype": "init", "session_id": "s1", "tools": ["Bash"]},
        {"type": "assistant", "message": model_line("b", None, "Hello.")["message"], "session_id": "s1"},
        {
            "type": "result",
            "subtype": "success",
            "session_id": "s1",
            "num_turns": 1,
            "cost_usd": 0.5,
            "result": "Hello.",
        },
    ]
    record = read_one(tmp_path, *([json.dumps(stream, indent=1)] if is_array else stream))
    assert (record.task_id, record.steps[0].action, record.cost) == ("s1", "Hello.", 0.5)


def test_a_newer_version_is_unsupported(tmp_path: Path) -> None:
    records, (reject,) = read_file(write(tmp_path / "s.jsonl", *(value | {"version": "3.0.1"} for value in GOOD)))
    assert records == []
    assert (reject.reason, reject.position) == ("unsupported", 1)
    assert "Claude Code 3.0.1; known: 0 to 2.x" in reject.message


def test_a_session_without_a_decision_is_rejected(tmp_path: Path) -> None:
    records, (reject,) = read_file(write(tmp_path / "s.jsonl", GOOD[0]))
    assert records == []
    assert "holds no decision" in reject.message
    _, (reject,) = read_file(write(tmp_path / "s.jsonl", {"type": "mode", "mode": "plan", "sessionId": "s1"}))
    assert "only lines about one: mode" in reject.message


def test_no_damage_raises(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "abc"}
    lines = [
        user_line("a", None),
        model_line("b", "a", call(1, "Agent", prompt="Go.")),
        user_line("s", None, "Go.", **side),
    ]
    lines += [model_line("t", "s", "Sub.", **side), result("r", "b", 1, toolUseResult={"agentId": "abc"})]
    lines += [line("attachment", "q", "r", attachment={"type": "queued_command", "prompt": "Faster!"})]
    lines += [
        line("system", "x", "q", subtype="compact_boundary"),
        model_line("c", "x", "Done."),
        model_line("d", "q", "Fork."),
    ]
    lines += [{"type": "api-request", "id": "1", "params": {"max_tokens": 1}, "sessionId": "s1"}]
    assert_never_raises(tmp_path / "s.jsonl", lines, lines=True)


def test_a_branch_of_many_rewinds_is_read_in_linear_time(tmp_path: Path) -> None:
    lines = [user_line("a0", None)]
    for index in range(1000):
        lines += [
            model_line(f"b{index}", f"a{index}", "x"),
            user_line(f"a{index + 1}", "a0" if index % 3 else f"b{index}"),
        ]
    assert counts(read(tmp_path, *lines)).decisions == 1000


# ---------------------------------------------------------------- which files are sessions


@pytest.mark.parametrize(
    "beside",
    [
        {"type": "summary", "summary": "Title", "leafUuid": "b"},
        {"display": "Do it.", "pastedContents": {}, "timestamp": 1, "project": "/home/user/shop"},
        {"version": 1, "entries": [], "originalPath": "/home/user/shop"},
        {"agentType": "Explore", "description": "Look", "toolUseId": "toolu_1"},
        {"type": "started", "key": "v2:1", "agentId": "a1"},
        {"type": "result", "subtype": "success", "session_id": "s1", "num_turns": 1, "result": "Hello."},
    ],
)
def test_files_beside_the_sessions_hold_no_trajectory(tmp_path: Path, beside: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"holds no trajectory: it .*; ingest the"):
        choose_format(write(tmp_path / "x.jsonl", beside))


def test_a_session_may_begin_with_many_titles_or_a_damaged_line(tmp_path: Path) -> None:
    titles = [{"type": "summary", "summary": "Title", "leafUuid": str(number)} for number in range(300)]
    assert choose_format(write(tmp_path / "x.jsonl", *titles, *GOOD)).name == "claude_code"
    assert choose_format(write(tmp_path / "x.jsonl", '{"parentUuid": nul', *GOOD)).name == "claude_code"
    path = write(tmp_path / "x.jsonl", *GOOD)
    path.write_bytes(path.read_bytes()[:250])
    assert choose_format(path).name == "claude_code"


def test_no_other_format_is_taken_for_a_session() -> None:
    for path in shared_data("formats").rglob("*"):
        if path.is_file() and "claude_code" not in path.parts:
            assert not claude_code.recognise(read_head(path)), path
            assert claude_code.no_trajectory(read_head(path)) is None, path


def test_a_reject_shows_its_line(tmp_path: Path) -> None:
    bad = user_line("c", "b", 5)
    _, (reject,) = read_file(write(tmp_path / "s.jsonl", *GOOD[:2], bad))
    assert isinstance(reject, Reject)
    assert json.loads(reject.raw) == bad
