"""Traces of the OpenAI Agents SDK: real exports, and what each kind of span is."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

MADE = Path(__file__).parent.parent / "golden" / "formats" / "openai_agents"
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]


def span(
    span_id: str, kind: str, at: int, parent: str | None = None, trace: str = "trace_1", **data: Any
) -> dict[str, Any]:
    """One line of a span."""
    error = data.pop("error", None)
    return {
        "object": "trace.span",
        "id": span_id,
        "trace_id": trace,
        "parent_id": parent,
        "started_at": f"2026-01-01T00:00:{at:02}+00:00",
        "ended_at": f"2026-01-01T00:00:{at + 1:02}+00:00",
        "span_data": {"type": kind, **data},
        "error": error,
    }


def generation(name: str, at: int, prompt: Any, answer: Any, parent: str | None = None, **data: Any) -> dict[str, Any]:
    """One call of the chat API."""
    usage = {"input_tokens": 3, "output_tokens": 4}
    return span(name, "generation", at, parent, input=prompt, output=answer, model="m-1", usage=usage, **data)


HEAD = {"object": "trace", "id": "trace_1", "workflow_name": "weather", "group_id": None, "metadata": None}
HELLO = generation("a", 1, ASKED, [{"role": "assistant", "content": "Sunny."}])


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def read_one(path: Path, *lines: Any) -> EpisodeRecord:
    """The only episode of some lines."""
    (record,), rejects = read_file(written(path, *lines))
    assert rejects == []
    return record


def expected(path: Path) -> Counts:
    """What a plain reading of an export finds: its agents' generations, less those of agents inside tools."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    spans = {line["id"]: line for line in lines if line["object"] == "trace.span"}
    outputs = []
    for line in spans.values():
        data = line["span_data"]
        if data["type"] == "generation":
            outputs.append(data["output"][0])
        if data["type"] == "response" and "response" in data:
            items = data["response"]["output"]
            words = "".join(p["text"] for item in items if item["type"] == "message" for p in item["content"])
            calls = [item for item in items if item["type"] == "function_call"]
            outputs.append({"content": words, "tool_calls": calls})
    around = set()
    for line in spans.values():
        if line["span_data"]["type"] not in ("generation", "response"):
            continue
        at = spans.get(line["parent_id"])
        while at is not None and at["span_data"]["type"] != "agent":
            at = spans.get(at["parent_id"])
        outer = spans.get(at["parent_id"]) if at else None
        while outer is not None and outer["span_data"]["type"] not in ("function", "agent"):
            outer = spans.get(outer["parent_id"])
        around.add((line["trace_id"], at["id"] if at and outer else None))
    return Counts(
        episodes=len(around),
        decisions=len(outputs),
        tool_calls=sum(len(message.get("tool_calls") or ()) for message in outputs),
        rewards=[],
        characters=sum(len(message["content"] or "") for message in outputs),
    )


# ---------------------------------------------------------------- real files


def test_the_real_file_holds_what_a_plain_count_finds() -> None:
    path = shared_data("formats", "openai_agents", "traces.jsonl")
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records) == expected(path) == Counts(2, 4, 2, [], 33)
    first, second = records
    assert first.task_id != second.task_id
    assert [step.state for step in first.steps] == ["Weather in Paris?", "22C"]
    assert [step.action for step in second.steps] == ["", "The answer is 11."]
    assert (first.environment, first.policy, first.prompt_tokens) == ("weather workflow", "mock-1", 37)
    assert first.extra is not None
    assert first.extra["metadata"] == {"k": "v"}
    assert [span.kind for span in first.spans if span.step_index is not None] == ["llm", "tool", "llm"]
    assert "You are a weather agent" not in json.dumps([span.attributes for span in first.spans])


@pytest.mark.parametrize("name", ["agents", "guardrail", "responses_with_content"])
def test_exports_of_the_sdk_hold_what_a_plain_count_finds(name: str) -> None:
    records, rejects = read_file(MADE / f"{name}.jsonl")
    assert rejects == []
    assert counts(records) == expected(MADE / f"{name}.jsonl")


def test_an_agent_that_is_a_tool_is_a_sub_agent_and_a_handoff_is_not() -> None:
    ask, expert, handed = read_file(MADE / "agents.jsonl")[0]
    assert (expert.relation, expert.agent_id, expert.parent_step_index) == ("subagent", "expert", 0)
    assert ask.task_id == expert.task_id != handed.task_id
    assert [step.agent_id for step in ask.steps] == ["host", "host"]
    assert [step.agent_id for step in handed.steps] == ["front", "expert"]
    assert handed.steps[1].state == '{"assistant": "expert"}'
    assert handed.steps[1].context[0] == {"role": "system", "content": "You know the weather."}
    assert handed.steps[1].extra is not None
    assert handed.steps[1].extra["history"] == "rewritten"


