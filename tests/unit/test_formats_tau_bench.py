"""tau-bench files: how a chat becomes decisions, and which rows are refused.

The golden test reads the real file; these say what each rule is.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lake.formats.base import json_array
from lake.formats.registry import FORMATS
from lake.formats.tau_bench import build_record
from lake.records import EpisodeRecord, Reject, StepRecord

SYSTEM = {"role": "system", "content": "You are an agent."}
HELLO = {"role": "user", "content": "Hello."}
ASK = {"role": "assistant", "content": "Who are you?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"who": "me"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "find", "content": '{"found": 1}'}
STOP = {"role": "user", "content": "###STOP###"}
INFO: dict[str, Any] = {
    "task": {"user_id": "u", "actions": [{"name": "find", "kwargs": {}}], "instruction": "Ask.", "outputs": []},
    "source": "user",
    "user_cost": 0.1,
    "reward_info": {"reward": 1.0, "info": {}, "actions": []},
}


def row(traj: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    """One element of the array."""
    chat = [SYSTEM, HELLO, ASK, STOP] if traj is None else traj
    return {"task_id": 4, "trial": 1, "reward": 1.0, "info": INFO, "traj": chat} | fields


def read(path: Path, document: str | list[Any]) -> list[tuple[int, EpisodeRecord] | Reject]:
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return list(FORMATS["tau_bench"].read(path))


def rejected(path: Path, bad: Any) -> Reject:
    """The reject that an element becomes; the elements around it are read."""
    first, second, third = read(path, [row(), bad, row(trial=2)])
    assert isinstance(first, tuple)
    assert isinstance(third, tuple)
    assert third[0] == 2
    assert isinstance(second, Reject), second
    assert (second.position, second.reason) == (1, "invalid")
    assert json.loads(second.raw) == bad
    return second


# ---------------------------------------------------------------- decisions


def test_each_assistant_turn_is_a_step_and_its_state_is_what_came_since_the_last_one() -> None:
    record = build_record(row([SYSTEM, HELLO, ASK, HELLO, CALL, RESULT, ASK, STOP]))
    assert [step.state for step in record.steps] == ["Hello.", "Hello.", '{"found": 1}']
    assert [step.state_role for step in record.steps] == ["user", "user", "tool"]
    assert [step.action for step in record.steps] == ["Who are you?", "", "Who are you?"]
    assert [step.tool_calls for step in record.steps] == [None, CALL["tool_calls"], None]


def test_every_message_is_kept_once() -> None:
    """Initial messages, then each step's context, then what no decision answered."""
    chat = [SYSTEM, HELLO, ASK, HELLO, CALL, RESULT, ASK, STOP]
    record = build_record(row(chat))
    assert record.initial_messages == [SYSTEM, HELLO]
    assert [step.context for step in record.steps] == [[], [HELLO], [RESULT]]
    assert record.final_observation == [STOP]


def test_what_a_message_says_besides_is_kept() -> None:
    thought = ASK | {"reasoning_content": "Hm.", "refusal": None, "annotations": [1]}
    (step,) = build_record(row([SYSTEM, HELLO, thought])).steps
    assert (step.reasoning, step.extra) == ("Hm.", {"annotations": [1]})


def test_a_rollout_that_the_runner_could_not_finish_failed() -> None:
    record = build_record(row([], reward=0.0, info={"error": "timeout", "traceback": "..."}))
    assert (record.status, record.error, record.env_return) == ("failed", "timeout", 0.0)


def test_several_messages_between_two_turns_are_one_state() -> None:
    step = build_record(row([SYSTEM, HELLO, RESULT, ASK])).steps[0]
    assert step.state == 'Hello.\n{"found": 1}'
    assert step.state_role == "tool"


def test_the_system_prompt_is_no_state_wherever_it_stands() -> None:
    first, second = build_record(row([SYSTEM, HELLO, ASK, SYSTEM, HELLO, ASK])).steps
    assert first.state == second.state == "Hello."


