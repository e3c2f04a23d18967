"""agent-lightning 1.0: rollouts and their events, whole answers and streamed ones, attempts, rewards."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.base.fields import hash_rollout_index
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject, TokensRecord
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

ASK = {"role": "user", "content": "1 + 2?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def answer(message: Any, prompt_ids: list[int], ids: list[int], **fields: Any) -> dict[str, Any]:
    """A response as vLLM gives it."""
    logprobs = {"content": [{"token": "t", "logprob": -0.5} for _ in ids]}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids), "total_tokens": 9}
    event: dict[str, Any] = {
        "id": "r",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [choice],
        "usage": usage,
    }
    return event | {"prompt_token_ids": prompt_ids} | fields


def event(kind: str, data: Any, **fields: Any) -> dict[str, Any]:
    """An event."""
    return {"event_type": kind, "rollout_id": "ro", "attempt_id": "a", "timestamp": 1.5, "data": data} | fields


def request(messages: list[Any], response: Any, **fields: Any) -> dict[str, Any]:
    """A model request."""
    data = {"request": {"messages": messages, "model": "asked", "temperature": 0.5, "tools": [TOOL], "stream": False}}
    data |= {"response": response, "server": {"model": "tiny", "endpoint": "http://x/v1", "version": 3}}
    return event("model_request", data | {"latency_ms": 1500.0, "http_status": 200, "status": "ok"} | fields)


FIRST = request([ASK], answer(CALLING, [1, 2], [3, 4]))
SECOND = request([ASK, CALLING, RESULT], answer({"role": "assistant", "content": "It is 3."}, [1, 2, 3, 4, 5], [6]))
REWARD = event("reward", {"value": 1.0, "reason": "right", "source": "agent"})


def archive(*events: Any, **fields: Any) -> dict[str, Any]:
    """A line with the nested status of 1.0."""
    status: dict[str, Any] = {"state": "succeeded", "last_attempt_id": "a", "error_message": None, "version": 3}
    status |= {"created_at": 1_750_000_000.0, "updated_at": 1_750_000_009.0}
    rollout = {"rollout_id": "ro", "input": {"question": "1 + 2?", "answer": "3"}, "is_train": True, "config": {}}
    rollout |= {"metadata": {"batch_idx": 2, "sample_idx_in_batch": 0}, "status": status} | fields
    return {"rollout": rollout, "events": list(events or (FIRST, SECOND, REWARD)), "resources": None}


def read(folder: Path, *lines: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Records and rejects of lines."""
    path = folder / "archive.jsonl"
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in lines))
    assert choose_format(path).name == "agent_lightning"
    return read_file(path)


def only(folder: Path, *lines: Any) -> EpisodeRecord:
    """The one record of lines without rejects."""
    (record,), rejects = read(folder, *lines)
    assert not rejects
    return record


# ---------------------------------------------------------------- real files


def test_a_real_archive_gives_what_plain_counting_gives() -> None:
    path = shared_data("formats", "agent_lightning", "v1_archive_20260407.jsonl")
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    events = [event for line in lines for event in line["events"]]
    choices = [e["data"]["response"]["choices"][0] for e in events if e["event_type"] == "model_request"]
    rewards = [e["data"]["value"] for e in events if e["event_type"] == "reward"]
    records, rejects = read_file(path)
    assert not rejects
    length = sum(len(choice["message"]["content"]) for choice in choices)
    assert counts(records) == Counts(len(lines), len(choices), 0, sorted(rewards * 2), length)
    assert counts(records)[:3] == (5, 5, 0)
    for record, choice, line in zip(records, choices, lines, strict=True):
        tokens = record.steps[0].tokens
        assert tokens is not None
        assert tokens.action_ids == choice["token_ids"]
        assert (tokens.policy_version, record.policy_version, record.collection_round) == (1, 1, 1)
        assert record.ground_truth == line["rollout"]["input"]["answer"]
        assert (record.status, record.policy) == ("completed", "Qwen/Qwen2.5-1.5B-Instruct")
        assert (record.extra or {})["events"][0]["data"]["answer"] is not None
    assert len({record.task_id for record in records}) == 5