def test_a_guardrail_s_agent_is_a_sub_agent_and_too_many_turns_are_a_limit() -> None:
    guarded, checker, cut, _ = read_file(MADE / "guardrail.jsonl")[0]
    assert (checker.agent_id, checker.parent_step_index) == ("checker", 0)
    assert (guarded.status, guarded.terminated) == ("completed", None)
    assert (cut.status, cut.terminated, cut.stop_reason) == ("truncated", False, "max_turns")
    assert cut.error == 'Max turns exceeded: {"max_turns":1}'
    tool_calls = cut.steps[0].tool_calls or []
    assert cut.final_observation == [
        {"role": "tool", "content": "22C in Paris", "name": "get_weather", "tool_call_id": tool_calls[0]["id"]}
    ]


def test_responses_that_say_nothing_have_the_calls_that_ran_after_them() -> None:
    (record,), rejects = read_file(MADE / "responses.jsonl")
    assert rejects == []
    first, second = record.steps
    assert first.tool_calls is not None
    assert first.tool_calls[0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (first.state, second.state, second.action) == (None, "22C in Paris", "")
    assert [step.trainable for step in record.steps] == [False, False]
    assert record.prompt_tokens == 22


def test_responses_that_an_exporter_added_are_read_whole() -> None:
    (record,), _ = read_file(MADE / "responses_with_content.jsonl")
    first, second = record.steps
    assert record.initial_messages == [
        {"role": "system", "content": "You are a weather agent."},
        {"role": "user", "content": "Weather in Paris?"},
    ]
    assert (first.reasoning, second.action) == ("Let me see.", "So it is: 22C in Paris")
    assert [message["role"] for message in second.context] == ["tool"]
    assert record.tools is not None
    assert record.tools[0]["name"] == "get_weather"
    assert record.sampling is not None
    assert record.sampling["top_p"] == 1.0


# ---------------------------------------------------------------- rules


def test_lines_of_traces_may_be_mixed_and_in_any_order(tmp_path: Path) -> None:
    other_span = generation("b", 1, ASKED, [{"role": "assistant", "content": "Rain."}]) | {"trace_id": "trace_2"}
    again = [*ASKED, {"role": "assistant", "content": "Sunny."}, ASKED[1]]
    later = generation("c", 3, again, [{"role": "assistant", "content": "Still."}])
    records, _ = read_file(written(tmp_path / "f", later, other_span, HEAD, HELLO, HEAD | {"id": "trace_2"}))
    assert [[step.action for step in record.steps] for record in records] == [["Sunny.", "Still."], ["Rain."]]


def test_an_array_of_the_same_objects_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(json.dumps([HELLO, HEAD]), "utf-8")
    (record,), _ = read_file(path)
    assert record.steps[0].action == "Sunny."


@pytest.mark.parametrize(
    "value", [{"data": [HELLO, HEAD]}, {"trace": HEAD, "spans": [HELLO]}, {"traces": [HEAD], "spans": [HELLO]}]
)
def test_a_batch_and_a_trace_with_its_spans_are_read_too(tmp_path: Path, value: Any) -> None:
    record = read_one(tmp_path / "f", value)
    assert (record.environment, record.steps[0].action) == ("weather", "Sunny.")
    (_,), (reject,) = read_file(written(tmp_path / "g", {"data": [HELLO, {"id": "x"}, HEAD]}))
    assert (reject.reason, json.loads(reject.raw)) == ("invalid", {"id": "x"})


def test_a_group_is_a_conversation_and_its_traces_are_no_siblings(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f", HELLO, HEAD | {"group_id": "g"})
    assert (record.task_id, record.rollout_index) == ("trace_1", 0)
    assert record.extra is not None
    assert record.extra["group_id"] == "g"


def test_the_line_of_a_trace_may_be_missing(tmp_path: Path) -> None:
    """It is written when the trace ends."""
    record = read_one(tmp_path / "f", HELLO)
    assert record.extra is not None
    assert "is missing" in record.extra["trace"]


def test_settings_that_are_set_are_the_sampling(tmp_path: Path) -> None:
    record = read_one(
        tmp_path / "f",
        generation(
            "a",
            1,
            ASKED,
            [{"role": "assistant", "content": "x"}],
            model_config={"top_p": 1, "seed": None, "base_url": "u"},
        ),
    )
    assert record.sampling == {"top_p": 1}


def test_a_tool_that_failed_gave_back_an_error(tmp_path: Path) -> None:
    tool_call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    record = read_one(
        tmp_path / "f",
        generation("a", 1, ASKED, [{"role": "assistant", "content": None, "tool_calls": [tool_call]}]),
        span("t", "function", 2, name="get", input="{}", output=None, error={"message": "boom", "data": {"x": 1}}),
    )
    assert record.final_observation == [
        {"role": "tool", "content": 'boom: {"x":1}', "name": "get", "tool_call_id": "c1", "is_error": True}
    ]


def test_other_spans_are_kept_as_they_are(tmp_path: Path) -> None:
    record = read_one(
        tmp_path / "f", HELLO, span("h", "handoff", 2, from_agent="a", to_agent="b"), span("x", "new_kind", 3, deep=[1])
    )
    assert [(s.kind, s.attributes) for s in record.spans[1:]] == [
        ("handoff", {"type": "handoff", "from_agent": "a", "to_agent": "b"}),
        ("new_kind", {"type": "new_kind", "deep": [1]}),
    ]


def test_a_file_of_traces_without_spans_says_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="none of their spans"):
        choose_format(written(tmp_path / "f", HEAD, HEAD | {"id": "trace_2"}))


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ('{"object": "trace.span", "id": "x", "trace_id": "trace_12345678", "span', "malformed", "not JSON"),
        ("7", "invalid", "no trace, no span"),
        ('{"object": "trace.span", "id": 7, "trace_id": "trace_1"}', "invalid", "valid are objects"),
        ('{"object": "other", "id": "x"}', "invalid", "valid are objects"),
        ('{"object": "trace", "id": "trace_9", "workflow_name": "w"}', "invalid", "'trace_9' has no span"),
        (json.dumps(span("x", "agent", 1, trace="trace_9")), "invalid", "'trace_9' has no call of a model"),
        ('{"object": "trace", "object": "trace", "id": "trace_9"}', "invalid", "the key 'object' twice"),
        ('{"object": "trace.span", "id": "x", "trace_id": "trace_9", "n": NaN}', "malformed", "NaN"),
    ],
)
def test_a_bad_line_is_rejected_and_the_others_are_read(tmp_path: Path, bad: str, reason: str, says: str) -> None:
    (record,), (reject,) = read_file(written(tmp_path / "f", HELLO, bad, HEAD))
    assert record.environment == "weather"
    assert (reject.position, reject.reason) == (2, reason)
    assert says in reject.message