def test_a_turn_that_answers_nothing_has_an_empty_state() -> None:
    steps = build_record(row([ASK, ASK])).steps
    assert [(step.state, step.state_role, step.context) for step in steps] == [("", None, []), ("", None, [])]


@pytest.mark.parametrize(
    ("content", "is_error"), [("Error: no such user", True), ("No Error", False), ("", False), (None, False)]
)
def test_a_tool_result_that_begins_with_error_is_an_error(content: str | None, is_error: bool) -> None:
    step = build_record(row([HELLO, CALL, RESULT | {"content": content}, ASK])).steps[1]
    assert step.state_is_error is is_error


def test_a_user_who_says_error_is_none() -> None:
    assert build_record(row([{"role": "user", "content": "Error 404"}, ASK])).steps[0].state_is_error is False


def test_what_the_file_does_not_say_stays_unknown() -> None:
    """No run, no model, no rewards of steps: only the return of the episode."""
    record = build_record(row())
    assert record.run_id is None
    assert record.policy is None
    assert [step.reward for step in record.steps] == [None]
    assert record.env_return == 1.0


def test_siblings_are_the_trials_of_a_task() -> None:
    record = build_record(row())
    assert (record.task_id, record.rollout_index) == ("4", 1)
    assert build_record(row(task_id="retail-4")).task_id == "retail-4"


def test_what_a_reward_may_compare_with_and_the_rest_of_the_info_are_kept() -> None:
    record = build_record(row())
    assert record.ground_truth == {"actions": INFO["task"]["actions"], "outputs": []}
    assert record.extra == {"info": INFO}


# ---------------------------------------------------------------- how it ended


def test_a_rollout_whose_environment_gave_a_reward_was_ended_by_its_source() -> None:
    record = build_record(row(info=INFO | {"source": "transfer_to_human_agents"}))
    assert (record.status, record.terminated, record.stop_reason) == ("completed", True, "transfer_to_human_agents")


def test_a_rollout_without_reward_info_was_stopped_by_the_limit_of_turns() -> None:
    """The runner ends an episode after 30 turns; what spoke last then is not why it stopped."""
    record = build_record(row(info=INFO | {"reward_info": None}))
    assert (record.status, record.terminated, record.stop_reason) == ("truncated", False, None)


@pytest.mark.parametrize("info", [None, {}])
def test_a_row_without_info_leaves_the_end_unknown(info: dict[str, Any] | None) -> None:
    record = build_record(row(info=info))
    assert (record.status, record.terminated, record.stop_reason) == ("completed", None, None)
    assert record.ground_truth is None


def test_a_reward_may_be_unknown() -> None:
    assert build_record(row(reward=None)).env_return is None


# ---------------------------------------------------------------- rows that are refused, one by one


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (17, "Expected `object`, got `int`"),
        (None, "Expected `object`, got `null`"),
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field"),
        (row(trial=-1), ">= 0 - at `$.trial`"),
        (row(trial=True), "at `$.trial`"),
        (row(trial=2**31), "at `$.trial`"),
        (row(task_id=None), "at `$.task_id`"),
        (row(task_id=1.5), "at `$.task_id`"),
        (row(reward="1"), "at `$.reward`"),
        (row(traj={}), "at `$.traj`"),
        (row(["hi"]), "at `$.traj[0]`"),
        (row(info=[]), "at `$.info`"),
        (row(info={"task": ["actions"]}), "at `$.info.task`"),
        (row(info={"task": "actions"}), "at `$.info.task`"),
        (row(info={"source": 5}), "at `$.info.source`"),
        (row(info={"reward_info": 1.0}), "at `$.info.reward_info`"),
        (row([], reward=None), "no decision of an agent, and no outcome"),
        (row([SYSTEM, HELLO], reward=None), "no decision of an agent, and no outcome"),
        (row([HELLO, {"content": "no role"}]), "`traj[1].role` is None"),
        (row([{"role": ["user"], "content": ""}, ASK]), "`traj[0].role` is ['user']"),
        (row([{"role": "user", "content": [{"type": "text"}, 5]}, ASK]), "is list; valid: text, or parts"),
        (row([HELLO, ASK | {"content": 5}]), "is int; valid: text"),
        (row([HELLO, CALL | {"tool_calls": {"id": "1"}}]), "`traj[1].tool_calls` is dict; valid: list"),
        (row([{"role": "user", "content": "lone \ud800"}, ASK]), "cannot be stored as UTF-8"),
        (row([{"role": "lone \ud800", "content": 5}, ASK]), "'lone \\ud800' message at"),
        (row() | {"lone \ud800": 1}, "surrogates not allowed"),
    ],
)
def test_a_row_of_the_wrong_shape_is_rejected_and_the_others_are_read(tmp_path: Path, bad: Any, says: str) -> None:
    assert says in rejected(tmp_path / "f", bad).message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_reward_that_is_no_number_is_rejected(tmp_path: Path, number: str) -> None:
    text = json.dumps([row(), row(reward=0.125)]).replace("0.125", number)
    _, second = read(tmp_path / "f", text)
    assert isinstance(second, Reject)
    assert "`env_return`" in second.message


