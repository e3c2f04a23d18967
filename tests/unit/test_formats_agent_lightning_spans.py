"""agent-lightning 0.x spans: which of them are the agent's calls, no matter who recorded them, and what is a reward."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.agent_lightning import parse_literal
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject, TokensRecord
from testkit.formats import Counts, assert_never_raises, counts, read_file

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "agent_lightning_spans"
SAID = {
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "1 + 2?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "It is 3.",
    "gen_ai.completion.0.finish_reason": "stop",
    "gen_ai.response.id": "r1",
    "gen_ai.response.model": "tiny",
}
IDS = {"prompt_token_ids": [1, 2], "response_token_ids": [3]}


def span(name: str, attributes: dict[str, Any], number: int = 1, **fields: Any) -> dict[str, Any]:
    """A span of the store."""
    span_fields: dict[str, Any] = {
        "rollout_id": "ro",
        "attempt_id": "at",
        "sequence_id": number,
        "trace_id": "t",
        "span_id": f"s{number}",
    }
    span_fields |= {"parent_id": None, "name": name, "status": {"status_code": "OK", "description": None}}
    span_fields |= {"attributes": attributes, "events": [], "links": [], "context": None, "parent": None}
    span_fields |= {"start_time": 1_750_000_000.0 + number, "end_time": 1_750_000_000.5 + number}
    return span_fields | {"resource": {"attributes": {"service.name": "x"}, "schema_url": ""}} | fields


def call(number: int = 1, **fields: Any) -> dict[str, Any]:
    """A call that AgentOps traced."""
    attributes = SAID | {"gen_ai.response.id": f"r{number}"} | IDS | fields.pop("attributes", {})
    return span("openai.chat.completion", attributes, number, **fields)


def reward(value: Any, number: int = 2, **fields: Any) -> dict[str, Any]:
    """A reward as 0.3 emits it."""
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    return span("agentlightning.annotation", attributes, number, **fields)


def read(folder: Path, *spans: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Records and rejects of spans, or lines of text."""
    path = folder / "spans.jsonl"
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in spans))
    assert choose_format(path).name == "agent_lightning_spans"
    return read_file(path)


def only(folder: Path, *spans: Any) -> EpisodeRecord:
    """The one record of spans without rejects."""
    (record,), rejects = read(folder, *spans)
    assert not rejects, rejects[0].message
    return record


# ---------------------------------------------------------------- real files


def test_spans_of_the_client_give_what_plain_counting_gives() -> None:
    spans = [json.loads(line) for line in (GOLDEN / "client.jsonl").read_text("utf-8").splitlines()]
    calls = [s["attributes"] for s in spans if s["name"] == "openai.chat.completion"]
    tool_spans = [s for s in spans if "tool.call.id" in s["attributes"]]
    rewards = [
        v
        for s in spans
        for k, v in s["attributes"].items()
        if k.startswith("agentlightning.reward.") and k[-1] == "e" and isinstance(v, float)
    ]
    texts = [attributes.get("gen_ai.completion.0.content", "") for attributes in calls]
    records, rejects = read_file(GOLDEN / "client.jsonl")
    assert not rejects
    expected = Counts(1, len(calls), len(tool_spans), sorted([*rewards, rewards[1]]), sum(map(len, texts)))
    assert counts(records) == expected == Counts(1, 2, 1, [0.25, 0.5, 1.0, 1.0], 8)
    (record,) = records
    assert record.env_return == 1.0, "the first of the last reward span"
    assert [(s.scorer, s.value, s.step_index) for s in record.scores] == [
        ("primary", 0.25, 1),
        ("correct", 1.0, None),
        ("short", 0.5, None),
    ]
    first, second = record.steps
    assert first.tool_calls is not None
    assert first.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}, (
        "AgentOps has it in a span"
    )
    assert (second.state, second.action, second.state_role) == ("3", "It is 3.", "tool")
    assert record.tools == [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]


