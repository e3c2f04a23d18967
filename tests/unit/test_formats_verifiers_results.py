"""verifiers results: what a row is, in each of the shapes that versions of the tool have written."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake.errors import FormatError
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "verifiers_results" / "results.jsonl"
SYSTEM = {"role": "system", "content": "Be short."}
ASK = {"role": "user", "content": "1 + 2?"}
CALL = {"id": "c1", "name": "add", "arguments": '{"a": 1}'}
CALLING = {"role": "assistant", "content": "", "tool_calls": [json.dumps(CALL)]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
ANSWER = {"role": "assistant", "content": "It is 3."}


def row(**fields: Any) -> dict[str, Any]:
    """A row of 0.1.14."""
    row: dict[str, Any] = {
        "example_id": 4,
        "prompt": [SYSTEM, ASK],
        "completion": [CALLING, RESULT, ANSWER],
        "reward": 1.5,
    }
    return row | {"metrics": {"right": 1.0}, "right": 1.0, "is_completed": True, "timing": {}} | fields


def call(prompt: list[Any], answer: Any, **fields: Any) -> dict[str, Any]:
    """A call of a trajectory."""
    response = {"id": "r", "model": "tiny", "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
    response["message"] = answer | {"finish_reason": "stop"}
    result_row: dict[str, Any] = {
        "prompt": prompt,
        "completion": [answer],
        "response": response,
        "tokens": None,
        "reward": 1.5,
    }
    return result_row | {"advantage": 0.0, "trajectory_id": "main", "extras": {}} | fields


def tokens(prompt: list[int], action: list[int], **fields: Any) -> dict[str, Any]:
    """The tokens of a call."""
    token_row: dict[str, Any] = {"prompt_ids": prompt, "prompt_mask": [0] * len(prompt), "completion_ids": action}
    token_row |= {"completion_mask": [1] * len(action), "completion_logprobs": [-0.5] * len(action)}
    return token_row | {"overlong_prompt": False, "is_truncated": False} | fields


def read(folder: Path, *rows: Any, metadata: Any = None) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Records and rejects of rows, or lines of text."""
    if metadata is not None:
        (folder / "metadata.json").write_text(metadata if isinstance(metadata, str) else json.dumps(metadata))
    path = folder / "results.jsonl"
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in rows))
    return read_file(path)


def only(folder: Path, metadata: Any = None, **fields: Any) -> EpisodeRecord:
    """The one record of a row."""
    (record,), rejects = read(folder, row(**fields), metadata=metadata)
    assert not rejects
    return record


# ---------------------------------------------------------------- real files


