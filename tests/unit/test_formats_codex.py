"""Codex rollouts: which items are one decision, what was taken back or copied, and each layout that the tool wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.export.target import list_predecessors
from lake.formats import codex
from lake.formats.base.format import read_head
from lake.formats.base.rows import make_episode_text_id
from lake.formats.base.source import Input
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden/formats/codex"
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "web_search_call")
ID = "01a20000-0000-7000-8000-000000000000"
OLD, NEW = ID.replace("01a2", "01a1"), ID.replace("01a2", "01a3")


def line(kind: str, second: float = 0, **payload: Any) -> dict[str, Any]:
    """A line with an envelope."""
    return {"timestamp": f"2026-01-02T10:00:{second:06.3f}Z", "type": kind, "payload": payload}


def meta(name: str = ID, **fields: Any) -> dict[str, Any]:
    about = {"id": name, "timestamp": "2026-01-02T10:00:00Z", "cwd": "/home/user/shop", "cli_version": "0.89.0"}
    return line("session_meta", **about | fields)


def item(kind: str, second: float = 0, **fields: Any) -> dict[str, Any]:
    return line("response_item", second, type=kind, **fields)


def event(kind: str, second: float = 0, **fields: Any) -> dict[str, Any]:
    return line("event_msg", second, type=kind, **fields)


def user_item(text: str = "Do it.", second: float = 0) -> dict[str, Any]:
    return item("message", second, role="user", content=[{"type": "input_text", "text": text}])


def model_item(text: str, second: float = 0, **fields: Any) -> dict[str, Any]:
    return item("message", second, role="assistant", content=[{"type": "output_text", "text": text}], **fields)


def called(number: Any, second: float = 0) -> dict[str, Any]:
    return item("function_call", second, name="shell", arguments='{"command":["ls"]}', call_id=f"c{number}")


def output(number: Any, payload: Any = "ok", second: float = 0) -> dict[str, Any]:
    return item("function_call_output", second, call_id=f"c{number}", output=payload)


def used(total: int) -> dict[str, Any]:
    """A token_count after calls of 10 tokens each."""
    last = {"input_tokens": total, "output_tokens": 10}
    return event("token_count", info={"total_token_usage": {"input_tokens": total}, "last_token_usage": last})


def write(path: Path, *lines: Any) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("".join(text + "\n" for text in texts), "utf-8")
    return path


def read(path: Path, *lines: Any) -> list[EpisodeRecord]:
    """The episodes of lines without rejects."""
    records, rejects = read_file(write(path / "rollout.jsonl", *lines))
    assert rejects == []
    return records


def read_one(path: Path, *lines: Any) -> EpisodeRecord:
    (record,) = read(path, *lines)
    return record


def id_of(record: EpisodeRecord) -> str:
    return make_episode_text_id(record, Input(Path("r.jsonl"), "run"))


# ---------------------------------------------------------------- real files


def counted(path: Path) -> tuple[int, int, int]:
    """Runs of model items between inputs, calls, and characters of the model's text, from the JSON alone."""
    runs = tools = characters = 0
    is_model = False
    for text in path.read_text().splitlines():
        value = json.loads(text)
        if value.get("type") == "compacted":
            is_model = False
        item = value["payload"] if value.get("type") == "response_item" else value if "payload" not in value else {}
        kind = item.get("type")
        if kind in (*CALLS, "reasoning") or (kind == "message" and item["role"] == "assistant"):
            runs += not is_model
            is_model = True
            tools += kind in CALLS
            characters += sum(len(part["text"]) for part in item.get("content") or () if kind == "message")
        elif kind is not None and (kind == "message" or kind.endswith("_output")):
            is_model = False
    return runs, tools, characters


def test_a_real_rollout_holds_what_its_lines_hold() -> None:
    path = shared_data("formats", "codex", "agentlogs_crud.jsonl")
    (record,), rejects = read_file(path)
    assert rejects == []
    assert counts([record])[1:3] + counts([record])[4:] == counted(path) == (5, 4, 74)
    assert (record.task_id, record.run_id) == ("019bf4b5-e7b0-75a0-8bf2-05fbf1b13c9b", "fixtures")
    assert (record.policy, record.prompt_tokens, record.completion_tokens) == ("gpt-5.2-codex", 47257, 300)
    assert [step.tool_calls[0]["function"]["name"] for step in record.steps if step.tool_calls] == [
        "exec_command",
        "exec_command",
        "apply_patch",
        "exec_command",
    ]
    assert record.steps[2].reasoning == "**Modifying footer text**"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl")), ids=lambda path: path.stem)