@pytest.mark.parametrize("name", ["client", "proxy"])
def test_tokens_are_those_that_the_engine_gave(name: str) -> None:
    (record,), _ = read_file(GOLDEN / f"{name}.jsonl")
    first, second = (step.tokens for step in record.steps)
    assert first is not None
    assert second is not None
    assert (first.context_ids, first.action_logprobs) == ([1, 2, 3], [-0.25, -0.5])
    assert (second.context_ids, second.prefix_step_index, second.temperature) == ([9], 0, 0.75)


def test_spans_of_the_proxy_are_one_decision_a_request() -> None:
    """Each request has two spans, and one of them in Python's words."""
    (record,), rejects = read_file(GOLDEN / "proxy.jsonl")
    assert not rejects
    assert counts([record]) == Counts(1, 2, 1, [], 8)
    first, second = record.steps
    assert first.tool_calls is not None
    assert (first.tool_calls[0]["id"], first.finish_reason) == ("call_1", "tool_calls")
    assert (second.state, second.action, second.model) == ("3", "It is 3.", "tiny")
    assert {span.name for span in record.spans} >= {"litellm_request", "raw_gen_ai_request"}


# ---------------------------------------------------------------- calls


def test_spans_are_ordered_by_their_sequence_and_not_by_their_clocks(tmp_path: Path) -> None:
    late = call(2, attributes={"gen_ai.completion.0.content": "second"}, start_time=1_000_000_000.0)
    record = only(tmp_path, late, call(1))
    assert [step.action for step in record.steps] == ["It is 3.", "second"]
    assert record.steps[0].started_at is not None
    assert (record.steps[0].latency, record.steps[0].started_at.year) == (0.5, 2025)


def test_calls_with_one_response_id_are_one(tmp_path: Path) -> None:
    again = span("litellm_request", {"gen_ai.response.id": "r1"} | IDS, 2)
    bare = call(1)
    bare["attributes"] = {key: value for key, value in bare["attributes"].items() if key not in IDS}
    record = only(tmp_path, bare, again)
    assert len(record.steps) == 1
    assert record.steps[0].tokens == TokensRecord(context_ids=[1, 2], action_ids=[3], prefix_step_index=None)
    assert len(record.spans) == 2


def test_a_call_inside_a_call_is_the_same_one(tmp_path: Path) -> None:
    inner = {"llm.hosted_vllm.messages": "[{'role': 'user', 'content': '1 + 2?'}]"}
    inner["llm.hosted_vllm.choices"] = (
        "[{'message': {'role': 'assistant', 'content': None, 'refusal': None}, 'token_ids': [3]}]"
    )
    inner["llm.hosted_vllm.prompt_token_ids"] = "[1, 2]"
    outer = span("litellm_request", {"gen_ai.request.model": "tiny", "gen_ai.response.id": "r9"}, 1)
    record = only(tmp_path, outer, span("raw_gen_ai_request", inner, 2, parent_id="s1"))
    assert [(step.state, step.action) for step in record.steps] == [("1 + 2?", "")]
    assert record.steps[0].tokens is not None
    assert record.steps[0].tokens.action_ids == [3]


def test_calls_that_weave_traced_are_decisions(tmp_path: Path) -> None:
    texts = {
        "agentlightning.operation.input.messages.0.role": "user",
        "agentlightning.operation.input.messages.0.content": "1 + 2?",
        "agentlightning.operation.input.model": "tiny",
        "agentlightning.operation.output.id": "r1",
        "agentlightning.operation.output.choices.0.message.content": "It is 3.",
        "agentlightning.operation.output.choices.0.message.role": "assistant",
        "agentlightning.operation.output.choices.0.token_ids": [3],
        "agentlightning.operation.output.prompt_token_ids": [1, 2],
    }
    (step,) = only(tmp_path, span("openai.chat.completions.create", texts)).steps
    assert (step.state, step.action, step.model) == ("1 + 2?", "It is 3.", "tiny")
    assert step.tokens is not None
    assert (step.tokens.context_ids, step.tokens.action_ids) == ([1, 2], [3])


def test_a_call_of_which_only_tokens_are_known_is_a_decision(tmp_path: Path) -> None:
    record = only(tmp_path, span("litellm_request", IDS, 1), reward(1.0))
    assert [(step.state, step.action, step.trainable) for step in record.steps] == [(None, "", True)]