# ---------------------------------------------------------------- decisions


def test_a_request_is_a_decision_and_what_is_new_in_it_the_state(tmp_path: Path) -> None:
    first, second = only(tmp_path, archive()).steps
    assert [(step.state, step.action) for step in (first, second)] == [("1 + 2?", ""), ("3", "It is 3.")]
    assert first.tool_calls == [CALL]
    assert second.context == [RESULT]
    assert (first.model, first.policy_version, first.latency, first.finish_reason) == ("tiny", 3, 1.5, "stop")
    assert (second.prompt_tokens, second.completion_tokens) == (5, 1)


def test_tokens_are_deltas_with_what_the_engine_said(tmp_path: Path) -> None:
    first, second = (step.tokens for step in only(tmp_path, archive()).steps)
    common: dict[str, Any] = {"policy_version": 3, "temperature": 0.5}
    assert first == TokensRecord(
        context_ids=[1, 2], action_ids=[3, 4], action_logprobs=[-0.5, -0.5], prefix_step_index=None, **common
    )
    assert second == TokensRecord(
        context_ids=[5], action_ids=[6], action_logprobs=[-0.5], prefix_step_index=0, **common
    )


def test_the_chunks_of_a_stream_are_one_answer(tmp_path: Path) -> None:
    """As archives of April 2026 have them: the prompt's ids in the first chunk, each token in its own."""

    def chunk(delta: Any, **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | fields.pop("choice", {})
        return {"id": "r", "object": "chat.completion.chunk", "model": "tiny", "choices": [choice]} | fields

    logprob = {"logprobs": {"content": [{"token": "t", "logprob": -0.25}]}}
    name = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
    chunks = [
        chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2]),
        chunk({"reasoning_content": "Hm"}, choice={"token_ids": [3]} | logprob),
        chunk({"content": "It"}, choice={"token_ids": [4]} | logprob),
        chunk(
            {"content": " is"},
            choice={"token_ids": [5, 6]} | {"logprobs": {"content": logprob["logprobs"]["content"] * 2}},
        ),
        chunk({"tool_calls": [name]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}, choice={"finish_reason": "tool_calls"}),
        {
            "id": "r",
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": {"prompt_tokens": 2, "completion_tokens": 4},
        },
    ]
    step = only(tmp_path, archive(request([ASK], chunks))).steps[0]
    assert (step.action, step.reasoning, step.finish_reason) == ("It is", "Hm", "tool_calls")
    assert step.tool_calls == [CALL]
    assert (step.prompt_tokens, step.completion_tokens) == (2, 4)
    assert step.tokens is not None
    assert (step.tokens.context_ids, step.tokens.action_ids) == ([1, 2], [3, 4, 5, 6])
    assert step.tokens.action_logprobs == [-0.25] * 4


def test_a_completion_of_text_is_one_too(tmp_path: Path) -> None:
    choice = {"index": 0, "text": " 3", "token_ids": [4], "prompt_token_ids": [1], "logprobs": {"token_logprobs": [-1]}}
    call_event = request([], {"model": "tiny", "choices": [choice]})
    call_event["data"]["request"] = {"prompt": "1 + 2 =", "model": "tiny"}
    step = only(tmp_path, archive(call_event)).steps[0]
    assert (step.state, step.action) == ("1 + 2 =", " 3")
    assert step.tokens is not None
    assert (step.tokens.context_ids, step.tokens.action_logprobs) == ([1], [-1.0])


def test_a_request_without_settings_does_not_have_those_of_another(tmp_path: Path) -> None:
    bare = json.loads(json.dumps(SECOND))
    bare["data"]["request"].pop("temperature")
    record = only(tmp_path, archive(FIRST, bare))
    assert [step.tokens and step.tokens.temperature for step in record.steps] == [0.5, None]