def test_each_version_holds_what_its_lines_hold(path: Path) -> None:
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records)[1:3] + counts(records)[4:] == counted(path)
    assert {record.run_id for record in records} == {"shop"}
    assert records[0].source_version == (None if path.stem == "0.25.0" else path.stem.partition("_")[0])


@pytest.mark.parametrize("version", ["0.36.0", "0.89.0", "0.125.0", "0.169.0"])
def test_usage_is_that_of_its_own_decision(version: str) -> None:
    """Whether a version counts before a response's items, after them, or after the outputs of its calls."""
    path = GOLDEN / f"{version}.jsonl"
    steps = [step for record in read_file(path)[0] for step in record.steps]
    texts = [json.loads(text)["payload"] for text in path.read_text().splitlines()]
    infos = [text["info"] for text in texts if text.get("type") == "token_count" and text["info"]]
    inputs = {info["last_token_usage"]["input_tokens"] for info in infos} - {0}
    prompt_tokens = [step.prompt_tokens for step in steps if step.prompt_tokens is not None]
    assert len(prompt_tokens) == len(set(prompt_tokens)) == len(steps)
    # The call that wrote the summary of a compaction is no decision of 0.89.
    assert len(inputs - set(prompt_tokens)) == (1 if version == "0.89.0" else 0)


def test_a_turn_that_was_taken_back_is_a_fork() -> None:
    main, fork = read_file(GOLDEN / "0.125.0.jsonl")[0]
    assert [step.action for step in main.steps] == ["One.", "Another two.", "Three."]
    assert [step.action for step in fork.steps] == ["", "Two."]
    assert (fork.relation, fork.parent_episode_id, fork.parent_step_index) == ("fork", id_of(main), 0)
    assert (fork.rollout_index, fork.steps[0].state) == (1, "second")
    assert main.terminated is True


def test_a_fork_of_a_file_keeps_what_it_copied_apart() -> None:
    main = read_file(GOLDEN / "0.125.0.jsonl")[0][0]
    fork, taken_back = read_file(GOLDEN / "0.125.0_fork.jsonl")[0]
    assert [(step.action, step.is_copied_context, step.trainable) for step in fork.steps] == [
        ("One.", True, False),
        ("Another two.", True, False),
        ("In the fork.", False, True),
    ]
    assert (fork.relation, fork.parent_episode_id, fork.completion_tokens) == ("fork", id_of(main), 20)
    assert all(step.is_copied_context for step in taken_back.steps)


def test_a_sub_agent_names_the_session_that_started_it() -> None:
    (agent,) = read_file(GOLDEN / "0.125.0_subagent.jsonl")[0]
    assert agent.extra is not None
    parent = agent.extra["source"]["subagent"]["thread_spawn"]["parent_thread_id"]
    key = EpisodeRecord(task_id=parent, steps=[], run_id="shop", source_format="codex")
    assert (agent.relation, agent.parent_episode_id, agent.root_episode_id) == ("subagent", id_of(key), id_of(key))
    assert [(step.action, step.is_copied_context) for step in agent.steps] == [("Hello.", False)]


def test_a_compaction_is_an_observation() -> None:
    (record,) = read_file(GOLDEN / "0.89.0.jsonl")[0]
    summary = record.steps[1].context[-1]
    assert (summary["role"], summary["compacted"]) == ("user", True)
    assert list_predecessors(record)[:2] == [None, None], "the summary opens a context"
    assert [span.name for span in record.spans] == ["context_compacted"]


def test_what_a_person_wrote_before_a_result_comes_after_it(tmp_path: Path) -> None:
    lines = [meta(), user_item(), called(1), called(2), output(1, "first"), user_item("Faster!"), output(2, "second")]
    record = read_one(tmp_path, *lines, model_item("Done."))
    assert [message["content"] for message in record.steps[-1].context] == ["first", "second", "Faster!"]
    assert record.steps[-1].state_role == "user"


# ---------------------------------------------------------------- decisions


