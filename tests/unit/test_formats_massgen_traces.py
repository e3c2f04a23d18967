"""MassGen's RL traces: what a decision is, whose a reward is, and that a trace can be written again as it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.massgen_files import START, TASK, coordinated, failed, prompted, span, streamed, trace, write_traces


def read(path: Path, value: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=2), "utf-8")
    return read_file(path)


def only(tmp_path: Path, value: Any) -> EpisodeRecord:
    (record,), rejects = read(tmp_path / "t.json", value)
    assert rejects == []
    return record


# ---------------------------------------------------------------- the whole of it


def test_a_store_is_read_whole(tmp_path: Path) -> None:
    paths = write_traces(tmp_path, [streamed(), prompted(), coordinated(), failed()])
    records = [record for path in paths for record in read_file(path)[0]]
    rewards = [1.0 - 0.5, 0.7, 1.0 - 0.5 + 0.7, 2.0, 2.0, 1.9, 1.0, -0.5, 1.9 + 1.0 - 0.5]
    server_counts = counts(records)
    assert server_counts._replace(rewards=[]) == Counts(
        4, 5, 5, [], sum(map(len, ("I will look it up.", "Paris\u00e9.", "A1", "A2", "I")))
    )
    assert server_counts.rewards == pytest.approx(sorted(rewards))
    assert {record.task_id for record in records} == {TASK, f"coordination: {TASK}"}
    assert len({(record.agent_id, record.rollout_index) for record in records}) == 4


@pytest.mark.parametrize("value", [streamed(), prompted(), coordinated(), failed()])
def test_a_trace_can_be_written_again_as_it_was(tmp_path: Path, value: dict[str, Any]) -> None:
    (path,) = write_traces(tmp_path, [value])
    (record,), _ = read_file(path)
    massgen = (record.extra or {})["massgen"]
    spans = {record_span.span_id: record_span.attributes for record_span in record.spans}
    again: dict[str, Any] = {}
    for key in ("trace_id", "agent_id", "task", "spans", *list(massgen["trace"])[3:]):
        again[key] = [spans[name] for name in massgen["spans"]] if key == "spans" else massgen["trace"][key]
    assert json.dumps(again, indent=2) == path.read_text("utf-8")


README = """
{
  "trace_id": "550e8400-e29b-41d4-a716-446655440000",
  "agent_id": "agent_a",
  "task": "Which city is the capital of France?",
  "spans": [
    {"span_type": "prompt", "input": "Which city?", "output": "I search.", "model": "gpt-4o"},
    {"span_type": "tool", "tool_name": "web_search", "arguments": {"query": "capital"}, "result": {"results": [1]}},
    {"span_type": "tool", "tool_name": "new_answer", "arguments": {"content": "Paris"}, "success": true},
    {"span_type": "reward", "reward": 0.5, "reward_type": "tool", "reason": "found"},
    {"span_type": "reward", "reward": 0.25, "reward_type": "answer_quality"}
  ],
  "total_reward": 0.75,
  "status": "completed"
}
"""


def test_a_trace_without_ids_and_times_of_spans_is_read_and_written_again(tmp_path: Path) -> None:
    """The trace as MassGen's README shows it."""
    index_given = json.loads(README)
    record = only(tmp_path, index_given)
    assert (record.env_return, record.status, record.started_at) == (0.75, "completed", None)
    (step,) = record.steps
    assert [call["id"] for call in step.tool_calls or ()] == ["span-1", "span-2"]
    (result,) = record.final_observation or ()
    assert (result["tool_call_id"], result["content"]) == ("span-1", '{"results":[1]}')
    assert [(score.scorer, score.value, score.step_index) for score in record.scores] == [
        ("tool", 0.5, 0),
        ("answer_quality", 0.25, 0),
    ]
    assert [span.span_id for span in record.spans] == [f"span-{number}" for number in range(5)]
    massgen = (record.extra or {})["massgen"]
    by_id = {span.span_id: span.attributes for span in record.spans}
    assert [by_id[span_id] for span_id in massgen["spans"]] == index_given["spans"]


def test_the_index_of_a_store_is_no_trajectory(tmp_path: Path) -> None:
    write_traces(tmp_path, [streamed()])
    with pytest.raises(FormatError, match="MassGen's index of traces"):
        choose_format(tmp_path / "metadata" / "trace_index.json")


# ---------------------------------------------------------------- decisions


def test_pieces_of_a_stream_are_a_decision_until_text_follows_a_tool(tmp_path: Path) -> None:
    record = only(tmp_path, streamed())
    first, second = record.steps
    assert (first.action, first.reasoning, first.model) == ("I will look it up.", "Let me search.", "gpt-5-nano")
    assert [call["id"] for call in first.tool_calls or ()] == ["call_1", "call_2"]
    assert (first.tool_calls or [])[0]["function"] == {"name": "search", "arguments": {"query": "capital", "a": 1}}
    assert (second.action, second.state, second.context) == ("Paris\u00e9.", "", [])
    assert first.state == TASK
    assert first.started_at is not None
    assert first.started_at.timestamp() == START
    assert [record_span.step_index for record_span in record.spans] == [0] * 8 + [1] * 3


