"""tau2-bench: what its layouts hold, what is a decision and what the agent sees, and files that are damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

GREETING = {"role": "assistant", "content": "Hi! How can I help you today?", "turn_idx": 0, "cost": 0.0, "usage": None}
HELLO = {"role": "user", "content": "My phone is slow.", "turn_idx": 1, "timestamp": "2026-01-01T00:00:01"}
USAGE = {"prompt_tokens": 20, "completion_tokens": 5}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "name": "find", "arguments": {"who": "me"}, "requestor": "assistant"}],
    "cost": 0.25,
    "usage": USAGE,
    "generation_time_seconds": 1.5,
    "raw_data": {
        "model": "gpt-x-2026",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Look them up.",
                    "tool_calls": [{"id": "c1"}],
                    "thinking_blocks": [{"signature": "s"}],
                },
            }
        ],
    },
}
FOUND = {"role": "tool", "id": "c1", "content": "{}", "requestor": "assistant", "error": False}
ASK = {"role": "assistant", "content": "Please restart it.", "usage": USAGE}
USER_CALL = {
    "role": "user",
    "content": None,
    "tool_calls": [{"id": "u1", "name": "restart", "arguments": {}, "requestor": "user"}],
}
USER_RESULT = {"role": "tool", "id": "u1", "content": "Error: no battery", "requestor": "user", "error": True}
DONE = {"role": "user", "content": "It works. ###STOP###"}
CHAT = [GREETING, HELLO, CALL, FOUND, ASK, USER_CALL, USER_RESULT, DONE]
REWARD = {
    "reward": 1.0,
    "db_check": {"db_match": True, "db_reward": 1.0},
    "action_checks": [
        {"action": {"name": "find"}, "action_match": True, "action_reward": 1.0},
        {"action": {"name": "restart"}, "action_match": False, "action_reward": 0.0},
    ],
    "nl_assertions": [{"nl_assertion": "The agent is kind.", "met": True, "justification": "It is."}],
    "env_assertions": [],
    "reward_basis": ["DB", "NL_ASSERTION"],
    "reward_breakdown": {"DB": 1.0, "NL_ASSERTION": 1.0},
}
INFO = {
    "git_commit": "abc",
    "num_trials": 2,
    "agent_info": {"implementation": "llm_agent", "llm": "gpt-x", "llm_args": {"temperature": 0, "api_key": "k"}},
    "user_info": {"llm": "gpt-u", "llm_args": {"api_key": "k"}},
    "environment_info": {"domain_name": "telecom", "policy": "Be kind.", "tool_defs": {"find": {"name": "find"}}},
}
TASK = {"id": "7", "user_scenario": {"persona": None}, "evaluation_criteria": {"actions": []}}


def simulation(chat: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "id": "sim-1",
        "task_id": "7",
        "trial": 0,
        "seed": 11,
        "start_time": "2026-01-01T00:00:00",
        "end_time": "2026-01-01T00:01:00",
        "duration": 60.0,
        "termination_reason": "user_stop",
        "agent_cost": 0.5,
        "user_cost": 0.1,
        "reward_info": REWARD,
        "messages": CHAT if chat is None else chat,
    } | fields


def results(*simulations: Any, **fields: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01", "info": INFO, "tasks": [TASK], "simulations": list(simulations)} | fields


def read(path: Path, value: Any, **options: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, **options), "utf-8")
    return read_file(path)


def only(tmp_path: Path, *args: Any, **fields: Any) -> EpisodeRecord:
    (record,), rejects = read(tmp_path / "r.json", results(simulation(*args, **fields)))
    assert rejects == []
    return record


# ---------------------------------------------------------------- a real file


def test_a_real_results_document_is_read_whole() -> None:
    path = shared_data("formats", "tau2", "telecom_gpt4o_mono.json")
    document = json.loads(path.read_text("utf-8"))
    spoken, calls, rewards, user_calls = [], 0, [], 0
    for run in document["simulations"]:
        greeting, *rest = run["messages"]
        assert (greeting["role"], greeting["usage"]) == ("assistant", None)
        spoken += [m["content"] or "" for m in rest if m["role"] == "assistant"]
        calls += sum(len(m["tool_calls"] or []) for m in rest if m["role"] == "assistant")
        user_calls += sum(len(m["tool_calls"] or []) for m in rest if m["role"] == "user")
        reward = run["reward_info"]
        rewards += [reward["reward"], reward["db_check"]["db_reward"], *reward["reward_breakdown"].values()]
        for name, key in (("action_checks", "action_match"), ("env_assertions", "met")):
            rewards.append(sum(check[key] for check in reward[name]) / len(reward[name]))
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records) == Counts(20, len(spoken), calls, sorted(rewards), sum(map(len, spoken)))
    assert user_calls > calls, "users call more tools than the agent here, and none of them is a decision"
    assert {record.environment for record in records} == {"tau2_telecom"}
    assert {record.policy for record in records} == {"gpt-4o"}
    assert len({record.task_id for record in records}) == 20
    assert all(record.cost and record.started_at and record.ground_truth for record in records)
    messages_read = [m for r in records for m in (*(r.initial_messages or ()), *(r.final_observation or ()))]
    messages_read += [m for r in records for step in r.steps for m in step.context]
    assert len(messages_read) + len(spoken) == sum(len(run["messages"]) for run in document["simulations"])


# ---------------------------------------------------------------- decisions


def test_the_harness_greets_and_no_model_decided_that(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert [step.action for step in record.steps] == ["", "Please restart it."]
    assert [m["role"] for m in record.initial_messages or ()] == ["assistant", "user"]
    assert record.steps[0].state == "My phone is slow."


def test_a_first_message_that_a_model_wrote_is_a_decision(tmp_path: Path) -> None:
    assert len(only(tmp_path, [CALL, FOUND, ASK]).steps) == 2


def test_what_users_do_alone_is_kept_and_is_no_state(tmp_path: Path) -> None:
    record = only(tmp_path, [*CHAT, ASK])
    last = record.steps[-1]
    assert last.state == "It works. ###STOP###"
    assert last.state_is_error is False
    assert [(m["role"], m.get("requestor")) for m in last.context] == [("user", None), ("tool", "user"), ("user", None)]
    assert last.context[0]["tool_calls"][0] == {
        "id": "u1",
        "type": "function",
        "function": {"name": "restart", "arguments": {}},
        "requestor": "user",
    }
    assert last.context[1]["is_error"] is True


def test_what_the_provider_said_of_a_call_is_where_it_belongs(tmp_path: Path) -> None:
    step = only(tmp_path).steps[0]
    assert step.tool_calls == [
        {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"who": "me"}}}
    ]
    assert (step.model, step.finish_reason, step.reasoning) == ("gpt-x-2026", "tool_calls", "Look them up.")
    assert (step.prompt_tokens, step.completion_tokens, step.cost, step.latency) == (20, 5, 0.25, 1.5)
    assert step.extra == {"raw_data": {"choices": [{"message": {"thinking_blocks": [{"signature": "s"}]}}]}}


def test_thinking_in_an_answer_of_anthropics_is_reasoning(tmp_path: Path) -> None:
    thought = {"type": "thinking", "thinking": "Who is it?", "signature": "x9"}
    raw = {"id": "msg_1", "model": "m", "role": "assistant", "stop_reason": "end_turn", "thinking_blocks": [thought]}
    (step,) = only(tmp_path, [HELLO, ASK | {"raw_data": raw}]).steps
    assert (step.model, step.finish_reason, step.reasoning) == ("m", "end_turn", "Who is it?")
    assert step.extra == {"signatures": ["x9"], "raw_data": {"id": "msg_1"}}


def test_results_of_several_calls_in_one_message_are_several_messages(tmp_path: Path) -> None:
    several = {"role": "tool", "tool_messages": [FOUND, FOUND | {"id": "c2", "error": True}]}
    step = only(tmp_path, [HELLO, CALL, several, ASK]).steps[1]
    assert [m["tool_call_id"] for m in step.context] == ["c1", "c2"]
    assert step.state_is_error is True


def test_a_history_that_the_task_begins_with_is_none_of_the_agents_decisions(tmp_path: Path) -> None:
    history = [HELLO, ASK, DONE]
    document = results(simulation([*history, CALL, FOUND, ASK]))
    document["tasks"] = [TASK | {"initial_state": {"message_history": history}}]
    (record,), _ = read(tmp_path / "r.json", document)
    assert len(record.steps) == 2
    assert len(record.initial_messages or ()) == 3


# ---------------------------------------------------------------- rewards and ends


def test_the_breakdown_of_a_reward_is_scores(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert record.env_return == 1.0
    scores = {score.scorer: score.value for score in record.scores}
    assert scores == {"DB": 1.0, "NL_ASSERTION": 1.0, "db_check": 1.0, "action_checks": 0.5, "nl_assertions": 1.0}
    checks = next(score.metrics for score in record.scores if score.scorer == "action_checks")
    assert checks == {"checks": REWARD["action_checks"]}


def test_a_simulation_that_was_never_rewarded_has_no_return(tmp_path: Path) -> None:
    record = only(tmp_path, reward_info=None)
    assert record.env_return is None
    assert record.scores == []


@pytest.mark.parametrize(
    ("reason", "status", "terminated"),
    [
        ("user_stop", "completed", True),
        ("TerminationReason.AGENT_STOP", "completed", True),
        ("max_steps", "truncated", False),
        ("too_many_errors", "truncated", False),
        ("context_window_exceeded", "truncated", False),
        ("agent_error", "failed", None),
        ("infrastructure_error", "failed", None),
        ("a_new_reason", "completed", None),
        (None, "completed", None),
    ],
)
def test_how_a_simulation_ended(tmp_path: Path, reason: str | None, status: str, terminated: bool | None) -> None:
    record = only(tmp_path, termination_reason=reason)
    assert (record.status, record.terminated) == (status, terminated)


def test_trials_of_a_task_are_siblings_whatever_their_seeds(tmp_path: Path) -> None:
    trials = [simulation(trial=n, seed=100 + n, id=f"s{n}") for n in range(3)]
    records, _ = read(tmp_path / "r.json", results(*trials))
    assert [(r.task_id, r.rollout_index, r.seed, (r.extra or {})["seed"]) for r in records] == [
        ("7", n, None, 100 + n) for n in range(3)
    ]
    assert records[0].expected_group_size == 2
    records, _ = read(tmp_path / "bare.json", [simulation(trial=None), simulation(trial=None)])
    assert [record.rollout_index for record in records] == [0, 1]


def test_a_trial_that_is_there_twice_is_two_siblings(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "bare.json", [simulation(id="a"), simulation(id="b"), simulation(id="c")])
    assert records[0].rollout_index == 0
    assert len({record.rollout_index for record in records}) == 3
    again, _ = read(tmp_path / "again.json", [simulation(id="a"), simulation(id="b")])
    assert again[1].rollout_index == records[1].rollout_index


def test_the_run_is_told_without_its_keys(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert record.sampling == {"temperature": 0}
    assert (record.policy, record.source_version, record.tools) == ("gpt-x", "abc", [{"name": "find"}])
    assert (record.extra or {})["run"]["environment_info"]["policy"] == "Be kind."
    assert (record.extra or {})["task"] == {"user_scenario": {"persona": None}}
    assert record.ground_truth == {"actions": []}
    assert "api_key" not in json.dumps(record.extra)


# ---------------------------------------------------------------- layouts


def folder(tmp_path: Path, index: list[Any] | None) -> Path:
    run = tmp_path / "my_run"
    for n in range(2):
        read(run / "simulations" / f"s{n}.json", simulation(id=f"s{n}", trial=n), indent=2)
    document = results(simulation_index=index)
    del document["simulations"]
    (run / "results.json").write_text(json.dumps(document, indent=2))
    return run


def test_either_file_of_a_folder_finds_the_other(tmp_path: Path) -> None:
    run = folder(tmp_path, [{"id": "s1", "task_id": "7", "trial": 1, "reward": 1.0}])
    records, rejects = read_file(run / "results.json")
    assert rejects == []
    assert [record.rollout_index for record in records] == [1, 0], "what the index lists comes first"
    (part,), _ = read_file(run / "simulations" / "s1.json")
    assert part == records[0]
    assert (part.run_id, part.policy, part.environment) == ("my_run", "gpt-x", "tau2_telecom")
    items = list(FORMATS["tau2"].read(run / "simulations" / "s1.json", run_id="named"))
    assert items[0][1].run_id is None, "a run that somebody names is called so"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_folder_has_each_simulation_and_each_reject_once(tmp_path: Path, is_damaged: bool) -> None:
    run = folder(tmp_path, [{"id": "s1", "task_id": "7", "trial": 1, "reward": 1.0}])
    (run / "simulations" / "s0.json").write_text(json.dumps(simulation(id="s0", trial="none")))
    if is_damaged:
        (run / "results.json").write_text('{"info": {"num_tri')
    report = ingest(empty_lake(tmp_path / "lake"), run)
    assert (report.new, report.present, report.rejected) == (1, 0, 1)


def test_a_simulation_whose_results_are_missing_or_damaged_is_read_all_the_same(tmp_path: Path) -> None:
    run = folder(tmp_path, None)
    (run / "results.json").write_text('{"info": {"num_tri')
    (record,), rejects = read_file(run / "simulations" / "s0.json")
    assert rejects == []
    assert "does not parse" in (record.extra or {})["companion"]
    (run / "results.json").unlink()
    (record,), _ = read_file(run / "simulations" / "s0.json")
    assert (record.extra or {})["companion"] == "results.json is missing"
    assert len(record.steps) == 2


def test_an_index_whose_simulations_are_gone_gives_their_outcomes(tmp_path: Path) -> None:
    entry = {"id": "s9", "task_id": 9, "trial": 3, "reward": 0.0, "termination_reason": "max_steps", "agent_cost": 1.0}
    run = folder(tmp_path, [entry])
    (run / "simulations" / "s0.json").write_text("{")
    (other_record, outcome), (reject,) = read_file(run / "results.json")
    assert (outcome.task_id, outcome.rollout_index, outcome.env_return, outcome.status) == ("9", 3, 0.0, "truncated")
    assert outcome.steps[0].trainable is False
    assert (outcome.extra or {})["missing"] == "simulations/s9.json"
    assert other_record.rollout_index == 1
    assert (reject.position, reject.reason) == (0, "truncated")
    assert "simulations/s0.json" in reject.message


def test_an_array_lines_and_a_submitted_summary_are_read_too(tmp_path: Path) -> None:
    two = [simulation(trial=0), simulation(trial=1)]
    bare, _ = read(tmp_path / "a.json", two)
    lines, _ = read(tmp_path / "b.jsonl", "\n".join(json.dumps(s) for s in two))
    submitted, _ = read(tmp_path / "c.json", {"domain": "retail", "model": "m", "simulations": two}, indent=1)
    compact, _ = read(tmp_path / "d.json", results(*two))
    ordered, _ = read(tmp_path / "e.json", results(*two), sort_keys=True)
    assert [len(records) for records in (bare, lines, submitted, compact, ordered)] == [2] * 5
    assert (submitted[0].environment, submitted[0].policy) == ("tau2_retail", "m")
    assert bare[0].environment == "tau2"
    assert ordered[0].ground_truth == compact[0].ground_truth is not None


def test_other_files_of_the_tool_are_named_as_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([TASK]))
    with pytest.raises(FormatError, match="tasks of a tau2"):
        choose_format(path)
    path.write_text(json.dumps({"model_name": "m", "contact_info": {}, "results": {}}, indent=1))
    with pytest.raises(FormatError, match="of a tau2 submission"):
        choose_format(path)


# ---------------------------------------------------------------- voice


def tick(n: int, agent: Any = None, user: Any = None, ids: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "tick_id": n,
        "timestamp": f"2026-01-01T00:00:{n:02}",
        "agent_chunk": agent and {"role": "assistant", "content": agent, "utterance_ids": ids, "cost": 0.5},
        "user_chunk": user and {"role": "user", "content": user, "utterance_ids": ids},
        "agent_tool_calls": [],
        "user_tool_calls": [],
        "agent_tool_results": [],
        "user_tool_results": [],
    } | fields


def test_chunks_of_an_utterance_are_one_message_even_if_the_user_breaks_in(tmp_path: Path) -> None:
    ticks = [
        tick(0, user="My ph", ids=["u"]),
        tick(1, user="one.", ids=["u"]),
        tick(2, agent="Let me ", ids=["a"]),
        tick(3, user="Wait!", ids=["w"]),
        tick(4, agent="look.", ids=["a"]),
        tick(5, agent_tool_calls=[CALL["tool_calls"][0]], agent_tool_results=[FOUND]),
        tick(6, agent="Done.", ids=["b"]),
    ]
    record = only(tmp_path, [], messages=None, ticks=ticks, mode="full_duplex")
    assert [(step.action, len(step.tool_calls or ())) for step in record.steps] == [
        ("Let me look.", 0),
        ("", 1),
        ("Done.", 0),
    ]
    assert [step.state for step in record.steps] == ["My phone.", "Wait!", "{}"]
    assert record.steps[0].cost == 1.0
    assert [span.step_index for span in record.spans] == [None, None, 0, 0, 0, 1, 2]
    assert record.spans[3].attributes == {key: value for key, value in ticks[3].items() if value is not None}


def test_without_utterances_a_turn_ends_when_the_agent_hears_something(tmp_path: Path) -> None:
    ticks = [tick(0, "One "), tick(1), tick(2, "two."), tick(3, user="Yes?"), tick(4, "Three.")]
    record = only(tmp_path, [], messages=None, ticks=ticks)
    assert [step.action for step in record.steps] == ["One two.", "Three."]


# ---------------------------------------------------------------- damage


def test_a_document_that_is_cut_keeps_the_simulations_before(tmp_path: Path) -> None:
    text = json.dumps(results(*(simulation(trial=n) for n in range(3))), indent=1)
    records, (reject,) = read(tmp_path / "r.json", text[: text.rindex('"task_id"')])
    assert [record.rollout_index for record in records] == [0, 1]
    assert (reject.position, reject.reason) == (2, "truncated")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (simulation(trial=-1), ">= 0 - at `$.trial`"),
        (simulation(task_id=None), "at `$.task_id`"),
        (simulation(reward_info={"reward": "1"}), "at `$.reward_info.reward`"),
        (simulation(messages="hi"), "at `$.messages`"),
        (simulation([{"content": "no role"}]), "`messages[0].role` is None"),
        (simulation([HELLO, ASK | {"content": 5}]), "is int; valid: text"),
        (simulation([HELLO, ASK | {"tool_calls": [{"id": "x"}]}]), "valid: an object with a `name`"),
        (simulation([], reward_info=None), "no decision of an agent, and no outcome"),
        (simulation(ticks=[3]), "at `$.ticks[0]`"),
        (17, "Expected `object`, got `int`"),
    ],
)
def test_a_wrong_simulation_is_rejected_and_the_others_are_read(tmp_path: Path, bad: Any, says: str) -> None:
    document = results(simulation(trial=5), bad, simulation(trial=6))
    records, (reject,) = read(tmp_path / "r.json", document, indent=1)
    assert [record.rollout_index for record in records] == [5, 6]
    assert (reject.position, reject.reason) == (1, "invalid")
    assert says in reject.message


def test_bytes_that_are_no_text_cost_the_simulation_they_stand_in(tmp_path: Path) -> None:
    data = json.dumps(results(simulation(trial=0), simulation(trial=1)), indent=1).encode()
    path = tmp_path / "r.json"
    at = data.rindex(b"restart it")
    path.write_bytes(data[:at] + b"\xff\xfe" + data[at:])
    records, (reject,) = read_file(path)
    assert [record.rollout_index for record in records] == [0]
    assert (reject.position, reject.reason) == (1, "invalid")


def test_what_a_newer_version_adds_is_kept(tmp_path: Path) -> None:
    record = only(tmp_path, review={"has_errors": False}, a_new_key=[1])
    assert (record.extra or {})["a_new_key"] == [1]
    assert (record.extra or {})["review"] == {"has_errors": False}


def test_no_file_makes_the_reader_raise(tmp_path: Path) -> None:
    assert_never_raises(tmp_path / "r.json", results(simulation(ticks=[tick(0, "a", "b")])))
    assert_never_raises(tmp_path / "a.json", [simulation()])
    run = folder(tmp_path, [{"id": "s1", "task_id": "7", "trial": 1, "reward": 1.0}])
    assert_never_raises(run / "results.json", json.loads((run / "results.json").read_text()))
    assert_never_raises(run / "simulations" / "s0.json", simulation())