def test_requests_that_failed_are_no_decisions(tmp_path: Path) -> None:
    failed = request([ASK], {"error": {"message": "overloaded"}}, http_status=500, status="error")
    record = only(tmp_path, archive(failed, FIRST, REWARD))
    assert len(record.steps) == 1
    assert [r["http_status"] for r in (record.extra or {})["failed_requests"]] == [500]


def test_an_answer_sampled_twice_is_two_decisions(tmp_path: Path) -> None:
    record = only(tmp_path, archive(FIRST, FIRST))
    assert [step.state for step in record.steps] == ["1 + 2?", "1 + 2?"]
    assert [step.tokens.prefix_step_index for step in record.steps if step.tokens] == [None, None]


def test_a_history_that_was_cut_opens_a_new_conversation(tmp_path: Path) -> None:
    summary = {"role": "user", "content": "So far: 3"}
    record = only(
        tmp_path, archive(FIRST, request([summary], answer({"role": "assistant", "content": "ok"}, [9], [8])))
    )
    assert (record.steps[1].state, record.steps[1].context) == ("So far: 3", [summary])
    assert record.steps[1].tokens is not None
    assert record.steps[1].tokens.prefix_step_index is None


def test_other_choices_and_settings_are_kept(tmp_path: Path) -> None:
    answer_event = answer({"role": "assistant", "content": "a"}, [1], [2])
    answer_event["choices"].append({"index": 1, "message": {"role": "assistant", "content": "b"}})
    record = only(tmp_path, archive(request([ASK], answer_event, retry_count=2)))
    assert (record.sampling, record.tools) == ({"temperature": 0.5}, [TOOL])
    assert record.steps[0].extra is not None
    assert record.steps[0].extra["choices"][0]["message"]["content"] == "b"
    assert record.steps[0].extra["retry_count"] == 2


def test_events_as_triplets_have_tokens_and_no_text(tmp_path: Path) -> None:
    data = {"prompt_token_ids": [1], "response_token_ids": [2], "response_log_probs": [-1.0], "server": {"version": 4}}
    record = only(tmp_path, event("model_request", data), REWARD)
    (step,) = record.steps
    assert (step.state, step.action, step.policy_version) == (None, "", 4)
    assert step.tokens is not None
    assert (step.tokens.context_ids, step.tokens.action_logprobs) == ([1], [-1.0])


# ---------------------------------------------------------------- rollouts


def test_a_rollout_of_0_1_is_its_triplets_and_its_reward(tmp_path: Path) -> None:
    triplets = [
        {"prompt": {"token_ids": [1, 2]}, "response": {"token_ids": [3]}, "reward": None, "metadata": {"agent": "a"}},
        {"prompt": {"token_ids": [1, 2, 3, 4]}, "response": {"token_ids": [5]}, "reward": 0.5, "metadata": {}},
    ]
    task = {"rollout_id": "r", "input": {"task_id": "t"}, "mode": "train", "resources_id": "x"}
    line = {"rollout_id": "r", "task": task, "final_reward": 0.5, "triplets": triplets, "trace": None, "logs": ["l"]}
    record = only(tmp_path, line)
    assert (record.task_id, record.split, record.env_return) == ("t", "train", 0.5)
    assert [score.value for score in record.scores] == [0.5]
    assert [step.tokens and (step.tokens.context_ids, step.tokens.action_ids) for step in record.steps] == [
        ([1, 2], [3]),
        ([4], [5]),
    ]
    assert record.extra is not None
    assert (record.extra["logs"], record.extra["triplets"]) == (["l"], [{"agent": "a"}, {}])


def test_what_a_rollout_says_of_its_attempt(tmp_path: Path) -> None:
    record = only(tmp_path, archive(config={"timeout_seconds": 5}))
    assert (record.split, record.collection_round, record.ground_truth) == ("train", 2, "3")
    assert (record.status, record.terminated, record.stop_reason) == ("completed", True, "succeeded")
    assert (record.rollout_index, record.policy, record.policy_version) == (hash_rollout_index("ro"), "tiny", 3)
    assert record.started_at is not None
    assert record.ended_at is not None
    assert (record.ended_at - record.started_at).total_seconds() == 9
    assert (record.extra or {})["rollout"]["config"] == {"timeout_seconds": 5}