def test_a_trace_knows_how_many_of_its_lines_were_lost(tmp_path: Path) -> None:
    line = json.dumps(HELLO | {"trace_id": "trace_12345678"})
    head = HEAD | {"id": "trace_12345678"}
    (record,), (reject,) = read_file(written(tmp_path / "f", line, head, line.replace('"a"', '"b"')[:-20]))
    assert record.extra is not None
    assert record.extra["lost_lines"] == 1
    assert reject.position == 3


def test_a_file_that_is_cut_in_its_last_line_is_read_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(json.dumps(HELLO) + "\n" + json.dumps(HEAD)[:-9], "utf-8")
    (record,), (reject,) = read_file(path)
    assert (reject.reason, len(record.steps)) == ("truncated", 1)


def test_bytes_that_are_no_text_are_rejected_and_a_mark_at_the_start_is_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(HELLO).encode() + b"\n\xff\xfe\x00\n" + json.dumps(HEAD).encode())
    (record,), (reject,) = read_file(path)
    assert isinstance(reject, Reject)
    assert (record.environment, reject.position) == ("weather", 2)


@pytest.mark.parametrize("field", ["span_data", "error", "started_at", "parent_id"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [7]])
def test_a_span_with_a_wrong_value_is_kept_and_costs_no_more(tmp_path: Path, field: str, value: Any) -> None:
    odd = span("odd", "custom", 5, name="x") | {field: value}
    record = read_one(tmp_path / "f", HELLO, odd, HEAD)
    assert sorted(s.span_id for s in record.spans) == ["a", "odd"]


def test_nothing_in_a_file_makes_the_reader_raise(tmp_path: Path) -> None:
    lines = [HELLO, span("t", "function", 2, name="get", output="x"), span("g", "agent", 0, name="x"), HEAD]
    assert_never_raises(tmp_path / "f.jsonl", lines, lines=True)