def test_a_real_file_gives_what_plain_counting_gives() -> None:
    path = shared_data("formats", "verifiers", "wordle--gpt-4.1-mini_816ec3b0", "results.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    messages = [message for line in rows for message in line["completion"] if message["role"] == "assistant"]
    rewards = [value for line in rows for key, value in line.items() if key == "reward" or key.endswith("_func")]
    records, rejects = read_file(path)
    assert not rejects
    expected = Counts(len(rows), len(messages), 0, sorted(rewards), sum(len(m["content"]) for m in messages))
    assert counts(records) == expected
    assert expected == Counts(15, 85, 0, sorted(rewards), 71007)
    assert [(r.task_id, r.rollout_index) for r in records] == [
        (str(line["example_id"]), index // 5) for index, line in enumerate(rows)
    ]


def test_a_real_file_takes_how_it_was_made_from_the_metadata_beside_it() -> None:
    path = shared_data("formats", "verifiers", "wordle--gpt-4.1-mini_816ec3b0", "results.jsonl")
    record = read_file(path)[0][0]
    assert (record.environment, record.policy, record.expected_group_size) == ("wordle", "gpt-4.1-mini", 3)
    assert record.ground_truth == "story"
    assert {score.scorer: score.value for score in record.scores} == {
        "check_answer_reward_func": 1.0,
        "partial_credit_reward_func": 0.0,
        "count_turns_reward_func": 0.2,
        "format_reward_func": 0.85,
    }
    assert record.env_return == 1.37
    with pytest.raises(FormatError, match=r"ingest the results\.jsonl"):
        choose_format(path.with_name("metadata.json"))


def test_what_0_1_14_writes_gives_what_plain_counting_gives() -> None:
    rows = [json.loads(line) for line in GOLDEN.read_text("utf-8").splitlines()]
    messages = [message for line in rows for message in line["completion"] if message["role"] == "assistant"]
    records, rejects = read_file(GOLDEN)
    assert not rejects
    assert counts(records) == Counts(
        episodes=4,
        decisions=len(messages),
        tool_calls=sum(len(message.get("tool_calls", ())) for message in messages),
        rewards=sorted(value for line in rows for value in (line["reward"], *line["metrics"].values())),
        characters=sum(len(message["content"]) for message in messages),
    )
    record = records[0]
    assert record.source_version == "0.1.14"
    assert record.tools is not None
    assert record.tools[0]["name"] == "get_weather"
    assert (record.status, record.terminated, record.stop_reason) == ("completed", True, "no_tools_called")
    assert (record.prompt_tokens, record.completion_tokens) == (22, 14)
    first = record.steps[0]
    assert first.tool_calls is not None
    assert first.tool_calls[0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (first.model, first.prompt_tokens, first.finish_reason) == ("tiny", 11, "tool_calls")
    assert first.started_at is not None
    assert first.reward is None, "the trajectory only repeats the return"


# ---------------------------------------------------------------- decisions


def test_assistant_messages_of_the_prompt_are_examples(tmp_path: Path) -> None:
    record = only(tmp_path, prompt=[SYSTEM, ASK, ANSWER, ASK])
    assert [step.action for step in record.steps] == ["", "It is 3."]
    assert record.initial_messages == [SYSTEM, ASK, ANSWER, ASK]


def test_a_completion_that_repeats_its_prompt_has_it_once(tmp_path: Path) -> None:
    record = only(tmp_path, prompt=[SYSTEM, ASK], completion=[SYSTEM, ASK | {"tool_calls": None}, ANSWER])
    assert record.initial_messages == [SYSTEM, ASK]
    assert [step.state for step in record.steps] == [ASK["content"]]


def test_tool_calls_are_objects_or_json_text_flat_or_nested(tmp_path: Path) -> None:
    nested = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    for tool_calls in (json.dumps(CALL), CALL, nested, json.dumps(nested)):
        step = only(tmp_path, completion=[CALLING | {"tool_calls": [tool_calls]}, RESULT, ANSWER]).steps[0]
        assert step.tool_calls == [nested]


def test_an_engine_without_chat_gives_texts(tmp_path: Path) -> None:
    record = only(tmp_path, prompt="1 + 2 =", completion=" 3")
    assert [(step.state, step.action) for step in record.steps] == [("1 + 2 =", " 3")]


@pytest.mark.parametrize("completion", [[], None, ""])
def test_a_row_without_completion_is_an_outcome(tmp_path: Path, completion: Any) -> None:
    record = only(tmp_path, completion=completion, reward=0.0)
    assert (record.env_return, [step.trainable for step in record.steps]) == (0.0, [False])


def test_a_row_without_completion_and_reward_is_rejected(tmp_path: Path) -> None:
    _, (reject,) = read(tmp_path, row(completion=[], reward=None, metrics={}))
    assert "no decision of an" in reject.message


def test_rows_of_0_1_5_have_an_id_and_columns_of_metrics(tmp_path: Path) -> None:
    old = {"id": 2, "prompt": [ASK], "completion": [ANSWER], "task": "default", "generation_ms": 1.5, "scoring_ms": 1.0}
    (record,), _ = read(tmp_path, old | {"total_ms": 2.5, "reward": 1.0, "right": 1.0, "len": 0.25})
    assert (record.task_id, record.env_return) == ("2", 1.0)
    assert [(score.scorer, score.value) for score in record.scores] == [("right", 1.0), ("len", 0.25)]
    assert record.extra == {"task": "default", "generation_ms": 1.5, "scoring_ms": 1.0, "total_ms": 2.5}


def test_columns_that_metadata_calls_state_are_no_scores(tmp_path: Path) -> None:
    record = only(tmp_path, {"state_columns": ["turn"]}, metrics=None, turn=3)
    assert [score.scorer for score in record.scores] == ["right"]
    assert record.extra == {"turn": 3}


def test_unknown_metrics_stay_unknown_and_others_are_kept(tmp_path: Path) -> None:
    record = only(tmp_path, metrics={"a": None, "pass@1": True, "verdict": "fine"}, right=None)
    assert [(s.scorer, s.value, s.metrics) for s in record.scores] == [
        ("a", None, None),
        ("pass_1", 1.0, None),
        ("verdict", None, {"value": "fine"}),
    ]


def test_rows_may_be_in_a_parquet_file(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_pylist([row(timing={"total": 1.0}), row(timing={"total": 1.0}, reward=0.5)]),
        tmp_path / "train-0.parquet",
    )
    records, rejects = read_file(tmp_path / "train-0.parquet")
    assert not rejects
    assert [(r.task_id, r.rollout_index, r.env_return, len(r.steps)) for r in records] == [
        ("4", 0, 1.5, 2),
        ("4", 1, 0.5, 2),
    ]
    assert records[0].steps[0].tool_calls is not None


def test_siblings_are_rows_of_an_example_in_any_order(tmp_path: Path) -> None:
    records, _ = read(tmp_path, row(), row(example_id="x"), row(), row(example_id=0), row(example_id="x"))
    assert [(r.task_id, r.rollout_index) for r in records] == [("4", 0), ("x", 0), ("4", 1), ("0", 0), ("x", 1)]


@pytest.mark.parametrize(
    ("fields", "status", "terminated", "error"),
    [
        ({"is_completed": None}, "completed", None, None),
        ({"is_truncated": True}, "truncated", False, None),
        ({"stop_condition": "max_turns_reached"}, "truncated", False, None),
        ({"is_completed": False}, "aborted", None, None),
        ({"error": "ValueError('x')"}, "failed", None, "ValueError('x')"),
        ({"error": {"error": "E", "error_chain_repr": "E(1)", "error_chain_str": "E: 1"}}, "failed", None, "E: 1"),
    ],
)
def test_how_a_rollout_ended(
    tmp_path: Path, fields: Any, status: str, terminated: bool | None, error: str | None
) -> None:
    record = only(tmp_path, **fields)
    assert (record.status, record.terminated, record.error) == (status, terminated, error)


# ---------------------------------------------------------------- trajectories


def test_tokens_of_a_trajectory_are_deltas(tmp_path: Path) -> None:
    trajectory = [
        call([SYSTEM, ASK], CALLING, tokens=tokens([1, 2], [3, 4])),
        call([SYSTEM, ASK, CALLING, RESULT], ANSWER, tokens=tokens([1, 2, 3, 4, 5], [6], completion_mask=[0])),
    ]
    record = only(tmp_path, trajectory=trajectory)
    first, second = (step.tokens for step in record.steps)
    assert first is not None
    assert second is not None
    assert (first.context_ids, first.action_ids, first.action_logprobs) == ([1, 2], [3, 4], [-0.5, -0.5])
    assert (second.context_ids, second.action_ids, second.prefix_step_index) == ([5], [6], 0)
    assert (first.action_mask, second.action_mask) == (None, [False])
    assert "trajectory" not in (record.extra or {})


def test_tokens_that_a_limit_has_cut_are_kept_and_are_not_exact(tmp_path: Path) -> None:
    cut = tokens([1, 2], [3], is_truncated=True)
    step = only(tmp_path, completion=[ANSWER], trajectory=[call([SYSTEM, ASK], ANSWER, tokens=cut)]).steps[0]
    assert step.tokens is None
    assert step.extra is not None
    assert step.extra["tokens"] == cut


def test_step_rewards_count_where_they_are_not_the_return_again(tmp_path: Path) -> None:
    calls = [call([ASK], CALLING, reward=0.5), call([ASK, CALLING, RESULT], ANSWER, reward=1.0)]
    assert [step.reward for step in only(tmp_path, trajectory=calls).steps] == [0.5, 1.0]
    calls = [call([ASK], CALLING), call([ASK, CALLING, RESULT], ANSWER, reward=None)]
    assert [step.reward for step in only(tmp_path, trajectory=calls).steps] == [None, None]


def test_where_the_history_was_rewritten_the_calls_are_the_decisions(tmp_path: Path) -> None:
    summary = {"role": "user", "content": "Summary: 1 + 2"}
    calls = [call([SYSTEM, ASK], CALLING), call([SYSTEM, summary], ANSWER)]
    record = only(tmp_path, completion=[ANSWER, ASK], trajectory=calls)
    assert [(step.state, step.action) for step in record.steps] == [("1 + 2?", ""), ("Summary: 1 + 2", "It is 3.")]
    assert record.steps[1].context == [SYSTEM, summary], "all of it is new"
    assert record.final_observation == [ASK]


def test_calls_of_a_sub_model_are_an_episode_of_its_own(tmp_path: Path) -> None:
    inner = {"is_sub_llm_call": True, "batch_id": "b", "request_id": "r", "parent_turn": 0}
    note = {"role": "assistant", "content": "one"}
    calls = [
        call([SYSTEM, ASK], CALLING),
        call([ASK], note, trajectory_id="b_r", extras=inner),
        call([ASK, note, ASK], note, trajectory_id="b_r", extras=inner),
        call([SYSTEM, ASK, CALLING, RESULT], ANSWER),
    ]
    (main, sub), _ = read(tmp_path, row(trajectory=calls))
    assert [step.action for step in main.steps] == ["", "It is 3."]
    assert [step.action for step in sub.steps] == ["one", "one"]
    assert (sub.relation, sub.parent_step_index, sub.agent_id) == ("subagent", 0, "sub_model_1")
    assert sub.parent_episode_id is not None
    assert sub.parent_episode_id == sub.root_episode_id
    assert [step.reward for step in sub.steps] == [None, None]
    assert sub.env_return is None


def test_branches_that_a_platform_stores_as_trajectory_are_kept(tmp_path: Path) -> None:
    branch = {"messages": [ASK, ANSWER], "num_input_tokens": 1}
    record = only(tmp_path, trajectory=[branch])
    assert len(record.steps) == 2
    assert record.extra == {"trajectory": [branch]}


# ---------------------------------------------------------------- damage, and other files of the tool


def test_a_damaged_metadata_file_loses_no_row(tmp_path: Path) -> None:
    record = only(tmp_path, '{"model": "ti')
    assert record.policy is None
    assert "metadata.json" in (record.extra or {})["metadata_fault"]


def test_averages_and_keys_of_the_metadata_are_left_out(tmp_path: Path) -> None:
    about = {"env_id": "toy", "model": "m", "avg_reward": 1.0, "time": 3.0, "env_args": {"api_key": "s", "n": 2}}
    record = only(tmp_path, about | {"sampling_args": {"temperature": 0.5, "api_key": "s"}})
    assert record.extra == {"metadata": {"env_args": {"n": 2}}}
    assert record.sampling == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        (json.dumps(row())[:-30], "malformed", "not JSON"),
        (json.dumps(row(reward=0.125)).replace("0.125", "NaN"), "malformed", "NaN"),
        ([], "invalid", "Expected `object`"),
        ({"example_id": 1}, "invalid", "missing required field `prompt`"),
        (row(example_id=None), "invalid", "`example_id` is null"),
        (row(example_id=1.5), "invalid", "`$.example_id`"),
        (row(reward="1"), "invalid", "`$.reward`"),
        (row(prompt={}), "invalid", "`$.prompt`"),
        (row(completion=["hi"]), "invalid", "`completion[0]` is str"),
        (row(completion=[{"content": "x"}]), "invalid", "`chat[2].role` is None"),
        (row(completion=[CALLING | {"tool_calls": {}}]), "invalid", "`completion[0].tool_calls` is dict"),
        (row(completion=[CALLING | {"tool_calls": ["{"]}]), "invalid", "`completion[0].tool_calls[0]` is not JSON"),
        (row(completion=[CALLING | {"tool_calls": [{"id": "c"}]}]), "invalid", "has no `name`"),
        (row(metrics=[1]), "invalid", "`$.metrics`"),
        (
            row(
                completion=[ANSWER],
                trajectory=[call([ASK], ANSWER, tokens=tokens([1], [2], completion_logprobs=[-1, -2]))],
            ),
            "invalid",
            "has 2 entries for 1 completion ids",
        ),
        (row(completion=[ANSWER], trajectory=[call([ASK], ANSWER, tokens=[1])]), "invalid", "tokens` is list"),
    ],
)
def test_a_row_of_the_wrong_shape_is_rejected_and_the_others_are_read(
    tmp_path: Path, bad: Any, reason: str, says: str
) -> None:
    records, (reject,) = read(tmp_path, row(), bad, row())
    assert [record.rollout_index for record in records] in ([0, 1], [0, 2])
    assert (reject.position, reject.reason) == (2, reason)
    assert says in reject.message


def test_a_last_line_that_is_cut_is_a_reject(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    text = json.dumps(row())
    path.write_text(f"{text}\n{text[:-9]}")
    records, (reject,) = read_file(path)
    assert (len(records), reject.position, reject.reason) == (1, 2, "truncated")


def test_a_file_of_one_line_that_is_cut_has_its_reject_at_line_1(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(row())[:-9])
    records, (reject,) = read_file(path)
    assert (records, reject.position, reject.reason) == ([], 1, "truncated")


def test_lines_in_another_encoding_are_rejected_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    odd = json.dumps(row(answer="ü"), ensure_ascii=False)
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(row()).encode() + b"\n" + odd.encode("latin-1") + b"\n" + odd.encode()
    )
    records, (reject,) = read_file(path)
    assert [record.ground_truth for record in records] == [None, "ü"]
    assert (reject.position, reject.reason) == (2, "malformed")


def test_nothing_in_a_row_makes_it_raise(tmp_path: Path) -> None:
    full = row(
        trajectory=[call([SYSTEM, ASK], CALLING, tokens=tokens([1], [2])), call([ASK], ANSWER, extras={"x": 1})],
        token_usage={"input_tokens": 1.0},
        timing={"start_time": 1.0, "generation": {"start": 1.0}, "model": {"spans": [{"start": 1.0, "end": 2.0}] * 2}},
        error={"error": "x"},
        info="{}",
        tool_defs=[{"name": "add"}],
    )
    assert_never_raises(tmp_path / "results.jsonl", [full, row()], lines=True)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"task_key": "k", "mode": "all", "reason": "valid", "valid": True}, "no agent ran"),
        ({"example_id": 0, "reward": 1.0, "info": {"candidate_idx": 0}}, "prompt optimisation"),
    ],
)
def test_other_results_of_the_tool_are_no_rollouts(tmp_path: Path, document: Any, says: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(document) + "\n")
    with pytest.raises(FormatError, match=says):
        choose_format(path)


def test_the_files_are_recognised(tmp_path: Path) -> None:
    read(tmp_path, row())
    assert [choose_format(path).name for path in (GOLDEN, tmp_path / "results.jsonl")] == ["verifiers_results"] * 2