def test_the_items_of_one_response_are_one_decision(tmp_path: Path) -> None:
    thought = item(
        "reasoning", summary=[{"type": "summary_text", "text": "Plan."}], content=None, encrypted_content="x"
    )
    search = item("web_search_call", action={"type": "search", "query": "q"}, status="completed")
    lines = [
        meta(),
        user_item(),
        thought,
        search,
        model_item("I ", id="m1"),
        model_item("look.", phase="commentary"),
        called(1),
        called(2),
    ]
    record = read_one(tmp_path, *lines, output(1, "first"), output(2, "second"), model_item("Done."))
    first, second = record.steps
    assert (first.action, first.reasoning) == ("I look.", "Plan.")
    assert [call["function"]["name"] for call in first.tool_calls or ()] == ["web_search", "shell", "shell"]
    assert (second.state, second.action) == ("first\nsecond", "Done.")
    assert [message["name"] for message in second.context] == ["shell", "shell"]
    assert first.extra is not None
    items = [{"type": "reasoning", "encrypted_content": "x"}, {"type": "web_search_call", "status": "completed"}]
    assert first.extra["items"] == [*items, {"type": "message", "id": "m1"}, {"type": "message", "phase": "commentary"}]


def test_raw_thoughts_go_before_their_summary(tmp_path: Path) -> None:
    content = [{"type": "reasoning_text", "text": "Raw."}]
    thought = item("reasoning", summary=[{"type": "summary_text", "text": "Short."}], content=content)
    (step,) = read_one(tmp_path, meta(), user_item(), thought, model_item("Done.")).steps
    assert step.reasoning == "Raw."
    assert step.extra is not None
    assert step.extra["reasoning_summary"] == "Short."


def test_a_record_of_usage_ends_a_response(tmp_path: Path) -> None:
    ended = line("token_usage_record", response_id="r1", usage={"input_tokens": 7, "output_tokens": 2})
    record = read_one(tmp_path, meta(), user_item(), model_item("One."), ended, used(99), model_item("Two."))
    assert [(step.action, step.prompt_tokens) for step in record.steps] == [("One.", 7), ("Two.", None)]
    assert record.steps[0].extra is not None
    assert record.steps[0].extra["response_id"] == "r1"


@pytest.mark.parametrize("is_before", [True, False])
def test_a_total_counts_once_and_beside_its_decision(tmp_path: Path, is_before: bool) -> None:
    pairs = [(used(5), called(1)), (used(6), model_item("Done."))]
    (first, then), (second, last) = pairs if is_before else [pair[::-1] for pair in pairs]
    lines = [meta(), user_item(), first, then, output(1), *([] if is_before else [used(5)]), second, last]
    assert [step.prompt_tokens for step in read_one(tmp_path, *lines).steps] == [5, 6]


def test_usage_of_other_calls_is_no_decisions(tmp_path: Path) -> None:
    """Of a call that wrote a summary, of one that failed, and a repeated total."""
    cut = line("compacted", message="Summary.")
    record = read_one(tmp_path, meta(), user_item(), used(5), model_item("One."), used(6), cut, model_item("Two."))
    assert [step.prompt_tokens for step in record.steps] == [5, None]
    record = read_one(
        tmp_path, meta(), user_item(), called(1), used(5), output(1), used(6), model_item("Two."), used(7)
    )
    assert [step.prompt_tokens for step in record.steps] == [5, 7]
    record = read_one(tmp_path, meta(), user_item(), called(1), used(5), output(1), model_item("Two."), used(5))
    assert [step.prompt_tokens for step in record.steps] == [5, None]


def test_outputs_may_be_text_parts_or_an_object(tmp_path: Path) -> None:
    image = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    lines = [
        meta(),
        user_item(),
        called(1),
        output(1, image),
        called(2),
        output(2, {"content": "no", "success": False}),
    ]
    record = read_one(tmp_path, *lines, model_item("Done."))
    assert [step.state for step in record.steps] == ["Do it.", "seen", "no"]
    assert record.steps[1].context[0]["content"] == image
    assert [step.state_is_error for step in record.steps] == [False, False, True]


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        (item("custom_tool_call", name="apply_patch", input="*** Begin", call_id="c1"), "apply_patch", "*** Begin"),
        (item("local_shell_call", action={"command": ["ls"]}, call_id="c1"), "local_shell", {"command": ["ls"]}),
        (item("tool_search_call", arguments={"query": "q"}, call_id="c1"), "tool_search", {"query": "q"}),
        (item("function_call", name="x", arguments="not JSON", call_id="c1"), "x", "not JSON"),
    ],
)
def test_every_kind_of_call_keeps_its_arguments(tmp_path: Path, call: Any, name: str, arguments: Any) -> None:
    record = read_one(tmp_path, meta(), user_item(), call)
    function = {"name": name, "arguments": arguments}
    assert record.steps[0].tool_calls == [{"id": "c1", "type": "function", "function": function}]
    assert record.status == "aborted", "nothing came back"