def test_status_may_be_flat(tmp_path: Path) -> None:
    flat = archive(status="failed", error_message="boom", created_at=1_750_000_000.0, succeeded_attempt_id=None)
    record = only(tmp_path, flat)
    assert (record.status, record.error, record.stop_reason) == ("failed", "boom", "failed")


@pytest.mark.parametrize(
    ("state", "status"), [("running", "aborted"), ("cancelled", "aborted"), ("timeout", "truncated")]
)
def test_a_rollout_that_did_not_end_says_so(tmp_path: Path, state: str, status: str) -> None:
    assert only(tmp_path, archive(status={"state": state})).status == status


def test_siblings_have_the_same_input(tmp_path: Path) -> None:
    same = archive(rollout_id="r2")
    other_archive = archive(rollout_id="r3", input={"question": "2 + 2?"})
    named = archive(rollout_id="r4", input={"data_id": "d7"})
    first, second, third, fourth = read(tmp_path, archive(), same, other_archive, named)[0]
    assert first.task_id == second.task_id != third.task_id
    assert fourth.task_id == "d7"
    assert first.rollout_index != second.rollout_index


def test_a_trial_inside_a_batch_is_the_siblings_number(tmp_path: Path) -> None:
    assert only(tmp_path, archive(metadata={"batch_idx": 1, "trial_idx_in_group": 5})).rollout_index == 5
    assert only(tmp_path, archive(metadata={"trial_idx_in_group": 5})).rollout_index == hash_rollout_index("ro")


def test_attempts_are_episodes_and_the_last_one_is_the_rollouts(tmp_path: Path) -> None:
    early = [FIRST | {"attempt_id": "b"}, event("log", {"x": 1}, attempt_id="c")]
    first, second = read(tmp_path, archive(FIRST, REWARD, *early))[0]
    assert [(r.attempt, (r.extra or {})["attempt_id"], r.status) for r in (first, second)] == [
        (0, "b", "failed"),
        (1, "a", "completed"),
    ]
    assert (second.relation, second.env_return, first.env_return) == ("retry", 1.0, None)
    assert list((second.extra or {})["attempts_without_answer"]) == ["c"]


def test_events_may_stand_by_attempt(tmp_path: Path) -> None:
    bare = [{key: item for key, item in event.items() if key != "attempt_id"} for event in (FIRST, REWARD)]
    line = archive() | {"events": {"x": [bare[0]], "a": bare}}
    assert [(r.extra or {})["attempt_id"] for r in read(tmp_path, line)[0]] == ["x", "a"]


def test_the_last_reward_is_the_return_and_all_are_scores(tmp_path: Path) -> None:
    rewards = [event("reward", {"value": value, "message": "m"}) for value in (0.25, True, None, "good")]
    record = only(tmp_path, archive(FIRST, *rewards))
    assert record.env_return == 1.0
    assert [(s.scorer, s.value, s.reason) for s in record.scores] == [
        ("reward", 0.25, "m"),
        ("reward#2", 1.0, "m"),
        ("reward#3", None, "m"),
        ("reward#4", None, "m"),
    ]
    assert record.scores[3].metrics == {"value": "good"}


def test_keys_are_left_out(tmp_path: Path) -> None:
    env = [
        {"name": "OPENAI_API_KEY", "value": "sk-1"},
        {"name": "HF_TOKEN", "value": "sk-2"},
        {"name": "N", "value": "5"},
    ]
    line = archive(config={"pod": {"env": env}, "api_key": "sk-3"})
    line["resources"] = {"main": {"model": "tiny", "api_key": "sk-4"}}
    call_event = request([ASK], answer({"role": "assistant", "content": "a"}, [1], [2]))
    call_event["data"]["request"] |= {"api_key": "sk-5", "extra_headers": {"Authorization": "sk-6"}}
    line["events"] = [call_event, request([ASK], {}, status="error", api_key="sk-7")]
    record = only(tmp_path, line)
    assert "sk-" not in str(record)
    assert (record.extra or {})["resources"] == {"main": {"model": "tiny"}}
    assert {"name": "N", "value": "5"} in (record.extra or {})["rollout"]["config"]["pod"]["env"]


