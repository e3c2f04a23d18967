"""eval-protocol: rows of 2025 and of today, the log that its tool writes, playback files, tokens, and damaged files."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake.errors import FormatError
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.eval_protocol_files import (
    CALL,
    CHAT,
    END,
    MOVED,
    SYSTEM,
    THERE,
    USER,
    add_to_log,
    lp01,
    pti1,
    pti_json,
    row,
    status,
    write_closed_log,
    write_log,
)
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import CHECKOUT, shared_data

GOLDEN = CHECKOUT / "tests" / "golden" / "formats" / "eval_protocol"


def read(path: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in rows), "utf-8")
    return read_file(path)


def only(tmp_path: Path, *args: Any, **fields: Any) -> EpisodeRecord:
    (record,), rejects = read(tmp_path / "rows.jsonl", row(*args, **fields))
    assert rejects == []
    return record


# ---------------------------------------------------------------- real files


def test_a_real_file_of_2025_is_read_whole() -> None:
    path = shared_data("formats", "eval_protocol", "datasets_2025-08-05.jsonl")
    (line,) = path.read_text("utf-8").splitlines()
    value = json.loads(line)
    spoken = [message for message in value["messages"] if message["role"] == "assistant"]
    texts = [message["content"] or "" for message in spoken]
    records, rejects = read_file(path)
    assert rejects == []
    calls = sum(len(message["tool_calls"]) for message in spoken)
    assert counts(records) == Counts(1, len(spoken), calls, [], sum(map(len, texts)))
    (record,) = records
    assert (record.task_id, record.run_id, record.status) == (value["input_metadata"]["row_id"], None, "completed")
    assert len(record.initial_messages or ()) == 2


@pytest.mark.parametrize("name", ["rows.jsonl", "logs.db"])
def test_files_that_the_tool_itself_wrote_are_read_whole(name: str) -> None:
    """Made by tests/golden/formats/make_eval_protocol.py."""
    path = GOLDEN / name
    if name.endswith(".db"):
        with sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True) as db:
            rows = [json.loads(data) for (data,) in db.execute("SELECT data FROM evaluationrow ORDER BY id")]
    else:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    spoken = [m for value in rows for m in value["messages"] if m["role"] == "assistant"]
    rewards = []
    for value in rows:
        steps = [m["control_plane_step"]["reward"] for m in value["messages"] if m.get("control_plane_step")]
        result = value.get("evaluation_result") or {}
        outputs = [output["base_reward"] for output in result.get("step_outputs") or []]
        scores_given = [metric["score"] for metric in (result.get("metrics") or {}).values()]
        rewards += [
            *steps,
            *([sum(steps)] if steps else []),
            *([result["score"]] if result else []),
            *outputs,
            *scores_given,
        ]
    records, rejects = read_file(path)
    assert rejects == []
    calls = sum(len(message.get("tool_calls") or []) for message in spoken)
    characters = sum(len(message.get("content") or "") for message in spoken)
    assert counts(records) == Counts(len(rows), len(spoken), calls, sorted(rewards), characters)
    assert len({record.task_id for record in records}) == 2
    assert {record.status for record in records} == {"completed", "failed"}
    assert any(step.tokens for record in records for step in record.steps)


# ---------------------------------------------------------------- a row


def test_a_row_is_an_episode_of_its_task(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert (record.task_id, record.run_id, record.environment, record.policy) == ("row-a", "exp-1", "test_lake", "m-1")
    assert record.sampling == {"temperature": 0.5}
    assert (record.prompt_tokens, record.completion_tokens, record.cost, record.seed) == (100, 20, 0.3, 42)
    assert (record.status, record.terminated, record.stop_reason) == ("completed", True, "stop")
    assert (record.ground_truth, record.expected_group_size) == ({"goal": "there"}, 2)
    assert [step.action for step in record.steps] == ["", "", "I am there."]
    assert (record.steps[-1].reasoning, record.steps[-1].finish_reason) == ("Done.", "stop")
    assert "hidden" not in json.dumps(record.extra)
    metadata = (record.extra or {})["execution_metadata"]
    assert (metadata["invocation_id"], metadata["run_id"], metadata["rollout_duration_seconds"]) == (
        "inv-1",
        "run-1",
        2.5,
    )


def test_runs_of_an_experiment_repeat_its_tasks(tmp_path: Path) -> None:
    """Each repetition is a run to the tool; to a lake they are siblings."""
    first, second = row(rollout="r-1", run="run-1"), row(rollout="r-2", run="run-2")
    (first_record, two), _ = read(tmp_path / "a.jsonl", first, second)
    assert (first_record.run_id, first_record.task_id) == (two.run_id, two.task_id)
    assert first_record.rollout_index != two.rollout_index
    (again, _), _ = read(tmp_path / "b.jsonl", second, first)
    assert again.rollout_index == two.rollout_index, "the number is the rollout's, wherever it stands"


def test_ids_that_no_evaluation_gave_name_no_run(tmp_path: Path) -> None:
    assert only(tmp_path, run=None).run_id is None


def test_a_row_without_an_id_is_called_by_what_was_asked(tmp_path: Path) -> None:
    bare = [row(input_metadata={}, execution_metadata={}), row([*CHAT[:-1], END | {"content": "?"}], input_metadata={})]
    (first_record, two), _ = read(tmp_path / "a.jsonl", *bare)
    assert first_record.task_id == two.task_id
    (other_record,), _ = read(tmp_path / "b.jsonl", row([USER | {"content": "Else?"}, END], input_metadata={}))
    assert other_record.task_id != first_record.task_id


def test_a_call_in_the_form_of_old_and_a_message_that_is_not_trained_on(tmp_path: Path) -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "go", "arguments": "{}"}, "weight": 0}
    first, second = only(tmp_path, [USER, old, USER, END | {"weight": 1}]).steps
    assert first.tool_calls == [{"type": "function", "function": {"name": "go", "arguments": "{}"}}]
    assert (first.trainable, second.trainable) == (False, True)
    assert first.extra is second.extra is None


# ---------------------------------------------------------------- rewards and scores


def test_the_control_plane_rewards_the_decision_before_it(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert [step.reward for step in record.steps] == [0.25, 1.0, None]
    assert record.env_return == 1.25
    messages = [USER, CALL | {"control_plane_step": {"reward": 1}}, MOVED, END]
    record = only(tmp_path, messages)
    assert [step.reward for step in record.steps] == [1.25, None]


def test_without_a_control_plane_there_is_no_return(tmp_path: Path) -> None:
    record = only(tmp_path, [USER, END])
    assert record.env_return is None
    assert record.steps[0].reward is None


def test_rewards_of_openenv_rollouts_are_the_environments(tmp_path: Path) -> None:
    meta = row()["execution_metadata"] | {"extra": {"step_rewards": [0.0, 2.0]}}
    record = only(tmp_path, [USER, END, USER, END], execution_metadata=meta)
    assert [step.reward for step in record.steps] == [0.0, 2.0]
    assert record.env_return == 2.0
    assert "extra" not in (record.extra or {})["execution_metadata"]
    record = only(tmp_path, [USER, END], execution_metadata=meta)
    assert (record.steps[0].reward, record.env_return) == (None, 2.0)
    assert (record.extra or {})["execution_metadata"]["extra"] == {"step_rewards": [0.0, 2.0]}


def test_an_evaluation_is_scores(tmp_path: Path) -> None:
    record = only(tmp_path)
    scores = [(score.scorer, score.step_index, score.value, score.reason) for score in record.scores]
    assert scores == [
        ("test_lake", None, 0.75, "It got there."),
        ("speed", None, 0.5, "Slow."),
        ("test_lake", 0, 0.1, None),
        ("test_lake", 2, 0.9, "End."),
    ]
    assert [score.metrics for score in record.scores] == [
        {"agg_score": 0.6},
        {"moves": 2},
        None,
        {"terminated": True, "metrics": {"end": 1}},
    ]
    evaluation = (record.extra or {})["evaluation_result"]
    assert evaluation == {"step_outputs": [{"step_index": "after", "base_reward": 0.3}]}


def test_a_score_that_is_not_valid_is_none(tmp_path: Path) -> None:
    result = {"score": 0.0, "is_score_valid": False, "error": "It broke.", "metrics": {"old": 1.0}}
    scores_new, old = only(tmp_path, evaluation_result=result, eval_metadata=None).scores
    assert (scores_new.scorer, scores_new.value, scores_new.error) == ("evaluation_result", None, "It broke.")
    assert scores_new.metrics == {"is_score_valid": False, "score": 0.0}
    assert (old.scorer, old.value) == ("old", 1.0)


def test_a_rollout_without_an_answer_counts_if_it_was_scored(tmp_path: Path) -> None:
    unscored = row([SYSTEM, USER], evaluation_result=None)
    (record,), (reject,) = read(tmp_path / "a.jsonl", row([SYSTEM, USER], rollout="x"), unscored)
    assert record.steps[0].trainable is False
    assert record.scores[0].value == 0.75
    assert (reject.position, reject.reason) == (2, "invalid")
    assert "no decision" in reject.message


@pytest.mark.parametrize(
    ("status_given", "how", "terminated", "reason"),
    [
        (status(100, "done", "stop"), "completed", True, "stop"),
        (status(100, "done", "max_steps"), "truncated", False, "max_steps"),
        (status(100, "done", "TerminationReason.LENGTH"), "truncated", False, "length"),
        (status(100, "done", "non_skippable_error", "Boom."), "failed", None, "non_skippable_error"),
        (status(13, "Boom."), "failed", None, None),
        (status(1, "Boom."), "aborted", None, None),
        (status(4, "Boom."), "truncated", None, None),
        ({"status": "finished"}, "completed", None, None),
        ({"status": "error", "error_message": "Boom."}, "failed", None, None),
        ({"status": "stopped", "termination_reason": "user_stop"}, "aborted", True, "user_stop"),
        (None, "completed", None, None),
    ],
)
def test_how_a_rollout_ended(
    tmp_path: Path, status_given: Any, how: str, terminated: bool | None, reason: str | None
) -> None:
    record = only(tmp_path, [USER, END], rollout_status=status_given)
    assert (record.status, record.terminated, record.stop_reason) == (how, terminated, reason)
    assert record.error == ("Boom." if "Boom." in json.dumps(status_given) else None)


def test_a_rollout_that_is_running_was_cut_off_unless_it_is_scored(tmp_path: Path) -> None:
    running = status(101, "Rollout is running")
    assert only(tmp_path, [USER, END], rollout_status=running, evaluation_result=None).status == "aborted"
    assert only(tmp_path, [USER, END], rollout_status=running).status == "completed"


# ---------------------------------------------------------------- tokens


def with_extra(**extra: Any) -> dict[str, Any]:
    return row()["execution_metadata"] | {"extra": extra}


def test_tokens_of_each_turn_are_exact_and_kept_once(tmp_path: Path) -> None:
    turns = [
        {"assistant_turn_index": 0, "prompt_token_ids": [1, 2], "completion_token_ids": [3], "routing_matrices": ["x"]},
        {
            "assistant_turn_index": 1,
            "prompt_token_ids": [1, 2, 3, 4],
            "completion_token_ids": [5, 6],
            "completion_logprobs": [-0.5, -0.25],
            "logprobs_metadata": {"token_count": 2},
        },
        {"assistant_turn_index": 9, "prompt_token_ids": [1], "completion_token_ids": [2]},
    ]
    logprobs = {"content": [{"logprob": -0.5, "token_id": 5}, {"logprob": -0.25, "token_id": 6}]}
    mirror = {key: turns[1][key] for key in ("prompt_token_ids", "completion_token_ids", "completion_logprobs")}
    meta = with_extra(assistant_turn_payloads=turns, run_index=1, **mirror)
    record = only(tmp_path, [USER, CALL, MOVED, END | {"logprobs": logprobs}], execution_metadata=meta)
    first, second = (step.tokens for step in record.steps)
    assert first is not None
    assert second is not None
    assert (first.context_ids, first.action_ids, first.prefix_step_index) == ([1, 2], [3], None)
    assert (second.context_ids, second.action_ids, second.prefix_step_index) == ([4], [5, 6], 0)
    assert second.action_logprobs == [-0.5, -0.25]
    assert [step.extra for step in record.steps] == [{"payload": {"routing_matrices": ["x"]}}, None]
    extra = (record.extra or {})["execution_metadata"]["extra"]
    assert extra == {"run_index": 1, "assistant_turn_payloads": [turns[2]]}


@pytest.mark.parametrize("prompt", [pti1([7, 8]), pti_json([7, 8])])
def test_payloads_of_the_gateway_are_unpacked(tmp_path: Path, prompt: str) -> None:
    payloads = {"logprobs": {"data": lp01([(9, -0.5), (10, 0.0)])}, "prompt_token_ids": {"data": prompt}}
    for value in (row([USER, END], payloads=payloads), row([USER, END | {"payloads": payloads}])):
        (record,), _ = read(tmp_path / "a.jsonl", value)
        tokens = record.steps[0].tokens
        assert tokens is not None
        assert (tokens.context_ids, tokens.action_ids, tokens.action_logprobs) == ([7, 8], [9, 10], [-0.5, 0.0])
        rest = {key: value for key, value in (record.extra or {}).items() if key != "as_read"}
        assert '"data"' not in json.dumps(rest)


@pytest.mark.parametrize(
    "logprobs",
    [lp01([(-1, -0.5)]), lp01([(3, -0.5)], version=2), "%%%", "aGk=", lp01([(3, -0.5)])[:-8], lp01([(3, 4.0)])],
)
def test_tokens_that_are_not_there_are_not_guessed(tmp_path: Path, logprobs: str) -> None:
    payloads = {"logprobs": {"data": logprobs}, "prompt_token_ids": {"data": pti1([1])}}
    record = only(tmp_path, [USER, END], payloads=payloads)
    assert record.steps[0].tokens is None
    assert (record.extra or {})["payloads"] == payloads


def test_the_tokens_of_one_turn_may_stand_elsewhere(tmp_path: Path) -> None:
    openenv = with_extra(prompt_ids=[1], completion_ids=[2, 3])
    raw = row()["execution_metadata"] | {
        "raw_output": {"prompt_token_ids": [1], "completion_token_ids": [2, 3], "prompt_fragments": ["a"]}
    }
    for meta in (openenv, raw):
        record = only(tmp_path, [USER, END], execution_metadata=meta)
        assert record.steps[0].tokens is not None
        assert record.steps[0].tokens.action_ids == [2, 3]
    assert (record.extra or {})["execution_metadata"]["raw_output"] == {"prompt_fragments": ["a"]}
    record = only(tmp_path, [USER, END, USER, END], execution_metadata=openenv)
    assert [step.tokens for step in record.steps] == [None, None], "nobody knows where a turn ends"
    assert (record.extra or {})["execution_metadata"]["extra"] == {"prompt_ids": [1], "completion_ids": [2, 3]}


# ---------------------------------------------------------------- the log


def test_a_log_is_read_while_its_tool_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    tool = write_log(path, [row(rollout=f"r-{n}") for n in range(3)])
    try:
        records, rejects = read_file(path)
        assert (len(records), rejects) == (3, [])
        add_to_log(tool, row(rollout="r-9"), "more")
        tool.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert len(read_file(path)[0]) == 4
    finally:
        tool.close()
    assert [path.name for path in tmp_path.iterdir()] == ["logs.db"]


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_reading_a_log_leaves_nothing_beside_it_and_locks_nobody_out(tmp_path: Path, journal: str) -> None:
    path = write_closed_log(tmp_path / "logs.db", [row(rollout=f"r-{n}") for n in range(3)], journal=journal)
    before = path.read_bytes()
    from lake.formats.registry import FORMATS

    items = FORMATS["eval_protocol"].read(path)
    next(items)
    with sqlite3.connect(path, timeout=0) as tool:
        add_to_log(tool, row(rollout="late"), "late")
    tool.close()
    assert len(list(items)) == 3, "what is written meanwhile is read too"
    path.write_bytes(before)
    assert len(read_file(path)[0]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["logs.db"]


def test_a_row_of_a_log_that_is_damaged_is_rejected_alone(tmp_path: Path) -> None:
    rows = [row(rollout="a"), "{not json", row(rollout="b"), json.dumps(row(messages="?")), row(rollout="c")]
    path = write_closed_log(tmp_path / "logs.db", rows)
    records, rejects = read_file(path)
    assert len(records) == 3
    assert [(reject.position, reject.reason) for reject in rejects] == [(1, "malformed"), (3, "invalid")]
    assert rejects[0].raw == "{not json"


def test_a_log_that_is_cut_is_recognised_and_said_to_be_so(tmp_path: Path) -> None:
    rows = [row(rollout=f"r-{n}", ground_truth="x" * 6000) for n in range(40)]
    path = write_closed_log(tmp_path / "logs.db", rows)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    records, (reject,) = read_file(path)
    assert records == []
    assert (reject.position, reject.reason) == (0, "truncated")


def test_rows_as_a_table_has_them_are_read_too(tmp_path: Path) -> None:
    table = [
        {"data_json": json.dumps(row(rollout=f"r-{n}")), "row_id": "row-a", "score": 0.75, "message_count": 7}
        for n in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    records, rejects = read_file(tmp_path / "rows.parquet")
    assert (len(records), rejects) == (2, [])
    (tmp_path / "rows.json").write_text(json.dumps([row(rollout=f"r-{n}") for n in range(2)]))
    assert len(read_file(tmp_path / "rows.json")[0]) == 2


# ---------------------------------------------------------------- playback


def line(index: int | str, step: int, messages: list[Any]) -> dict[str, Any]:
    return {"env_index": index, "step": step, "messages": messages}


def test_the_last_line_of_a_recording_is_all_of_it(tmp_path: Path) -> None:
    lines = [line(0, 0, CHAT[:4]), line("1", 0, CHAT[:4]), line(0, 1, CHAT[:6]), line(1, 1, [*CHAT[:6], END])]
    (first_record, two), rejects = read(tmp_path / "play.jsonl", *lines)
    assert rejects == []
    assert [(r.task_id, r.rollout_index, len(r.steps), r.env_return) for r in (first_record, two)] == [
        ("0", 0, 2, 1.25),
        ("1", 0, 3, 1.25),
    ]
    assert (first_record.terminated, first_record.stop_reason) == (True, "stop")
    assert first_record.final_observation == [THERE]


def test_rewards_of_recordings_of_2025_stand_in_the_metadata_of_tools(tmp_path: Path) -> None:
    messages = [
        {"role": "tool", "content": "?", "metadata": {"reward": r, "terminated": r < 0, "info": {}}} for r in (0.0, -1)
    ]
    (record,), _ = read(tmp_path / "p.jsonl", line(0, 0, [USER, CALL, messages[0], CALL, messages[1]]))
    assert [step.reward for step in record.steps] == [0.0, -1.0]
    assert (record.env_return, record.terminated) == (-1.0, True)


@pytest.mark.parametrize(
    "keys", [("user_prompt_template", "environment_context"), ("success_rate", "num_rollouts", "avg_score")]
)
def test_data_sets_and_sums_of_scores_say_what_they_are(tmp_path: Path, keys: tuple[str, ...]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")
    with pytest.raises(FormatError, match="ingest the rows"):
        choose_format(tmp_path / "a.jsonl")


def test_a_step_that_does_not_come_after_the_last_begins_the_next_recording(tmp_path: Path) -> None:
    lines = [line(0, 0, CHAT[:4]), line(0, 1, CHAT[:6]), line(0, 0, CHAT[:4])]
    records, _ = read(tmp_path / "play.jsonl", *lines)
    assert [(r.task_id, r.rollout_index, len(r.steps)) for r in records] == [("0", 0, 2), ("0", 1, 1)]


def test_a_damaged_line_of_a_recording_costs_only_what_it_added(tmp_path: Path) -> None:
    cut = json.dumps(line(0, 2, CHAT))[:-40]
    (record,), rejects = read(tmp_path / "p.jsonl", line(0, 0, CHAT[:4]), line(0, 1, [5]), line(0, 1, CHAT[:6]), cut)
    assert len(record.steps) == 2
    assert [(reject.position, reject.reason) for reject in rejects] == [(4, "malformed")]


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row(messages={}), "at `$.messages`"),
        (row([{"content": "no role"}]), "`messages[0].role` is None"),
        (row([USER, END | {"content": 5}]), "is int; valid: text"),
        (row(evaluation_result=[]), "at `$.evaluation_result`"),
        (row(tools={}), "at `$.tools`"),
        (17, "Expected `object`, got `int`"),
    ],
)
def test_a_wrong_row_is_rejected_and_the_others_are_read(tmp_path: Path, bad: Any, says: str) -> None:
    records, (reject,) = read(tmp_path / "a.jsonl", row(rollout="a"), bad, row(rollout="b"))
    assert len(records) == 2
    assert (reject.position, reject.reason) == (2, "invalid")
    assert says in reject.message


def test_a_last_line_that_is_cut_is_rejected_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = json.dumps(row()) + "\n" + json.dumps(row(rollout="b"))
    path.write_text(text[:-30])
    (record,), (reject,) = read_file(path)
    assert record.rollout_index
    assert (reject.position, reject.reason) == (2, "truncated")


def test_bytes_that_are_no_text_cost_their_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = json.dumps(row()).encode()
    path.write_bytes(data + b"\n" + data.replace(b"I am there", b"I \xff am there"))
    (_,), (reject,) = read_file(path)
    assert (reject.position, reject.reason) == (2, "malformed")


def test_what_a_newer_version_adds_is_kept(tmp_path: Path) -> None:
    record = only(tmp_path, a_new_key={"x": 1})
    assert (record.extra or {})["a_new_key"] == {"x": 1}


def test_no_file_makes_the_reader_raise(tmp_path: Path) -> None:
    assert_never_raises(tmp_path / "a.jsonl", [row()], lines=True)
    assert_never_raises(tmp_path / "p.jsonl", [line(0, 0, CHAT[:4]), line(0, 1, CHAT)], lines=True)
    payloads = {"logprobs": {"data": lp01([(9, -0.5)])}, "prompt_token_ids": {"data": pti1([1])}}
    turns = [{"assistant_turn_index": 0, "prompt_token_ids": [1], "completion_token_ids": [2]}]
    meta = with_extra(assistant_turn_payloads=turns, step_rewards=[1.0], payloads=payloads)
    value = {"messages": [USER, END], "input_metadata": {}, "execution_metadata": meta, "payloads": payloads}
    assert_never_raises(tmp_path / "t.jsonl", [value], lines=True)