def test_a_turn_says_the_model_and_only_what_is_new(tmp_path: Path) -> None:
    first = line("turn_context", model="gpt-5", effort="high", cwd="/home/user/shop")
    lines = [
        meta(),
        user_item(),
        first,
        called(1),
        output(1),
        first,
        line("turn_context", model="gpt-6", effort="high"),
    ]
    record = read_one(tmp_path, *lines, model_item("Done."))
    assert [step.model for step in record.steps] == ["gpt-5", "gpt-6"]
    assert record.sampling == {"effort": "high"}
    assert record.steps[1].extra == {"turn_context": {"model": "gpt-6"}}


def test_where_there_are_no_items_their_mirrors_are_the_talk(tmp_path: Path) -> None:
    events = [event("user_message", message="Do it."), event("agent_reasoning", text="Look.")]
    record = read_one(tmp_path, meta(), *events, event("agent_message", message="Done."))
    (step,) = record.steps
    assert (step.state, step.reasoning, step.action) == ("Do it.", "Look.", "Done.")


def test_mirrors_are_left_out_and_other_events_are_spans(tmp_path: Path) -> None:
    ended = event("exec_command_end", 3, call_id="c1", exit_code=1)
    completed_event = event("item_completed", item={"type": "CommandExecution", "exit_code": 1})
    mirrors = [event("user_message", message="Do it."), event("item_completed", item={"type": "AgentMessage"})]
    record = read_one(
        tmp_path, meta(), user_item(), *mirrors, called(1), ended, completed_event, output(1), model_item("Done.")
    )
    spans = {span.name: span for span in record.spans}
    assert {(span.kind, span.name, span.step_index) for span in record.spans} == {
        ("event_msg", "exec_command_end", 0),
        ("item_completed", "CommandExecution", 0),
    }
    assert spans["exec_command_end"].attributes == {"call_id": "c1", "exit_code": 1}
    assert record.extra is not None
    assert record.extra["left_out"] == {"user_message": 1, "item_completed AgentMessage": 1}


@pytest.mark.parametrize(
    ("last", "status", "terminated", "stop_reason", "error"),
    [
        (event("task_complete"), "completed", True, None, None),
        (event("turn_aborted", reason="interrupted"), "aborted", None, "interrupted", None),
        (event("error", message="usage limit"), "failed", None, None, "usage limit"),
        (event("task_started"), "completed", None, None, None),
    ],
)
def test_how_a_session_ended(
    tmp_path: Path, last: Any, status: str, terminated: bool | None, stop_reason: str | None, error: str | None
) -> None:
    record = read_one(tmp_path, meta(), user_item(), model_item("Done."), last)
    assert (record.status, record.terminated, record.stop_reason) == (status, terminated, stop_reason)
    assert record.error == error


def test_a_compaction_without_a_message_shows_its_history(tmp_path: Path) -> None:
    history = [user_item("Old.")["payload"], user_item("The summary.")["payload"]]
    cut = line("compacted", message="", replacement_history=history)
    step = read_one(tmp_path, meta(), user_item(), model_item("One."), cut, model_item("Two.")).steps[1]
    assert step.state == "The summary."
    assert step.context[0]["replacement_history"] == history


def test_instructions_are_the_first_message(tmp_path: Path) -> None:
    record = read_one(
        tmp_path, meta(base_instructions={"text": "You are."}, git={"branch": "main"}), user_item(), model_item("Done.")
    )
    assert record.initial_messages is not None
    assert record.initial_messages[0] == {"role": "system", "content": "You are."}
    assert record.extra is not None
    assert record.extra["git"] == {"branch": "main"}


# ---------------------------------------------------------------- what was taken back or copied