@pytest.mark.parametrize("depth", [*range(380, 1000, 31), 2000, 100_000])
def test_a_row_that_nests_too_deeply_is_rejected_alone(tmp_path: Path, depth: int) -> None:
    """Whether the parser or a later encoder meets its limit first."""
    deep = json.dumps(row([HELLO, CALL | {"tool_calls": ["deep"]}])).replace('"deep"', "[" * depth + "]" * depth)
    first, second, third = read(tmp_path / "f", f"[{json.dumps(row())}, {deep}, {json.dumps(row(trial=2))}]")
    assert isinstance(first, tuple)
    assert isinstance(third, tuple)
    assert isinstance(second, Reject) or depth < 500
    if isinstance(second, Reject):
        assert (second.reason, second.raw) == ("invalid", deep)


def test_a_number_of_too_many_digits_is_rejected_alone(tmp_path: Path) -> None:
    document = json.dumps([row(), row(trial=7), row(trial=2)]).replace('"trial": 7', '"trial": ' + "7" * 5000)
    first, second, third = read(tmp_path / "f", document)
    assert isinstance(first, tuple)
    assert isinstance(third, tuple)
    assert isinstance(second, Reject)
    assert "digits" in second.message


# ---------------------------------------------------------------- documents that are damaged


@pytest.mark.parametrize("window", [1, 100, 1 << 20])
def test_what_was_complete_before_the_damage_is_kept_and_the_rest_is_one_reject(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", window)
    rows = [json.dumps(row(trial=n)) for n in range(4)]
    document = "[" + ",\n".join(rows) + "]"
    cut = document.index(rows[2]) + len(rows[2]) // 2
    episodes, lost = read(tmp_path / "f", document[:cut])[:2], read(tmp_path / "f", document[:cut])[2:]
    assert [item[0] for item in episodes if isinstance(item, tuple)] == [0, 1]
    (reject,) = lost
    assert isinstance(reject, Reject)
    assert (reject.position, reject.reason) == (2, "truncated")
    assert document[:cut].endswith(reject.raw)
    assert "after element 1" in reject.message

    broken = document.replace(rows[2], rows[2].replace('"trial": 2', '"trial" 2'))
    items = read(tmp_path / "f", broken)
    assert [item[0] for item in items if isinstance(item, tuple)] == [0, 1]
    assert isinstance(items[2], Reject)
    assert (items[2].reason, len(items)) == ("malformed", 3)
    assert items[2].raw.endswith(rows[3] + "]"), "the rest is handed back, good rows included"


def test_an_empty_array_holds_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "f", "[]") == []


def test_a_record_is_typed_as_if_it_had_been_decoded() -> None:
    """What the reader builds by hand would decode to itself: no field is of a type its column cannot hold."""
    record = build_record(row([SYSTEM, HELLO, ASK, HELLO, CALL, RESULT, ASK, STOP]))
    assert msgspec.json.decode(msgspec.json.encode(record), type=EpisodeRecord) == record
    assert all(isinstance(step, StepRecord) for step in record.steps)