def test_a_prompt_span_is_a_decision_and_its_stream_is_a_repetition(tmp_path: Path) -> None:
    record = only(tmp_path, prompted())
    first, second = record.steps
    assert [(step.state, step.action, step.reasoning) for step in record.steps] == [
        ("Q1", "A1", "Hm."),
        ('ZeroDivision\n{"output":1}\nQ2', "A2", None),
    ]
    assert (first.prompt_tokens, first.completion_tokens, first.model) == (10, 3, "gpt-x")
    assert [(m["role"], m.get("tool_call_id"), m.get("is_error")) for m in second.context] == [
        ("tool", "call_1", True),
        ("tool", "call_2", None),
        ("user", None, None),
    ]
    assert len(first.tool_calls or ()) == 2


def test_a_call_before_the_first_prompt_is_of_that_prompt(tmp_path: Path) -> None:
    spans = [
        span("tool", 0, tool_name="a"),
        span("prompt", 1, output="A"),
        span("tool", 2, tool_name="b"),
        span("prompt", 3),
    ]
    first, second = only(tmp_path, trace("t", spans)).steps
    assert [call["function"]["name"] for call in first.tool_calls or ()] == ["a", "b"]
    assert second.tool_calls is None


# ---------------------------------------------------------------- rewards


def test_a_reward_is_of_the_decision_before_it(tmp_path: Path) -> None:
    record = only(tmp_path, streamed())
    assert record.env_return == 1.0 - 0.5 + 0.7
    assert [(score.scorer, score.step_index, score.value) for score in record.scores] == [
        ("tool", 0, 0.5),
        ("answer_quality", 1, 0.7),
    ]
    each = (record.scores[0].metrics or {})["rewards"]
    assert [(row["span_id"], row["reward"]) for row in each] == [("span-6", 1.0), ("span-7", -0.5)]
    assert record.scores[1].reason == "Answer quality"


def test_rewards_of_a_coordination_are_of_the_agents_that_they_name(tmp_path: Path) -> None:
    record = only(tmp_path, coordinated())
    assert {score.scorer: score.value for score in record.scores} == {
        "coordination": 1.9,
        "voting:agent_a": 1.0,
        "voting:agent_b": -0.5,
    }
    assert record.env_return == pytest.approx(2.4)
    assert [(record_span.kind, record_span.name) for record_span in record.spans][:2] == [
        ("coordination", "new_answer"),
        ("coordination", "vote"),
    ]
    assert [step.trainable for step in record.steps] == [False]


def test_a_coordination_that_was_not_rewarded_is_kept_for_its_votes(tmp_path: Path) -> None:
    value = coordinated()
    value["spans"] = value["spans"][:2]
    record = only(tmp_path, value | {"total_reward": None})
    assert (record.env_return, record.scores, len(record.spans)) == (None, [], 2)


def test_a_trace_without_rewards_has_no_return(tmp_path: Path) -> None:
    record = only(tmp_path, failed())
    assert (record.env_return, record.status, record.error) == (None, "failed", "Connection lost")
    assert only(tmp_path, streamed() | {"status": "running"}).status == "aborted"


def test_two_spans_of_an_id_are_both_kept(tmp_path: Path) -> None:
    record = only(tmp_path, streamed())
    assert [record_span.span_id for record_span in record.spans if record_span.kind == "tool"] == [
        "call_1",
        "call_2",
        "call_1#2",
    ]


# ---------------------------------------------------------------- damage


def test_a_trace_that_is_cut_keeps_its_spans_until_then(tmp_path: Path) -> None:
    text = json.dumps(streamed(), indent=2)
    (record,), (reject,) = read(tmp_path / "t.json", text[: text.index('"span-10"')])
    assert (len(record.spans), record.status, record.env_return) == (10, "aborted", None)
    assert (reject.position, reject.reason) == (0, "truncated")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"trace_id": None}, "at `$.trace_id`"),
        ({"task": 5}, "at `$.task`"),
        ({"spans": [5]}, "at `$.spans[0]`"),
        ({"spans": [span("tool", 0, tool_name=None)]}, "`spans[0].tool_name` is None"),
        ({"spans": [span("content", 0, content=None)]}, "`spans[0].content` is NoneType"),
        ({"spans": [span("prompt", 0, output=7)]}, "is int; valid: text"),
        ({"spans": [span("content", 0, span_id=None)]}, "at `$.span_id`"),
        ({"total_reward": "1"}, "at `$.total_reward`"),
        ({"spans": [], "total_reward": None}, "no decision of an agent, and no outcome"),
    ],
)
def test_a_wrong_trace_is_rejected(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps(streamed() | fields, indent=2))
    from lake.formats.registry import FORMATS

    (reject,) = FORMATS["massgen_traces"].read(tmp_path / "t.json")
    assert isinstance(reject, Reject)
    assert (reject.position, reject.reason) == (0, "invalid")
    assert says in reject.message


def test_spans_of_a_type_that_is_not_known_are_kept(tmp_path: Path) -> None:
    value = streamed()
    value["spans"].append(span("new_kind", 11, anything=[1]))
    assert only(tmp_path, value).spans[-1].attributes == span("new_kind", 11, anything=[1])


def test_bytes_that_are_no_text_are_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(json.dumps(streamed(), indent=2).encode().replace(b"look it", b"look \xff it"))
    records, (reject,) = read_file(path)
    assert records == []
    assert (reject.position, reject.reason) == (0, "malformed")


def test_no_file_makes_the_reader_raise(tmp_path: Path) -> None:
    for value in (streamed(), prompted(), coordinated()):
        assert_never_raises(tmp_path / "t.json", value)