def test_turns_are_counted_by_what_a_person_asked(tmp_path: Path) -> None:
    context = user_item("<environment_context>\n</environment_context>")
    lines = [
        meta(),
        context,
        user_item("1"),
        model_item("One."),
        user_item("2"),
        model_item("Two."),
        context,
        user_item("<b>3</b>"),
        model_item("Three."),
    ]
    main, fork = read(tmp_path, *lines, event("thread_rolled_back", num_turns=2), user_item("4"), model_item("Four."))
    assert [step.action for step in main.steps] == ["One.", "Four."]
    assert [step.action for step in fork.steps] == ["Two.", "Three."]
    assert main.steps[1].state == "4"


def test_a_longer_way_back_leaves_a_fork_of_a_fork(tmp_path: Path) -> None:
    back = event("thread_rolled_back", num_turns=1)
    lines = [
        meta(),
        user_item("1"),
        model_item("One."),
        user_item("2"),
        model_item("Two."),
        user_item("3"),
        model_item("Three."),
        back,
        user_item("4"),
    ]
    lines += [model_item("Four."), event("thread_rolled_back", num_turns=2), user_item("5"), model_item("Five.")]
    main, outer, inner = read(tmp_path, *lines)
    assert [step.action for step in main.steps] == ["One.", "Five."]
    assert [step.action for step in outer.steps] == ["Two.", "Four."]
    assert [step.action for step in inner.steps] == ["Three."]
    assert (outer.parent_episode_id, outer.parent_step_index) == (id_of(main), 0)
    assert (inner.parent_episode_id, inner.parent_step_index) == (id_of(outer), 0)
    assert (inner.rollout_index, outer.rollout_index) == (1, 2)


def test_a_first_turn_that_was_taken_back_saw_the_same_context(tmp_path: Path) -> None:
    context = user_item("<environment_context>\n</environment_context>")
    back = event("thread_rolled_back", num_turns=9)
    main, fork = read(
        tmp_path, meta(), context, user_item("1"), model_item("One."), back, user_item("2"), model_item("Two.")
    )
    assert fork.initial_messages is not None
    assert [message["content"][:5] for message in fork.initial_messages] == ["<envi", "1"]
    assert (fork.parent_step_index, main.steps[0].action) == (None, "Two.")


def test_a_fork_of_a_fork_saw_what_came_before_both(tmp_path: Path) -> None:
    context = user_item("<environment_context>\n</environment_context>")
    lines = [
        meta(),
        context,
        user_item("1"),
        user_item("2"),
        model_item("Two."),
        event("thread_rolled_back", num_turns=1),
        user_item("3"),
    ]
    lines += [model_item("Three."), event("thread_rolled_back", num_turns=2), user_item("4"), model_item("Four.")]
    _, _, inner = read(tmp_path, *lines)
    assert inner.initial_messages is not None
    assert [message["content"][:5] for message in inner.initial_messages] == ["<envi", "1", "2"]


def test_a_prompt_that_was_taken_back_unanswered_is_a_loose_end(tmp_path: Path) -> None:
    back = event("thread_rolled_back", num_turns=1)
    record = read_one(
        tmp_path, meta(), user_item("1"), model_item("One."), user_item("2"), back, user_item("3"), model_item("Three.")
    )
    assert record.steps[1].state == "3"
    assert record.extra is not None
    assert [message["content"] for message in record.extra["loose_ends"]] == ["2"]


@pytest.mark.parametrize(
    "end",
    [
        [event("task_started", 0.2, turn_id=NEW)],
        [line("turn_context", 0.2, turn_id=NEW, model="gpt-5")],
        [meta()],
    ],
)
def test_copied_history_ends_with_the_sessions_own_turn(tmp_path: Path, end: list[Any]) -> None:
    lines = [
        meta(forked_from_id=OLD),
        meta(OLD),
        event("task_started", turn_id=OLD),
        user_item("1"),
        model_item("One."),
    ]
    record = read_one(tmp_path, *lines, *end, user_item("2", 0.3), model_item("Two.", 0.4))
    assert [step.is_copied_context for step in record.steps] == [True, False]


