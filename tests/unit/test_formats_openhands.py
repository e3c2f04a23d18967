"""OpenHands: real event files of V0 and V1, a rule a test, and what damage leaves.

The SDK needs Python 3.12, so what no real file shows is built from the fields of its models (openhands-sdk 1.58.2).
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from lake import ids
from lake.errors import FormatError
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject, identify
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

# ---------------------------------------------------------------- events of V0


def event(number: int, source: str, **fields: Any) -> dict[str, Any]:
    """An event of V0."""
    return {"id": number, "timestamp": f"2025-01-01T00:00:{number:02}.5", "source": source, "message": ""} | fields


def user_event(number: int, text: str = "Count.") -> dict[str, Any]:
    return event(number, "user", action="message", args={"content": text, "image_urls": None})


def acted(number: int, key: str, text: str, *names: str, action: str = "run", index: int = 0) -> dict[str, Any]:
    """An action of the agent, of an answer that may call several tools."""
    calls = [
        {"id": f"{key}-{at}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for at, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    response = {
        "id": key,
        "created": 1_700_000_000,
        "model": "m",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }
    metadata = {"function_name": names[index], "tool_call_id": f"{key}-{index}", "model_response": response}
    return event(number, "agent", action=action, args={"thought": text}, tool_call_metadata=metadata)


def observation_event(number: int, of: dict[str, Any], text: str, observation: str = "run") -> dict[str, Any]:
    fields = {"cause": of["id"], "observation": observation, "content": text, "extras": {}}
    return event(number, "agent", tool_call_metadata=of["tool_call_metadata"], **fields)


def state(number: int, name: str, reason: str = "") -> dict[str, Any]:
    extras = {"agent_state": name, "reason": reason}
    return event(number, "environment", observation="agent_state_changed", content="", extras=extras)


def conversation() -> list[dict[str, Any]]:
    """Two answers; the first calls two tools."""
    first, second = (acted(number, "r1", "I look.", "bash", "edit", index=at) for at, number in enumerate((2, 4)))
    last = acted(6, "r2", "Done.", "finish", action="finish")
    return [
        state(0, "running"),
        user_event(1),
        first,
        observation_event(3, first, "one"),
        second,
        observation_event(5, second, "two"),
        last,
    ]


# ---------------------------------------------------------------- events of V1

TEXT = {"type": "text", "text": "I look.", "cache_prompt": False}


def kind(name: str, number: int, source: str = "environment", **fields: Any) -> dict[str, Any]:
    """An event of V1."""
    event_fields = {"id": f"0000-{number}", "timestamp": f"2026-01-01T00:00:{number:02}.5", "source": source}
    return event_fields | fields | {"kind": name}


def action(number: int, key: str | None, call: str, text: str | None = "I look.", **fields: Any) -> dict[str, Any]:
    tool_call = {"id": call, "name": "terminal", "arguments": '{"command": "ls"}', "origin": "completion"}
    event_fields = {
        "thought": [] if text is None else [TEXT | {"text": text}],
        "thinking_blocks": [],
        "tool_call": tool_call,
    }
    event_fields |= {"action": {"command": "ls", "timeout": None, "kind": "TerminalAction"}, "llm_response_id": key}
    return kind("ActionEvent", number, "agent", tool_name="terminal", tool_call_id=call, **(event_fields | fields))


def observed(number: int, call: str, text: str, *, is_error: bool = False) -> dict[str, Any]:
    inner = {"content": [TEXT | {"text": text}], "is_error": is_error, "exit_code": 0, "kind": "TerminalObservation"}
    return kind("ObservationEvent", number, tool_name="terminal", tool_call_id=call, observation=inner, action_id="x")


def message(number: int, source: str, text: str, key: str | None = None) -> dict[str, Any]:
    role = "assistant" if source == "agent" else "user"
    inner = {"role": role, "content": [TEXT | {"text": text}], "thinking_blocks": []}
    return kind("MessageEvent", number, source, llm_message=inner, llm_response_id=key, extended_content=[])


def session() -> list[dict[str, Any]]:
    """Two answers; the first calls two tools."""
    prompt = {"system_prompt": TEXT | {"text": "You help."}, "tools": [{"title": "terminal"}]}
    return [
        kind("SystemPromptEvent", 1, "agent", **prompt),
        message(2, "user", "Count."),
        action(3, "r1", "c1"),
        action(4, "r1", "c2", None),
        observed(5, "c1", "one"),
        observed(6, "c2", "two", is_error=True),
        message(7, "agent", "Done.", "r2"),
        kind("ConversationStateUpdateEvent", 8, key="execution_status", value="finished"),
    ]


def read(path: Path, value: Any, *, lines: bool = False) -> list[tuple[int, EpisodeRecord] | Reject]:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(item) + "\n" for item in value) if lines else json.dumps(value, indent=1)
    path.write_text(value if isinstance(value, str) else text, "utf-8")
    return list(FORMATS["openhands"].read(path))


def record(path: Path, value: Any, *, lines: bool = False) -> EpisodeRecord:
    (item,) = read(path, value, lines=lines)
    assert isinstance(item, tuple), item
    return item[1]


# ---------------------------------------------------------------- real files


def test_a_real_event_list_of_v0_holds_what_its_json_says() -> None:
    path = shared_data("formats", "openhands", "v0_basic.json")
    answers: dict[str, Any] = {}
    for item in json.loads(path.read_text("utf-8")):
        if item["source"] == "agent" and "action" in item:
            response = item["tool_call_metadata"]["model_response"]
            answers[response["id"]] = response["choices"][0]["message"]
    ((episode,), rejects) = read_file(path)
    totals = counts([episode])
    assert not rejects
    assert totals.decisions == len(answers)
    assert totals.tool_calls == sum(len(answer["tool_calls"]) for answer in answers.values())
    assert totals.characters == sum(len(answer["content"]) for answer in answers.values())
    assert (episode.terminated, episode.stop_reason, episode.policy) == (True, "finish", "claude-3-5-sonnet-20241022")
    assert [(step.prompt_tokens, step.completion_tokens) for step in episode.steps] == [(3486, 1135), (4646, 177)]


def test_a_real_event_log_of_v1_holds_what_its_json_says() -> None:
    path = shared_data("formats", "openhands", "v1_goal_events.jsonl")
    events = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    own_events = [item for item in events if "llm_response_id" in item]
    ((episode,), rejects) = read_file(path)
    totals = counts([episode])
    assert not rejects
    assert totals.decisions == len({item["llm_response_id"] for item in own_events})
    assert totals.tool_calls == len(own_events)
    assert totals.characters == sum(len(part["text"]) for item in own_events for part in item["thought"])
    assert [step.reasoning for step in episode.steps] == [item["reasoning_content"] for item in own_events]
    errors = [item["observation"]["is_error"] for item in events if item["kind"] == "ObservationEvent"]
    context = [m for step in episode.steps for m in step.context] + (episode.final_observation or [])
    assert [m["is_error"] for m in context] == errors
    assert (episode.prompt_tokens, episode.completion_tokens, episode.cost) == (107458, 1347, 0.0)


# ---------------------------------------------------------------- rules of V0


def test_actions_of_one_answer_are_one_decision(tmp_path: Path) -> None:
    episode = record(tmp_path / "f", conversation())
    assert [step.action for step in episode.steps] == ["I look.", "Done."]
    assert [len(step.tool_calls or ()) for step in episode.steps] == [2, 1]
    assert [step.state for step in episode.steps] == ["Count.", "one\ntwo"]
    assert [m["tool_call_id"] for m in episode.steps[1].context] == ["r1-0", "r1-1"]
    assert [span.name for span in episode.spans] == ["agent_state_changed"]


def test_agent_events_without_an_answer_are_decisions_if_a_model_made_them(tmp_path: Path) -> None:
    events = [
        event(0, "agent", action="system", args={"content": "You help.", "tools": [{"type": "function"}]}),
        user_event(1),
        event(2, "agent", action="run", args={"command": "ls", "thought": "I look."}),
        event(3, "agent", observation="run", content="one", cause=2, extras={}),
        event(4, "agent", action="change_agent_state", args={"agent_state": "running"}),
        event(5, "agent", action="message", args={"content": "Done."}),
    ]
    episode = record(tmp_path / "f", events)
    assert [step.action for step in episode.steps] == ["I look.", "Done."]
    assert episode.steps[0].tool_calls == [
        {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}
    ]
    assert episode.initial_messages is not None
    assert (episode.initial_messages[0]["role"], episode.tools) == ("system", [{"type": "function"}])


def test_an_error_is_an_error_and_sums_so_far_are_the_episodes(tmp_path: Path) -> None:
    call = acted(2, "r1", "I look.", "bash")
    spent = {"accumulated_cost": 0.5, "accumulated_token_usage": {"prompt_tokens": 70, "completion_tokens": 9}}
    wrong = observation_event(3, call, "no such file", "error") | {"llm_metrics": spent}
    episode = record(tmp_path / "f", [user_event(1), call, wrong, acted(4, "r2", "Hm.", "bash")])
    assert (episode.steps[1].state_is_error, episode.steps[1].state) == (True, "no such file")
    assert (episode.prompt_tokens, episode.completion_tokens, episode.cost) == (70, 9, 0.5)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (("finished", ""), ("completed", True)),
        (("error", "RuntimeError: Agent reached maximum iteration."), ("truncated", False)),
        (("error", "AuthenticationError"), ("failed", None)),
        (("stopped", ""), ("aborted", None)),
        (("awaiting_user_input", ""), ("completed", None)),
    ],
)
def test_the_last_state_says_how_it_ended(tmp_path: Path, last: tuple[str, str], expected: tuple[str, Any]) -> None:
    episode = record(tmp_path / "f", [*conversation()[:-1], state(9, *last)])
    assert ((episode.status, episode.terminated), episode.stop_reason) == (expected, last[0])


def test_what_an_agent_delegates_is_an_episode_of_its_own(tmp_path: Path) -> None:
    call = acted(2, "r1", "You do it.", "delegate", action="delegate")
    call["args"] |= {"agent": "BrowsingAgent", "inputs": {"task": "look"}}
    inner = [user_event(3, "TASK: look"), acted(4, "r2", "I browse.", "browser"), acted(5, "r3", "Seen.", "finish")]
    events = [
        user_event(1),
        call,
        *inner,
        observation_event(6, call, "it is there", "delegate"),
        acted(7, "r4", "Good.", "finish"),
    ]
    path = tmp_path / "f.json"
    main, below = (item[1] for item in read(path, events) if isinstance(item, tuple))
    assert [step.action for step in main.steps] == ["You do it.", "Good."]
    assert [step.action for step in below.steps] == ["I browse.", "Seen."]
    assert main.steps[1].state == "it is there"
    parent = ids.to_text(identify(main, "f").episode_id)
    assert (below.relation, below.parent_episode_id, below.parent_step_index) == ("subagent", parent, 0)
    assert below.agent_id == "BrowsingAgent:2"


@pytest.mark.parametrize("key", ["trajectory", "events", "items"])
def test_what_the_server_answers_is_the_events_in_it(tmp_path: Path, key: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps({key: conversation()}), "utf-8")
    ((episode,), rejects) = read_file(path)
    assert not rejects
    assert [step.action for step in episode.steps] == ["I look.", "Done."]


# ---------------------------------------------------------------- rules of V1


def test_events_of_one_answer_are_one_decision(tmp_path: Path) -> None:
    episode = record(tmp_path / "f", session(), lines=True)
    assert [step.action for step in episode.steps] == ["I look.", "Done."]
    assert [[c["id"] for c in step.tool_calls or ()] for step in episode.steps] == [["c1", "c2"], []]
    assert [step.state for step in episode.steps] == ["Count.", "one\ntwo"]
    assert (episode.steps[1].state_is_error, episode.terminated, episode.tools) == (True, True, [{"title": "terminal"}])
    assert episode.initial_messages is not None
    assert [m["content"] for m in episode.initial_messages] == ["You help.", "Count."]
    (first, _) = (episode.steps[0].extra or {})["events"]
    assert first["action"] == {"kind": "TerminalAction"}, "without what repeats the arguments"


def test_lists_and_other_kinds_of_events_are_read_too(tmp_path: Path) -> None:
    events_after = [
        kind("AgentErrorEvent", 20, "agent", tool_name="terminal", tool_call_id="c9", error="no such tool"),
        kind("UserRejectObservation", 21, tool_name="terminal", tool_call_id="c9", rejection_reason="not that"),
        kind("Condensation", 22, summary="It counted.", forgotten_event_ids=["0000-3"], llm_response_id="x"),
        kind("PauseEvent", 23, "user"),
        kind("SomethingNewEvent", 24, "agent", colour="red"),
        action(25, None, "c10", "I go on."),
    ]
    episode = record(tmp_path / "f", [*session()[:-1], *events_after])
    assert [step.action for step in episode.steps] == ["I look.", "Done.", "I go on."]
    assert episode.steps[2].state == "no such tool\nnot that\nIt counted."
    assert [m.get("is_error") for m in episode.steps[2].context] == [True, None, None]
    assert [(span.name, span.attributes) for span in episode.spans] == [
        ("PauseEvent", {"source": "user", "kind": "PauseEvent"}),
        ("SomethingNewEvent", {"source": "agent", "colour": "red", "kind": "SomethingNewEvent"}),
    ]


def test_exact_tokens_belong_to_the_call_before(tmp_path: Path) -> None:
    events = session()
    events.insert(6, kind("TokenEvent", 30, "agent", prompt_token_ids=[1, 2], response_token_ids=[3]))
    events.insert(8, kind("TokenEvent", 31, "agent", prompt_token_ids=[1, 2, 3, 4], response_token_ids=[5]))
    state_event = {"agent": {"llm": {"model": "m", "temperature": 0.5, "top_p": None}}}
    events.append(kind("ConversationStateUpdateEvent", 32, key="full_state", value=state_event))
    episode = record(tmp_path / "f", events, lines=True)
    assert episode.sampling == {"temperature": 0.5}
    tokens = [step.tokens for step in episode.steps if step.tokens]
    assert [t.temperature for t in tokens] == [0.5, 0.5]
    assert [(t.context_ids, t.action_ids, t.prefix_step_index) for t in tokens] == [
        ([1, 2], [3], UNSET),
        ([4], [5], UNSET),
    ]


def test_a_completion_log_among_the_events_tells_of_its_call(tmp_path: Path) -> None:
    answer = {"id": "r2", "model": "m", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    log = json.dumps({"messages": [], "response": answer, "cost": 0.25, "latency_sec": 1.5})
    fields = {"filename": "m-1.json", "log_data": log, "model_name": "m", "usage_id": "default"}
    step = record(tmp_path / "f", [*session(), kind("LLMCompletionLogEvent", 40, **fields)], lines=True).steps[1]
    assert (step.model, step.prompt_tokens, step.cost, step.latency) == ("m", 9, 0.25, 1.5)


@pytest.mark.parametrize(
    ("code", "expected"), [("MaxIterationsReached", ("truncated", False)), ("LLMError", ("failed", None))]
)
def test_an_error_of_the_conversation_ends_it(tmp_path: Path, code: str, expected: tuple[str, Any]) -> None:
    events = [*session(), kind("ConversationErrorEvent", 50, code=code, detail="why")]
    episode = record(tmp_path / "f", events, lines=True)
    assert ((episode.status, episode.terminated), episode.error) == (expected, f"{code}: why")


def test_a_folder_of_events_is_one_conversation_and_its_state_is_read_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    for number, item in enumerate(session()):
        (folder / f"event-{number:05}-{item['id']}.json").write_text(json.dumps(item), "utf-8")
    latency = {"model": "m", "latency": 2.5, "response_id": "r1"}
    usage = {"model_name": "m", "accumulated_cost": 0.5, "response_latencies": [latency]}
    agent = {"llm": {"model": "m", "api_key": "sk-1"}}
    state = {"id": "abc", "agent": agent, "execution_status": "finished", "stats": {"usage_to_metrics": {"d": usage}}}
    (tmp_path / "base_state.json").write_text(json.dumps(state), "utf-8")
    first, second, *_ = sorted(folder.iterdir())
    ((episode,), rejects) = read_file(first)
    assert not rejects
    assert [step.action for step in episode.steps] == ["I look.", "Done."]
    assert (episode.steps[0].latency, episode.cost, episode.policy) == (2.5, 0.5, "m")
    assert "sk-1" not in str(episode.extra)
    with pytest.raises(FormatError, match=f"one event of an .*; ingest {first.name}"):
        choose_format(second)
    with pytest.raises(FormatError, match="the state of an"):
        choose_format(tmp_path / "base_state.json")


# ---------------------------------------------------------------- outputs and completion logs


def test_a_downloaded_archive_is_one_conversation(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for number, value in reversed(list(enumerate(session()))):
            archive.writestr(f"event_{number:06}_e{number}.json", json.dumps(value))
        archive.writestr("event_000099_x.json", '{"kind": ')
        archive.writestr("meta.json", '{"id": "conversation", "title": "Count"}')
    (episode,), (reject,) = read_file(tmp_path / "c.zip")
    expected = record(tmp_path / "e.jsonl", session(), lines=True)
    assert [step.action for step in episode.steps] == [step.action for step in expected.steps]
    assert (reject.position, reject.reason, (episode.extra or {})["state"]["title"]) == (99, "truncated", "Count")


def test_a_line_of_an_output_is_an_instance_with_its_outcome(tmp_path: Path) -> None:
    events = conversation()
    pairs = [[events[2], events[3]], [events[4], events[5]], [events[6], state(8, "finished")]]
    report = {"empty_generation": False, "resolved": True}
    metadata = {"dataset": "swe-bench", "llm_config": {"model": "m2", "api_key": "sk-1"}}
    extra = {"instruction": "Fix.", "metadata": metadata, "test_result": {"git_patch": "+", "report": report}}
    lines = [
        {"instance_id": "a", "history": events, **extra},
        {"instance_id": "b", "history": pairs, **extra},
        {"instance_id": "c", "history": [], **extra, "test_result": {"report": {"resolved": False}}},
    ]
    first, second, third = (item[1] for item in read(tmp_path / "f", lines, lines=True) if isinstance(item, tuple))
    assert [(r.task_id, len(r.steps), r.env_return) for r in (first, second, third)] == [
        ("a", 2, 1.0),
        ("b", 2, 1.0),
        ("c", 1, 0.0),
    ]
    assert [(score.scorer, score.value) for score in first.scores] == [("empty_generation", 0.0), ("resolved", 1.0)]
    assert (first.environment, first.policy) == ("swe-bench", "m2")
    assert (first.extra or {})["test_result"]["git_patch"] == "+"
    assert "sk-1" not in str(first.extra)
    assert not third.steps[0].trainable


def test_another_attempt_at_an_instance_is_a_sibling(tmp_path: Path) -> None:
    common = {"instance_id": "a", "history": conversation(), "test_result": {}}
    lines = [common, *(common | {"attempt": number} for number in (1, 2, 3))]
    numbers = [item[1].rollout_index for item in read(tmp_path / "f", lines, lines=True) if isinstance(item, tuple)]
    assert numbers[0] == numbers[1], "the first one has no number in files of earlier versions"
    assert len(set(numbers)) == 3


@pytest.mark.parametrize(
    ("result", "scores", "verdict"),
    [
        ({"score": True, "model_answer": "7"}, {"score": 1.0}, 1.0),
        ({"reward": 0.5, "exit_code": 0}, {"reward": 0.5}, 0.5),
        ({"result": {"resolved": 0, "status": "done"}}, {"resolved": 0.0}, 0.0),
        ({"final_score": {"total": 4, "result": 3}}, {"resolved": 0.0}, 0.0),
        ({"final_score": {"total": 4, "result": 4}}, {"resolved": 1.0}, 1.0),
        ({"final_score": {"total": 0, "result": 0}}, {"resolved": 0.0}, 0.0),
    ],
)
def test_each_benchmark_names_its_verdict(
    tmp_path: Path, result: dict[str, Any], scores: dict[str, float], verdict: float | None
) -> None:
    line = {"instance_id": "a", "history": conversation(), "test_result": result, "metrics": {"accumulated_cost": 0.25}}
    episode = record(tmp_path / "f", [line], lines=True)
    assert ({score.scorer: score.value for score in episode.scores}, episode.env_return, episode.cost) == (
        scores,
        verdict,
        0.25,
    )


def test_a_history_that_begins_with_an_action_was_asked_the_instruction(tmp_path: Path) -> None:
    inner = {"kind": "ExecuteBashObservation", "output": "one", "error": True, "command": "ls"}
    seen_it = kind("ObservationEvent", 1, tool_name="terminal", tool_call_id="c0", observation=inner, action_id="x")
    line = {"instance_id": "a", "history": [action(0, "r1", "c0"), seen_it], "metadata": {}, "instruction": "Fix."}
    episode = record(tmp_path / "f", [line], lines=True)
    assert (episode.steps[0].state, episode.initial_messages) == ("Fix.", [{"role": "user", "content": "Fix."}])
    (message,) = episode.final_observation
    assert (message["content"], message["is_error"], message["observation"]) == (
        "one",
        True,
        {"error": True, "command": "ls"},
    )


def test_events_of_the_resolver_have_their_arguments_beside_the_action(tmp_path: Path) -> None:
    history = [
        {"content": "Fix.", "wait_for_response": False, "action": "message"},
        {"command": "ls", "thought": "I look.", "action": "run"},
        {"content": "one", "command_id": -1, "exit_code": 0, "observation": "run"},
        {"content": "Which one?", "wait_for_response": True, "action": "message"},
        {"outputs": {}, "thought": "Done.", "action": "finish"},
    ]
    issue = {"owner": "o", "repo": "r", "number": 5}
    line = {
        "issue": issue,
        "git_patch": "+",
        "history": history,
        "success": True,
        "result_explanation": "All is there.",
    }
    episode = record(tmp_path / "f", [line], lines=True)
    assert [(step.state, step.action) for step in episode.steps] == [
        ("Fix.", "I look."),
        ("one", "Which one?"),
        ("", "Done."),
    ]
    assert episode.steps[0].tool_calls == [
        {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}
    ]
    assert (episode.task_id, episode.env_return, episode.terminated) == ("o/r#5", None, True)
    assert [(score.scorer, score.value, score.reason) for score in episode.scores] == [
        ("success", 1.0, "All is there.")
    ]


def test_actions_without_ids_are_decisions_of_their_own(tmp_path: Path) -> None:
    events = [{"source": "user", "message": "Do.", "action": "message", "args": {"content": "Do."}}]
    events += [
        {"source": "agent", "message": "", "action": "run", "args": {"thought": text}} for text in ("One.", "Two.")
    ]
    ((episode,), _) = read_file((tmp_path / "f.json", (tmp_path / "f.json").write_text(json.dumps(events)))[0])
    assert [step.action for step in episode.steps] == ["One.", "Two."]


def log() -> dict[str, Any]:
    """A completion log of V1."""
    choice = acted(1, "r1", "I look.", "bash")["tool_call_metadata"]["model_response"]
    sent = [{"role": "system", "content": "You help."}, {"role": "user", "content": [TEXT]}]
    sent += [{"role": "assistant", "content": "Before."}, {"role": "tool", "tool_call_id": "c", "content": "one"}]
    return {
        "messages": sent,
        "tools": [{"type": "function"}],
        "kwargs": {"temperature": 0.5, "api_key": "sk-1"},
        "response": choice,
        "cost": 0.25,
        "timestamp": 1_700_000_001.5,
        "latency_sec": 1.5,
    }


@pytest.mark.parametrize("indent", [None, 1])
def test_a_completion_log_is_one_decision_and_the_chat_before_it_is_none(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "m-1.5.json"
    path.write_text(json.dumps(log(), indent=indent), "utf-8")
    ((episode,), rejects) = read_file(path)
    (step,) = episode.steps
    assert not rejects
    assert (step.action, step.state) == ("I look.", "I look.\nBefore.\none")
    assert (step.cost, step.latency, step.prompt_tokens, step.finish_reason) == (0.25, 1.5, 5, "tool_calls")
    assert episode.sampling == {"temperature": 0.5}
    assert (len(episode.initial_messages or ()), episode.tools) == (4, [{"type": "function"}])


def test_a_completion_log_of_the_responses_api_is_read(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    sent = [
        {"role": "user", "content": "Count."},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    usage = {"input_tokens": 5, "output_tokens": 2}
    answer = {"id": "r", "object": "response", "model": "m", "output": [thought, text, call], "usage": usage}
    value = {"input": sent, "instructions": "You help.", "response": answer, "timestamp": 1.0, "cost": 0.1}
    (step,) = record(tmp_path / "f", value).steps
    assert (step.action, step.reasoning, len(step.tool_calls or ())) == ("I look.", "Hm.", 1)
    assert (step.prompt_tokens, step.completion_tokens, step.model) == (5, 2, "m")
    assert step.state is not None
    assert step.state.startswith("Count.")


# ---------------------------------------------------------------- damage


def test_a_line_that_is_damaged_is_a_reject_and_the_others_make_the_episode(tmp_path: Path) -> None:
    lines = [json.dumps(item) for item in session()]
    lines[4] = '{"kind": "ObservationEvent", "source'
    lines[5] = json.dumps(observed(6, "c2", "two") | {"observation": 7})
    lines.insert(6, "7")
    *rejects, episode = read(tmp_path / "f", "\n".join(lines) + "\n")
    assert [(r.position, r.reason) for r in rejects if isinstance(r, Reject)] == [
        (5, "malformed"),
        (6, "invalid"),
        (7, "invalid"),
    ]
    assert "at `$.observation`" in rejects[1].message if isinstance(rejects[1], Reject) else False
    assert isinstance(episode, tuple)
    assert [step.action for step in episode[1].steps] == ["I look.", "Done."]
    assert (episode[1].extra or {})["lost_events"] == 3


def test_a_list_that_ends_too_early_keeps_the_events_before(tmp_path: Path) -> None:
    text = json.dumps(conversation(), indent=1)
    lost, episode = read(tmp_path / "f", text[: text.index("Done.")])
    assert isinstance(lost, Reject)
    assert (lost.position, lost.reason) == (6, "truncated")
    assert isinstance(episode, tuple)
    assert [step.action for step in episode[1].steps] == ["I look."]


def test_an_event_in_another_encoding_is_a_reject_and_the_others_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "f"
    events = conversation()
    events[3]["content"] = "caf\xe9"
    path.write_bytes(json.dumps(events, ensure_ascii=False).encode("latin-1"))
    wrong, episode = FORMATS["openhands"].read(path)
    assert isinstance(wrong, Reject)
    assert wrong.position == 3
    assert isinstance(episode, tuple)
    assert len(episode[1].steps) == 2


def test_events_that_no_agent_answers_are_rejected(tmp_path: Path) -> None:
    (rejected,) = read(tmp_path / "f", [user_event(1)])
    assert isinstance(rejected, Reject)
    assert "no decision of an" in rejected.message


def test_nothing_that_events_hold_raises(tmp_path: Path) -> None:
    first = acted(2, "r1", "I look.", "bash")
    assert_never_raises(
        tmp_path / "f.json", [state(0, "error"), user_event(1), first, observation_event(3, first, "one")]
    )
    events = [*session(), kind("TokenEvent", 30, "agent", prompt_token_ids=[1], response_token_ids=[3])]
    assert_never_raises(tmp_path / "f.jsonl", events, lines=True)
    assert_never_raises(tmp_path / "f.json", log())
    line = {"instance_id": "a", "history": [user_event(1), first], "metadata": {}, "test_result": {"report": {}}}
    assert_never_raises(tmp_path / "f.jsonl", [line], lines=True)