def test_calls_inside_a_reward_are_a_judges(tmp_path: Path) -> None:
    judge = span("agentops_reward_operation.task", {"agentops.task.output": '{"type": "reward", "value": 0.5}'}, 3)
    record = only(tmp_path, call(1), call(2, parent_id="s3", span_id="s2"), judge)
    assert len(record.steps) == 1
    assert record.env_return == 0.5
    assert any(
        span.span_id == "s2" and "gen_ai.completion.0.content" in (span.attributes or {}) for span in record.spans
    )


def test_an_agent_inside_an_agent_with_other_instructions_is_a_sub_agent(tmp_path: Path) -> None:
    outer = span("agent", {"agent.name": "boss"}, 5)
    inner = span("agent", {"agent.name": "clerk"}, 4, parent_id="s5")
    attributes = {"gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Boss.", "gen_ai.prompt.1.role": "user"}
    first = call(1, parent_id="s5", attributes=attributes | {"gen_ai.prompt.1.content": "Go."})
    second = call(
        2, parent_id="s4", attributes=attributes | {"gen_ai.prompt.0.content": "Clerk.", "gen_ai.prompt.1.content": "?"}
    )
    records, _ = read(tmp_path, first, second, inner, outer)
    assert [(r.agent_id, r.relation, len(r.steps)) for r in records] == [(None, None, 1), ("clerk", "subagent", 1)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 2]", [1, 2]),
        ("{'a': None}", {"a": None}),
        ('{"a": null}', {"a": None}),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("(" * 5000, "(" * 5000),
        ("[" * 100_000, "[" * 100_000),
        ("1 +", "1 +"),
        (5, 5),
    ],
)
def test_text_of_literals_is_parsed_and_never_evaluated(text: Any, value: Any) -> None:
    assert parse_literal(text) == value


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    "reward",
    [
        reward(0.75),
        reward("0.75"),
        span("agentlightning.annotation", {"reward": 0.75}, 2),
        span("agentlightning.reward", {"reward": 0.75}, 2),
        span("x", {"agentops.task.output": '{"type": "reward", "value": 0.75}'}, 2),
        span("x", {"agentops.entity.output": '{"type": "reward", "value": 0.75}'}, 2),
    ],
)
def test_rewards_of_all_versions_are_read(tmp_path: Path, reward: Any) -> None:
    record = only(tmp_path, call(1), reward)
    assert record.env_return == 0.75
    assert [score.value for score in record.scores] == [0.75]


def test_the_last_reward_that_is_known_is_the_return(tmp_path: Path) -> None:
    unknown = span("x", {"agentops.task.output": '{"type": "reward", "value": null}'}, 4)
    record = only(tmp_path, reward(0.25, 2), call(1), reward(1.0, 3), unknown)
    assert record.env_return == 1.0
    assert [(s.scorer, s.value) for s in record.scores] == [("primary", 0.25), ("primary#2", 1.0), ("reward", None)]


def test_no_reward_is_no_return(tmp_path: Path) -> None:
    assert only(tmp_path, call(1), span("agentlightning.annotation", {"note": "x"}, 2)).env_return is None


def test_a_reward_that_links_to_a_response_is_of_its_step(tmp_path: Path) -> None:
    link = {"agentlightning.link.0.key_match": "gen_ai.response.id", "agentlightning.link.0.value_match": "r2"}
    linked = reward(0.5, 3)
    linked["attributes"] |= link
    record = only(tmp_path, call(1), call(2), linked)
    assert [(s.value, s.step_index) for s in record.scores] == [(0.5, 1)]


def test_an_attempt_with_a_reward_alone_is_an_outcome(tmp_path: Path) -> None:
    record = only(tmp_path, reward(0.0))
    assert (record.env_return, [step.trainable for step in record.steps]) == (0.0, [False])


# ---------------------------------------------------------------- rollouts, files