def test_without_ids_of_turns_copied_history_ends_with_a_pause(tmp_path: Path) -> None:
    lines = [
        meta(forked_from_id=OLD),
        meta(OLD),
        user_item("1", 0.1),
        model_item("One.", 0.1),
        user_item("2", 9),
        model_item("Two.", 12),
    ]
    record = read_one(tmp_path, *lines)
    assert [step.is_copied_context for step in record.steps] == [True, False]
    assert (record.task_id, record.relation) == (ID, "fork")


def test_copied_history_may_keep_its_times(tmp_path: Path) -> None:
    first = meta(forked_from_id=OLD, timestamp="2026-01-02T10:00:10Z") | {"timestamp": "2026-01-02T10:00:10Z"}
    lines = [first, meta(OLD), user_item("1", 2), model_item("One.", 4), user_item("2", 11), model_item("Two.", 12)]
    assert [step.is_copied_context for step in read_one(tmp_path, *lines).steps] == [True, False]


def test_a_fork_that_copies_nothing_names_its_parent(tmp_path: Path) -> None:
    record = read_one(tmp_path, meta(forked_from_id=OLD), user_item(), model_item("Done."))
    key = EpisodeRecord(task_id=OLD, steps=[], run_id="shop", source_format="codex")
    assert (record.relation, record.parent_episode_id, record.parent_step_index) == ("fork", id_of(key), None)
    assert record.steps[0].is_copied_context is False


def test_a_sub_agent_with_its_own_metadata_alone_shows_its_copies_by_the_turns_of_its_items() -> None:
    parent, agent = (
        read_file(path)[0][0]
        for path in sorted(shared_data("cases", "04_codex_subagent_one_meta", "37_codex_subagent_0145").iterdir())
    )
    assert [step.is_copied_context for step in agent.steps] == [True, True, False, False]
    assert [step.is_copied_context for step in parent.steps] == [False] * 3
    assert (parent.completion_tokens, agent.completion_tokens) == (130, 70)


def test_a_turn_of_the_same_millisecond_is_the_sessions_own(tmp_path: Path) -> None:
    turn = f"{ID[:-12]}0{ID[-11:]}".replace("-7000-8000-", "-7000-0000-")
    lines = [meta(forked_from_id=OLD), event("task_started", turn_id=turn), user_item(), model_item("Done.")]
    assert read_one(tmp_path, *lines).steps[0].is_copied_context is False


def test_without_ids_and_the_parents_metadata_its_file_shows_what_was_copied(tmp_path: Path) -> None:
    history = [user_item("1"), model_item("One."), called(1), output(1), model_item("Two.")]
    write(tmp_path / f"rollout-{OLD}.jsonl", meta(OLD), *history, user_item("2"), model_item("Three."))
    record = read_one(tmp_path, meta(forked_from_id=OLD), *history, user_item("3"), model_item("Three."))
    assert [step.is_copied_context for step in record.steps] == [True, True, False]


# ---------------------------------------------------------------- older layouts


def test_bare_files_take_the_project_from_their_context() -> None:
    (record,) = read_file(GOLDEN / "0.25.0.jsonl")[0]
    assert record.started_at is not None
    assert record.steps[0].started_at is None
    assert [len(step.tool_calls or ()) for step in record.steps] == [1, 1, 0], (
        "each call's output stands before the next"
    )


@pytest.mark.parametrize("head_fields", [{}, {"instructions": None, "cwd": "/home/user/shop"}])
def test_the_head_of_a_bare_file_may_say_more_or_less(tmp_path: Path, head_fields: dict[str, Any]) -> None:
    head = {"id": ID, "timestamp": "2025-06-01T09:00:00.000Z"} | head_fields
    record = read_one(tmp_path, head, user_item()["payload"], model_item("Done.")["payload"])
    assert (record.task_id, record.run_id, [step.action for step in record.steps]) == (
        ID,
        "shop" if head_fields else None,
        ["Done."],
    )


def streamed(kind: str, name: str, of: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"item.{kind}", "item": {"id": name, "type": of} | fields}