# ---------------------------------------------------------------- events alone


def test_events_alone_are_grouped_by_rollout_wherever_they_stand(tmp_path: Path) -> None:
    other_events = [event | {"rollout_id": "other"} for event in (FIRST, REWARD)]
    records, rejects = read(tmp_path, FIRST, other_events[0], SECOND, REWARD, other_events[1])
    assert not rejects
    assert [(r.task_id, len(r.steps), r.env_return, r.status) for r in records] == [
        ("ro", 2, 1.0, "completed"),
        ("other", 1, 1.0, "completed"),
    ]


def test_events_may_be_an_array(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_text(json.dumps([FIRST, SECOND, REWARD]))
    (record,), _ = read_file(path)
    assert (len(record.steps), record.env_return) == (2, 1.0)


def test_an_event_that_is_damaged_is_rejected_and_the_others_are_the_episode(tmp_path: Path) -> None:
    bad = request([ASK], {"choices": [{"message": {"content": "x"}, "token_ids": ["1"]}]})
    (record,), rejects = read(tmp_path, FIRST, bad, "{", {"event_type": "x", "data": {}}, REWARD)
    assert [(r.position, r.reason) for r in rejects] == [(2, "invalid"), (3, "malformed"), (4, "invalid")]
    assert "`$.token_ids[0]` of `data.response`" in next(r.message for r in rejects if r.position == 2)
    assert (len(record.steps), record.env_return) == (1, 1.0)
    assert (record.extra or {})["lost_events"] == 1


# ---------------------------------------------------------------- damage, and other files of the tool


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        (json.dumps(archive())[:-9], "malformed", "not JSON"),
        (json.dumps(archive(config=0.125)).replace("0.125", "NaN"), "malformed", "NaN"),
        (5, "invalid", "Expected `object`"),
        ({"rollout": {}, "events": []}, "invalid", "missing required field `rollout_id`"),
        (archive(rollout_id=5), "invalid", "`$.rollout_id`"),
        (archive(status=5), "invalid", "`$.status`"),
        (archive(event("model_request", 5)), "invalid", "`$[0].data`"),
        (archive(request(["hi"], answer(CALLING, [1], [2]))), "invalid", "Expected `object`, got `str`"),
        (archive(request([{"content": "x"}], answer(CALLING, [1], [2]))), "invalid", "messages[0].role` is None"),
        (archive(request([ASK], 5)), "invalid", "of `events[0].data.response`"),
        (archive(request([ASK], [5])), "invalid", "of `events[0].data.response`"),
        (archive(request([ASK], answer(CALLING, [-1], [2]))), "invalid", "prompt_token_ids[0]"),
        (archive(event("log", {})), "invalid", "no decision of an agent, and no outcome"),
    ],
)
def test_a_line_of_the_wrong_shape_is_rejected_and_the_others_are_read(
    tmp_path: Path, bad: Any, reason: str, says: str
) -> None:
    records, rejects = read(tmp_path, archive(), bad, archive(rollout_id="r2"))
    assert len(records) == 2
    assert [(reject.position, reject.reason) for reject in rejects] == [(2, reason)]
    assert says in rejects[0].message


def test_nothing_in_a_file_makes_it_raise(tmp_path: Path) -> None:
    assert_never_raises(tmp_path / "archive.jsonl", [archive()], lines=True)
    assert_never_raises(tmp_path / "events.jsonl", [FIRST, REWARD], lines=True)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([archive()["rollout"]], "lists rollouts"),
        ({"items": [], "next_after": 0, "total_terminal": 0}, "have ended"),
        ({"rollout": archive()["rollout"], "attempts": ["a"]}, "have ended"),
    ],
)
def test_what_the_server_lists_without_events_is_no_trajectory(tmp_path: Path, document: Any, says: str) -> None:
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=says):
        choose_format(path)