def test_attempts_of_a_rollout_are_numbered_as_they_appear(tmp_path: Path) -> None:
    second = [call(1, attempt_id="b"), reward(1.0, attempt_id="b")]
    records, _ = read(tmp_path, call(1), *second, call(1, rollout_id="other"))
    assert [(r.task_id, r.attempt, r.relation, (r.extra or {})["attempt_id"]) for r in records] == [
        ("ro", 0, None, "at"),
        ("ro", 1, "retry", "b"),
        ("other", 0, None, "at"),
    ]


def test_a_trace_that_failed_says_so(tmp_path: Path) -> None:
    root = span("session", {}, 9, status={"status_code": "ERROR", "description": "boom"})
    record = only(tmp_path, call(1, parent_id="s9"), root)
    assert (record.status, record.error) == ("failed", "boom")


def test_what_spans_say_besides_is_kept(tmp_path: Path) -> None:
    note = span(
        "agentlightning.message", {"agentlightning.message.body": "hi"}, 2, events=[{"name": "e"}], odd={"x": 1}
    )
    record = only(tmp_path, call(1), note)
    (call_span,) = [span for span in record.spans if span.span_id == "s2"]
    assert (call_span.name, call_span.trace_id) == ("agentlightning.message", "t")
    assert call_span.attributes == {
        "agentlightning.message.body": "hi",
        "sequence_id": 2,
        "events": [{"name": "e"}],
        "odd": {"x": 1},
    }
    assert "gen_ai.prompt.0.content" not in str(record.spans[0].attributes), "it is a message now"


def test_spans_may_be_an_array_or_a_page(tmp_path: Path) -> None:
    for document in ([call(1), reward(1.0)], {"items": [call(1), reward(1.0)], "limit": 2, "offset": 0, "total": 2}):
        path = tmp_path / "spans.json"
        path.write_text(json.dumps(document))
        assert choose_format(path).name == "agent_lightning_spans"
        (record,), rejects = read_file(path)
        assert (len(record.steps), record.env_return, rejects) == (1, 1.0, [])


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        (json.dumps(call(7))[:-9], "malformed", "not JSON"),
        (json.dumps(call(7, start_time=0.125)).replace("0.125", "NaN"), "malformed", "NaN"),
        (7, "invalid", "Expected `object`"),
        ({"rollout_id": "ro"}, "invalid", "missing required field `span_id`"),
        (call(7) | {"attributes": []}, "invalid", "`$.attributes`"),
        (call(7, rollout_id=5), "invalid", "`$.rollout_id`"),
        (call(7) | {"name": None}, "invalid", "`$.name`"),
        (call(7, sequence_id="1"), "invalid", "`$.sequence_id`"),
        (call(7, status="OK"), "invalid", "`$.status`"),
    ],
)
def test_a_span_that_is_damaged_is_rejected_and_the_others_are_the_episode(
    tmp_path: Path, bad: Any, reason: str, says: str
) -> None:
    (record,), (reject,) = read(tmp_path, call(1), bad, reward(1.0))
    assert (len(record.steps), record.env_return) == (1, 1.0)
    assert (reject.position, reject.reason) == (2, reason)
    assert says in reject.message
    is_named = isinstance(bad, dict) and bad.get("rollout_id") == "ro"
    assert (record.extra or {}).get("lost_spans") == (1 if is_named else None)


def test_a_last_line_that_is_cut_is_a_reject(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text(f"{json.dumps(call(1))}\n{json.dumps(call(2))[:-20]}")
    (record,), (reject,) = read_file(path)
    assert (len(record.steps), reject.position, reject.reason) == (1, 2, "truncated")


def test_nothing_in_a_span_makes_it_raise(tmp_path: Path) -> None:
    raw = span("raw_gen_ai_request", {"llm.x.messages": "[{}]", "llm.x.choices": "[5]", "llm.x.id": "q"}, 3)
    logged = call(1, attributes={"logprobs.content": '[{"logprob": -1}]', "gen_ai.completion.0.tool_calls.0.name": "f"})
    assert_never_raises(tmp_path / "spans.jsonl", [logged, raw, reward(1.0)], lines=True)