def test_what_exec_prints_is_a_rollout(tmp_path: Path) -> None:
    ran = {"command": "ls", "aggregated_output": "", "exit_code": None, "status": "in_progress"}
    asked_tool = {"server": "s", "tool": "find", "arguments": {"q": 1}}
    record = read_one(
        tmp_path,
        {"type": "thread.started", "thread_id": ID},
        {"type": "turn.started"},
        streamed("completed", "i0", "reasoning", text="Look."),
        streamed("started", "i1", "command_execution", **ran),
        streamed("started", "i2", "mcp_tool_call", **asked_tool),
        streamed("completed", "i1", "command_execution", **ran | {"aggregated_output": "no", "exit_code": 1}),
        streamed("completed", "i2", "mcp_tool_call", **asked_tool, result={"content": []}, status="completed"),
        streamed("completed", "i3", "error", message="slow"),
        streamed("completed", "i4", "file_change", changes=[{"path": "a"}], status="completed"),
        streamed("completed", "i5", "agent_message", text="Done."),
        {"type": "turn.completed", "usage": {"input_tokens": 9}},
    )
    calls = [[call["function"] for call in step.tool_calls or ()] for step in record.steps]
    assert calls == [
        [
            {"name": "command_execution", "arguments": {"command": "ls"}},
            {"name": "mcp_tool_call", "arguments": asked_tool},
        ],
        [{"name": "file_change", "arguments": {"changes": [{"path": "a"}]}}],
        [],
    ]
    assert [step.action for step in record.steps] == ["", "", "Done."]
    outputs = [(message["content"], message["is_error"]) for message in record.steps[1].context]
    assert outputs == [("no", True), ('{"result":{"content":[]}}', False)]
    assert (record.task_id, record.terminated, record.steps[0].state) == (ID, True, None)
    assert {span.name for span in record.spans} == {"task_started", "item_error", "task_complete"}


def test_a_turn_that_failed_is_told(tmp_path: Path) -> None:
    said_so = streamed("completed", "i0", "agent_message", text="I begin.")
    record = read_one(
        tmp_path,
        {"type": "thread.started", "thread_id": ID},
        said_so,
        {"type": "turn.failed", "error": {"message": "cut"}},
    )
    assert (record.status, record.error) == ("failed", "cut")


def test_the_oldest_files_are_one_object(tmp_path: Path) -> None:
    session = {"timestamp": "2025-05-01T10:00:00.000Z", "id": "s1", "instructions": "Be brief."}
    items = [
        value["payload"] for value in (user_item("Current working directory: /home/user/shop"), called(1), output(1))
    ]
    items += [5, model_item("Done.")["payload"]]
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps({"session": session, "items": items}, indent=2), "utf-8")
    (record,), (reject,) = read_file(path)
    assert (record.task_id, record.run_id) == ("s1", "shop")
    assert [step.action for step in record.steps] == ["", "Done."]
    assert (reject.position, reject.reason) == (3, "invalid")
    path.write_text(path.read_text()[:-60], "utf-8")
    (record,), rejects = read_file(path)
    assert [step.action for step in record.steps] == [""]
    assert [reject.reason for reject in rejects] == ["invalid", "truncated"]


def test_envelopes_may_be_flat(tmp_path: Path) -> None:
    lines = [meta(), user_item(), called(1), output(1), model_item("Done.")]
    flat = [{"timestamp": value["timestamp"], **value["payload"]} for value in lines]
    flat[0]["type"] = "session_meta"
    record = read_one(tmp_path, *flat)
    assert (record.task_id, [step.action for step in record.steps]) == (ID, ["", "Done."])


# ---------------------------------------------------------------- damage


