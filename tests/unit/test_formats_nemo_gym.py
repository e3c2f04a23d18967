"""NeMo Gym rollouts: items of the Responses API as decisions, and the files next to the rollouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

ASK = {"type": "message", "role": "user", "content": "What is f?"}
THINK = {
    "type": "reasoning",
    "id": "rs",
    "summary": [{"type": "summary_text", "text": "Hm."}],
    "encrypted_content": "x9",
}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
SAY = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 7."}]}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def row(*output: Any, prompt: Any = (ASK,), response: Any = None, **fields: Any) -> dict[str, Any]:
    """One line."""
    request = {"input": list(prompt) if isinstance(prompt, tuple) else prompt, "tools": [TOOL], "temperature": 0.5}
    answer = {"model": "m", "output": list(output), "temperature": 0.5} | (response or {})
    return {"responses_create_params": request, "response": answer, "reward": 1.0} | fields


def read(path: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """The rows of a file of lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return read_file(path)


def read_one(path: Path, value: dict[str, Any]) -> EpisodeRecord:
    """The episode of a row."""
    (record,), rejects = read(path, value)
    assert not rejects
    return record


# ---------------------------------------------------------------- real files


def test_a_real_game_has_its_turns_as_decisions_and_the_sources_numbers() -> None:
    path = shared_data("formats", "nemo_gym", "blackjack.example_rollouts.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = [i["content"][0]["text"] for r in rows for i in r["response"]["output"] if i["role"] == "assistant"]
    records, rejects = read_file(path)
    assert not rejects
    rewards = sorted([r["reward"] for r in rows] * 2)
    assert counts(records) == (5, len(texts), 0, rewards, sum(map(len, texts)))
    assert [step.action for record in records for step in record.steps] == texts
    assert [(r.task_id, r.rollout_index) for r in records] == [("0", number) for number in range(5)]
    assert {r.agent_id for r in records} == {"blackjack_gymnasium_agent"}
    assert all(r.terminated and r.status == "completed" for r in records)
    assert [r.prompt_tokens for r in records] == [r["response"]["usage"]["input_tokens"] for r in rows]
    assert records[0].extra is not None
    assert records[0].extra["info"] == rows[0]["info"]
    assert records[0].steps[1].state == rows[0]["response"]["output"][1]["content"]


def test_a_real_chat_has_one_decision_and_what_its_prompt_answered_is_history() -> None:
    path = shared_data("formats", "nemo_gym", "calendar.example_rollouts.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = [i["content"][0]["text"] for r in rows for i in r["response"]["output"] if i["type"] == "message"]
    thought = [i["summary"][0]["text"] for r in rows for i in r["response"]["output"] if i["type"] == "reasoning"]
    inputs = [r["responses_create_params"]["input"] for r in rows]
    assert sum(item["role"] == "assistant" for items in inputs for item in items) > 0
    records, rejects = read_file(path)
    assert not rejects
    assert counts(records) == (5, 5, 0, sorted([r["reward"] for r in rows] * 2), sum(map(len, texts)))
    assert [record.steps[0].reasoning for record in records] == thought
    assert [record.steps[0].state for record in records] == [items[-1]["content"] for items in inputs]
    assert [len(record.initial_messages or []) for record in records] == [len(items) for items in inputs]
    assert len({record.task_id for record in records}) == 5
    assert {record.policy for record in records} == {"Qwen/Qwen3-8B"}


# ---------------------------------------------------------------- decisions


def test_what_the_model_wrote_between_two_inputs_is_one_decision(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", row(THINK, CALL, RESULT, SAY))
    first, second = record.steps
    assert (first.reasoning, first.action) == ("Hm.", "")
    assert first.tool_calls == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert first.extra == {"signatures": ["x9"], "item_ids": ["rs"]}
    assert (second.state, second.state_role, second.action) == ("7", "tool", "It is 7.")
    assert second.context == [{"role": "tool", "tool_call_id": "c1", "content": "7"}]


def test_a_prompt_may_be_a_text_and_has_its_instructions_first(tmp_path: Path) -> None:
    value = row(SAY, prompt="What is f?")
    value["responses_create_params"]["instructions"] = "Be brief."
    assert read_one(tmp_path / "f.jsonl", value).initial_messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is f?"},
    ]


def test_items_for_training_carry_exact_tokens_and_end_their_call(tmp_path: Path) -> None:
    first = CALL | {
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 4],
        "generation_log_probs": [-0.5, -0.25],
    }
    second = SAY | {"prompt_token_ids": [1, 2, 3, 4, 5], "generation_token_ids": [6], "generation_log_probs": [-1.0]}
    record = read_one(tmp_path / "f.jsonl", row(THINK, first, RESULT, second))
    tokens = [step.tokens for step in record.steps if step.tokens]
    assert [(t.context_ids, t.action_ids, t.action_logprobs, t.prefix_step_index) for t in tokens] == [
        ([1, 2], [3, 4], [-0.5, -0.25], None),
        ([5], [6], [-1.0], 0),
    ]
    assert [t.temperature for t in tokens] == [0.5, 0.5], "of the request"
    twice = read_one(tmp_path / "f.jsonl", row(first, SAY))
    assert [bool(step.tokens) for step in twice.steps] == [True, False], "the second call comes right behind the first"


def test_what_stands_in_for_missing_tokens_is_no_decision_and_no_tokens(tmp_path: Path) -> None:
    stand_in = SAY | {"content": [{"type": "output_text", "text": ""}], "id": "msg_empty"}
    stand_in |= {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}
    (step,) = read_one(tmp_path / "f.jsonl", row(SAY, stand_in)).steps
    assert (step.action, step.tokens, step.extra) == ("It is 7.", None, None)


def test_rows_without_a_request_have_their_items_in_a_trajectory(tmp_path: Path) -> None:
    value = {"task_index": 48, "instance_id": "swe::a", "reward": 1.0, "agent_result": {"n_agent_steps": 2}}
    record = read_one(tmp_path / "f.jsonl", value | {"trajectory": {"model": "m", "output": [CALL, RESULT, SAY]}})
    assert (record.task_id, record.env_return, record.policy) == ("swe::a", 1.0, "m")
    assert [(step.state, step.action) for step in record.steps] == [("", ""), ("7", "It is 7.")]
    assert record.extra == {"task_index": 48, "agent_result": {"n_agent_steps": 2}}


def test_aviarys_histories_are_put_together(tmp_path: Path) -> None:
    """A list of items per step, each the history so far; hidden states of the environment keep their places."""
    observation = {"role": "user", "content": "Step 0.", "is_env_state": True}
    history = [ASK, observation, CALL, RESULT]
    hidden = [ASK, observation | {"content": "[hidden]"}, CALL, RESULT, SAY]
    record = read_one(tmp_path / "f.jsonl", row(history, hidden, task_idx=4))
    assert [(step.state, step.action) for step in record.steps] == [("What is f?\nStep 0.", ""), ("7", "It is 7.")]
    assert len(record.initial_messages or []) == 2
    assert record.task_id == "4"


def test_lists_of_the_items_of_each_step_are_read_one_behind_the_other(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", row([CALL, RESULT], [SAY]))
    assert [step.action for step in record.steps] == ["", "It is 7."]


def test_what_a_hosted_tool_did_stays_with_the_decision(tmp_path: Path) -> None:
    search = {"type": "web_search_call", "id": "ws", "status": "completed"}
    shell = {"type": "local_shell_call_output", "call_id": "c2", "output": "ok"}
    record = read_one(tmp_path / "f.jsonl", row(search, SAY, shell, SAY))
    assert record.steps[0].action == "It is 7."
    assert record.steps[0].extra is not None
    assert search in record.steps[0].extra["content"]
    assert (record.steps[1].state, record.steps[1].state_role) == ("ok", "tool")


# ---------------------------------------------------------------- fields


def test_tools_sampling_and_what_has_no_column(tmp_path: Path) -> None:
    record = read_one(
        tmp_path / "f.jsonl", row(SAY, response={"id": "r", "created_at": 5.0}, library_reward=0.5, level=3)
    )
    assert record.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    ]
    assert record.sampling == {"temperature": 0.5}
    assert [(score.scorer, score.value) for score in record.scores] == [("reward", 1.0), ("library_reward", 0.5)]
    assert record.extra == {"level": 3, "response": {"id": "r", "created_at": 5.0}}


def test_equal_requests_are_siblings(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f.jsonl", row(SAY), row(SAY, prompt="Other?"), row(CALL))
    assert [record.rollout_index for record in records] == [0, 0, 1]
    assert records[0].task_id == records[2].task_id != records[1].task_id


def test_a_sibling_number_that_is_taken_is_replaced_by_a_free_one(tmp_path: Path) -> None:
    rows = [row(SAY, _ng_task_index=2, _ng_rollout_index=number) for number in (1, 1, 0, None)]
    records, _ = read(tmp_path / "f.jsonl", *rows)
    assert [record.task_id for record in records] == ["2"] * 4
    assert sorted(record.rollout_index for record in records) == [0, 1, 2, 3]
    assert records[0].rollout_index == 1


@pytest.mark.parametrize(
    ("fields", "status", "terminated"),
    [
        ({"terminated": True, "truncated": False}, "completed", True),
        ({"terminated": False, "truncated": True}, "truncated", False),
        ({}, "completed", None),
        ({"response": {"incomplete_details": {"reason": "max_output_tokens"}}}, "truncated", False),
        ({"_ng_failure_class": "timeout"}, "failed", None),
        ({"response": {"error": {"message": "no"}}}, "failed", None),
    ],
)
def test_how_a_rollout_ended(tmp_path: Path, fields: dict[str, Any], status: str, terminated: bool | None) -> None:
    record = read_one(tmp_path / "f.jsonl", row(SAY, **fields))
    assert (record.status, record.terminated) == (status, terminated)
    assert (record.error is not None) is (status == "failed")
    if "incomplete_details" in str(fields):
        assert record.stop_reason == record.steps[-1].finish_reason == "max_output_tokens"


def test_nulls_are_absent(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", row(response={"usage": None, "error": None}, agent_ref=None, info=None))
    assert (record.agent_id, record.extra, record.status) == (None, None, "completed")


def test_a_reward_without_a_response_is_an_outcome(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", row() | {"response": None})
    assert (record.env_return, record.steps[0].trainable) == (1.0, False)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (row("hi"), "at `$.response.output[0]`"),
        (row({"content": "x"}), "`response.output[0].role` is None"),
        (row(SAY, reward="1"), "at `$.reward`"),
        (row(SAY, prompt=5), "at `$.responses_create_params.input`"),
        (row([SAY], SAY), "at `$[1]`"),
        ({"responses_create_params": {"input": "x"}, "response": None}, "no decision of an agent, and no outcome"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(tmp_path: Path, value: Any, says: str) -> None:
    records, (reject,) = read(tmp_path / "f.jsonl", row(SAY), value, row(SAY))
    assert (len(records), reject.position, reject.reason) == (2, 2, "invalid")
    assert says in reject.message


def test_damaged_lines_are_refused_and_the_others_are_read(tmp_path: Path) -> None:
    line = json.dumps(row(SAY)).encode()
    lines = (line, line.replace(b"1.0", b"NaN"), line.replace(b"It is", b"\xe9"), line, line[:80])
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(lines))
    records, rejects = read_file(tmp_path / "f.jsonl")
    assert len(records) == 2
    assert [(r.position, r.reason) for r in rejects] == [(2, "malformed"), (3, "malformed"), (5, "truncated")]


def test_no_wrong_type_and_no_missing_key_raises(tmp_path: Path) -> None:
    exact = CALL | {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    rows = [row(THINK, exact, RESULT, SAY, _ng_task_index=0, _ng_rollout_index=0, agent_ref={"name": "a"})]
    assert_never_raises(tmp_path / "f.jsonl", [*rows, row([ASK, CALL], [ASK, CALL, RESULT])], lines=True)


# ---------------------------------------------------------------- files next to the rollouts


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"responses_create_params": {"input": "x"}, "_ng_task_index": 0}], "requests of NeMo Gym without responses"),
        ([{"_ng_task_index": 0, "mean/reward": 0.5, "sample": {}}], "means of rewards by task"),
        ([{"_ng_task_index": 0, "rollout_id": "0-0", "verdict": "unobserved", "findings": []}], "verdicts on rollouts"),
    ],
)
def test_files_without_trajectories_say_what_to_read_instead(tmp_path: Path, rows: list[Any], says: str) -> None:
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(value) + "\n" for value in rows), "utf-8")
    with pytest.raises(FormatError, match=says) as caught:
        choose_format(tmp_path / "f.jsonl")
    assert "rollouts.jsonl" in str(caught.value)