GOOD = (meta(), user_item(), called(1), output(1), model_item("Done."))


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        ("[1]", "invalid", "Expected `object`, got `list`"),
        ({"type": 5}, "invalid", "`type` is 5; valid: session_meta"),
        (line("response_item"), "invalid", "missing required field `type`"),
        (item("message", role=5), "invalid", "`$.role`"),
        (item("message", role="user", content=5), "invalid", "`content` of a message is of the wrong type"),
        (item("function_call_output", call_id="c1", output=5), "invalid", "`output` is of the wrong type"),
        (event("x") | {"payload": {"type": []}}, "invalid", "`payload.type` is []"),
        ({"timestamp": "2026-01-02T10:00:00Z", "type": "event_msg", "payload": [1]}, "invalid", "`payload` is list"),
        (json.dumps(event("x", y="D")).replace('"D"', "[" * 900 + "]" * 900), "invalid", "nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_read_is_lost_alone(tmp_path: Path, bad: Any, reason: str, says: str) -> None:
    (record,), (reject,) = read_file(write(tmp_path / "r.jsonl", *GOOD[:3], bad, GOOD[4]))
    assert (reject.position, reject.reason) == (4, reason)
    assert says in reject.message
    assert sum(len(step.tool_calls or ()) for step in record.steps) == 1
    assert record.extra is not None
    assert record.extra["lines_lost"] == 1


def test_a_rollout_that_is_cut_keeps_what_came_before(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *GOOD)
    path.write_bytes(path.read_bytes()[:-40])
    (record,), (reject,) = read_file(path)
    assert (reject.position, reject.reason, len(record.steps)) == (5, "truncated", 1)


def test_a_rollout_that_lost_its_first_line_has_a_name_of_its_own(tmp_path: Path) -> None:
    (record,), (reject,) = read_file(write(tmp_path / "r.jsonl", "{]", *GOOD[1:]))
    assert (reject.position, record.task_id[:8], len(record.steps)) == (1, "unnamed-", 2)
    (again,), _ = read_file(write(tmp_path / "other.jsonl", "{]", *GOOD[1:], model_item("More.")))
    assert again.task_id == record.task_id


def test_bytes_that_are_no_text_cost_their_line_and_half_pairs_become_escapes(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *GOOD[:4], json.dumps(model_item("cut ?")).replace("?", "\\ud83d"))
    path.write_bytes(path.read_bytes().replace(b'"ok"', b'"\xff"'))
    (record,), (reject,) = read_file(path)
    assert (reject.position, reject.reason) == (4, "malformed")
    assert record.steps[-1].action == "cut \\ud83d"


def test_a_newer_version_is_unsupported(tmp_path: Path) -> None:
    records, (reject,) = read_file(write(tmp_path / "r.jsonl", meta(cli_version="1.2.0"), *GOOD[1:]))
    assert records == []
    assert (reject.reason, reject.position) == ("unsupported", 1)
    assert "Codex 1.2.0; known: 0 to 0.x" in reject.message


def test_a_rollout_without_a_decision_is_rejected(tmp_path: Path) -> None:
    records, (reject,) = read_file(write(tmp_path / "r.jsonl", *GOOD[:2]))
    assert records == []
    assert "holds no decision" in reject.message


def test_no_damage_raises(tmp_path: Path) -> None:
    lines = [meta(forked_from_id=OLD, source={"subagent": {"thread_spawn": {"parent_thread_id": OLD, "depth": 1}}})]
    lines += [
        meta(OLD),
        user_item(),
        line("turn_context", turn_id=NEW, model="gpt-5"),
        called(1),
        used(5),
        output(1),
        model_item("A"),
    ]
    lines += [
        line("compacted", message="", replacement_history=[user_item()["payload"]]),
        model_item("B"),
        user_item(),
        model_item("C"),
    ]
    lines += [event("thread_rolled_back", num_turns=1), event("item_completed", item={"type": "Plan"}), model_item("D")]
    assert_never_raises(tmp_path / "r.jsonl", lines, lines=True)
    lines = [
        {"type": "thread.started", "thread_id": ID},
        streamed("completed", "i1", "command_execution", command="ls"),
    ]
    assert_never_raises(tmp_path / "r.jsonl", lines, lines=True)


# ---------------------------------------------------------------- which files are rollouts


@pytest.mark.parametrize(
    "beside",
    [
        {"session_id": "s1", "ts": 1, "text": "Do it."},
        {"id": "s1", "thread_name": "Shop", "updated_at": "x"},
        {"id": "0", "msg": {"type": "task_started"}},
    ],
)
def test_files_beside_the_rollouts_hold_no_trajectory(tmp_path: Path, beside: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"holds no trajectory: it .*; ingest the rollout-"):
        choose_format(write(tmp_path / "x.jsonl", beside))


def test_a_damaged_beginning_is_still_a_rollout(tmp_path: Path) -> None:
    assert choose_format(write(tmp_path / "x.jsonl", '{"timestamp": 2026', *GOOD[1:])).name == "codex"
    path = write(tmp_path / "x.jsonl", *GOOD)
    path.write_bytes(path.read_bytes()[:230])
    assert choose_format(path).name == "codex"


def test_no_other_format_is_taken_for_a_rollout() -> None:
    for path in shared_data("formats").rglob("*"):
        if path.is_file() and "codex" not in path.parts:
            assert not codex.recognise(read_head(path)), path
            assert codex.no_trajectory(read_head(path)) is None, path
