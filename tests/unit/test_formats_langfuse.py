"""Langfuse traces: exports of the interface, of the API, and observations by themselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.base.fields import hash_rollout_index
from lake.formats.base.source import Input
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

REAL = ("langgraph-python-2025-08-22.trace.json", "pydantic-ai-tools-2025-12-04.trace.json")
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}


def observation(name: str, kind: str = "SPAN", at: int = 0, **fields: Any) -> dict[str, Any]:
    """One observation."""
    return {
        "id": name,
        "traceId": "t1",
        "parentObservationId": None,
        "type": kind,
        "name": name,
        "startTime": f"2026-01-01T00:00:{at:02}.000Z",
        "endTime": f"2026-01-01T00:00:{at + 1:02}.000Z",
        "level": "DEFAULT",
        "statusMessage": None,
        "usageDetails": {},
        "costDetails": {},
    } | fields


def generation(name: str, at: int, prompt: Any, answer: Any, **fields: Any) -> dict[str, Any]:
    """One call."""
    return observation(name, "GENERATION", at, input=prompt, output=answer, model="m-1", **fields)


def trace(*observations: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A trace as the interface writes it."""
    about = {"id": "t1", "projectId": "p", "name": "weather", "timestamp": "2026-01-01T00:00:00.000Z", "scores": []}
    return {"trace": about | fields, "observations": list(observations)}


def score(name: str, value: Any, kind: str = "NUMERIC", **fields: Any) -> dict[str, Any]:
    """One score."""
    about = {"id": name, "name": name, "value": value, "dataType": kind, "observationId": None, "traceId": "t1"}
    return about | {"comment": None, "stringValue": None, "configId": None, "source": "API"} | fields


HELLO = generation("a", 1, ASKED, {"role": "assistant", "content": "Sunny."})


def written(path: Path, value: Any, *, lines: bool = False) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in value) if lines else json.dumps(value), "utf-8")
    return path


def read_one(path: Path, *observations: dict[str, Any], **fields: Any) -> EpisodeRecord:
    """The only episode of a trace."""
    (record,), rejects = read_file(written(path, trace(*observations, **fields)))
    assert rejects == []
    return record


# ---------------------------------------------------------------- real files


@pytest.mark.parametrize("name", REAL)
def test_a_real_file_holds_what_a_plain_count_finds(name: str) -> None:
    path = shared_data("formats", "langfuse", name)
    document = json.loads(path.read_text("utf-8"))
    calls = [row for row in document["observations"] if row["type"] == "GENERATION"]
    n_tool_calls = characters = 0
    for row in calls:
        output = json.loads(row["output"]) if isinstance(row["output"], str) else row["output"]
        message = output[0] if isinstance(output, list) else output
        n_tool_calls += len(message.get("additional_kwargs", {}).get("tool_calls") or ())
        n_tool_calls += sum(part["type"] == "tool_call" for part in message.get("parts", ()))
        characters += len(message.get("content") or "")
        characters += sum(len(part["content"]) for part in message.get("parts", ()) if part["type"] == "text")
    rewards = sorted(float(score["value"]) for score in document["trace"]["scores"])
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records) == Counts(1, len(calls), n_tool_calls, rewards, characters)
    assert len(records[0].spans) == len(document["observations"])
    assert records[0].prompt_tokens == sum(row["usageDetails"]["input"] for row in calls)
    assert records[0].cost == pytest.approx(sum(row["costDetails"]["total"] for row in calls))


def test_the_langgraph_trace_sees_the_result_of_its_tool_and_keeps_its_scores() -> None:
    (record,), _ = read_file(shared_data("formats", "langfuse", REAL[0]))
    first, second = record.steps
    assert first.state == "Be helpful!\nSearch the web for 'example' and summarize."
    assert second.state == '[{"url": "https://example.com", "title": "Example Result", "q": "example"}]'
    assert second.action.startswith('The search for "example" primarily leads')
    assert record.tools is not None
    assert [tool["function"]["name"] for tool in record.tools] == ["Web-Search"]
    assert [(s.scorer, s.value, s.step_index) for s in record.scores] == [
        ("hallucination", 0.1, None),
        ("toxicity", 0, None),
    ]
    assert record.scores[0].reason is not None
    assert record.scores[0].reason.startswith("The generation accurately")
    (tool,) = [span for span in record.spans if span.kind == "tool"]
    assert (tool.name, tool.step_index) == ("Web-Search", 0)


def test_the_pydantic_ai_trace_is_one_episode_of_two_agents() -> None:
    (record,), _ = read_file(shared_data("formats", "langfuse", REAL[1]))
    assert [step.agent_id for step in record.steps] == [*["joke_agent"] * 3, "evaluator_agent"]
    assert [len(step.tool_calls or ()) for step in record.steps] == [3, 0, 0, 1]
    assert [message["tool_call_id"] for message in record.steps[1].context] == [
        call["id"] for call in record.steps[0].tool_calls or ()
    ]
    assert record.steps[3].extra is not None
    assert record.steps[3].extra["history"] == "rewritten"
    assert record.environment == "joke-generator"
    text = json.dumps([span.attributes for span in record.spans])
    assert "You are a creative joke writer" not in text, "messages are steps, and not kept once more with the spans"


# ---------------------------------------------------------------- wrappings


ROWS = [HELLO, generation("b", 2, "Weather?", "Rain.", traceId="t2")]
SNAKE = [
    {
        "id": name,
        "trace_id": trace_id,
        "trace_name": "weather",
        "parent_observation_id": None,
        "type": "GENERATION",
        "name": name,
        "start_time": "2026-01-01 00:00:01.500000",
        "end_time": "2026-01-01 00:00:02.000000",
        "provided_model_name": "m-1",
        "model_parameters": '{"temperature": 0.5}',
        "usage_details": {"input": 3, "output": 4},
        "cost_details": {"total": 0.25},
        "input": json.dumps(ASKED),
        "output": json.dumps({"role": "assistant", "content": "Sunny."}),
    }
    for name, trace_id in (("a", "t1"), ("b", "t2"))
]


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (trace(HELLO), False),
        ([trace(HELLO), trace(HELLO, id="t2")], False),
        ([trace(HELLO), trace(HELLO, id="t2")], True),
        ({"id": "t1", "projectId": "p", "name": "weather", "observations": [HELLO], "scores": []}, False),
        ({"data": [{"id": "t1", "projectId": "p", "observations": [HELLO]}], "meta": {"page": 1}}, False),
        (ROWS, False),
        (ROWS, True),
        ({"data": ROWS, "meta": {}}, False),
        (SNAKE, True),
    ],
)
def test_traces_are_read_however_they_are_wrapped(tmp_path: Path, value: Any, lines: bool) -> None:
    path = written(tmp_path / "f", value, lines=lines)
    assert choose_format(path).name == "langfuse"
    records, rejects = read_file(path)
    assert rejects == []
    assert records[0].task_id == "t1"
    assert records[0].steps[0].action == "Sunny."
    assert [record.task_id for record in records] == ["t1", "t2"][: len(records)]


def test_rows_of_an_export_to_a_bucket_tell_as_much_as_others(tmp_path: Path) -> None:
    (record, _), _ = read_file(written(tmp_path / "f", SNAKE, lines=True))
    (step,) = record.steps
    assert (step.model, step.prompt_tokens, step.completion_tokens, step.cost, step.latency) == ("m-1", 3, 4, 0.25, 0.5)
    assert (record.sampling, record.environment) == ({"temperature": 0.5}, "weather")
    assert record.initial_messages == ASKED


def test_observations_of_a_trace_may_stand_anywhere_in_a_file(tmp_path: Path) -> None:
    second = generation("c", 3, [*ASKED, {"role": "assistant", "content": "Sunny."}, ASKED[1]], "Still sunny.")
    (record, _), _ = read_file(written(tmp_path / "f", [ROWS[1], second, ROWS[0]][::-1], lines=True))
    assert [step.action for step in record.steps] == ["Sunny.", "Still sunny."]


def test_observations_that_only_the_trace_has_are_read(tmp_path: Path) -> None:
    document = trace(observations=[HELLO])
    (record,), _ = read_file(written(tmp_path / "f", document))
    assert record.steps[0].action == "Sunny."


# ---------------------------------------------------------------- what is what


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (ASKED, {"role": "assistant", "content": "Sunny."}),
        (json.dumps(ASKED), json.dumps({"role": "assistant", "content": "Sunny."})),
        ({"messages": ASKED, "temperature": 1}, {"choices": [{"message": {"content": "Sunny."}}]}),
        ({"system": "Be kind.", "messages": ASKED[1:]}, "Sunny."),
        (ASKED[1:], {"instructions": "Be kind.", "output": [{"type": "message", "content": "Sunny."}]}),
    ],
)
def test_what_went_in_and_came_out_is_a_prompt_and_an_answer(tmp_path: Path, prompt: Any, answer: Any) -> None:
    record = read_one(tmp_path / "f", generation("a", 1, prompt, answer))
    assert record.initial_messages == ASKED
    assert record.steps[0].action == "Sunny."


def test_an_answer_that_is_an_object_is_its_json(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f", generation("a", 1, "Rate it.", {"quality": "good"}))
    assert record.steps[0].action == '{"quality":"good"}'


def test_a_call_of_the_ai_sdk_has_its_tools_and_why_it_finished_in_its_attributes(tmp_path: Path) -> None:
    attributes = {
        "ai.operationId": "x",
        "ai.prompt.tools": ['{"name": "get"}'],
        "ai.response.finishReason": "tool-calls",
    }
    tool_calls = [{"toolCallId": "c1", "toolName": "get", "input": "{}"}]
    settings = {"temperature": 1, "finishReason": "tool-calls"}
    record = read_one(
        tmp_path / "f",
        generation("a", 1, ASKED, tool_calls, metadata={"attributes": attributes}, modelParameters=settings),
    )
    assert (record.tools, record.sampling) == ([{"name": "get"}], {"temperature": 1})
    assert (record.steps[0].tool_calls, record.steps[0].finish_reason) == ([CALL], "tool-calls")


def test_attributes_of_openinference_say_who_said_what_where_the_input_does_not(tmp_path: Path) -> None:
    attributes = {"openinference.span.kind": "LLM"}
    for index, message in enumerate(ASKED):
        attributes |= {f"llm.input_messages.{index}.message.{key}": value for key, value in message.items()}
    prompt = {"messages": ["role='system' content='Be kind.'", "role='user' content='Weather?'"]}
    tool = {"attributes": {"openinference.span.kind": "TOOL", "tool.name": "get"}}
    call_message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    record = read_one(
        tmp_path / "f",
        generation("a", 1, prompt, call_message, metadata={"attributes": attributes}),
        observation("run", "SPAN", 2, output="22C", metadata=tool),
    )
    assert record.initial_messages == ASKED
    assert record.final_observation == [{"role": "tool", "content": "22C", "name": "get", "tool_call_id": "c1"}]


def test_a_trace_without_inputs_and_outputs_makes_up_no_call() -> None:
    file = Input(shared_data("cases", "11_no_content", "trace-t1.json"), "run")
    ((_, record),) = choose_format(file.path).reader(file)
    assert [(step.trainable, step.tool_calls, step.action, step.context) for step in record.steps] == [
        (False, None, "", [])
    ] * 2
    assert {note.name: number for note, number in file.notes.items()} == {"prompt": 2, "answer": 2, "tool span": 1}


def test_observations_out_of_order_are_read_in_the_order_of_their_start() -> None:
    (record,), _ = read_file(shared_data("cases", "11_no_content", "trace-t2.json"))
    first, second = record.steps
    assert first.tool_calls is not None
    assert (first.tool_calls[0]["function"]["name"], second.state, second.action) == ("subtract", "-3", "-3")


def test_embeddings_are_no_decisions(tmp_path: Path) -> None:
    record = read_one(
        tmp_path / "f",
        HELLO,
        observation("e", "EMBEDDING", 2, input="x"),
        generation("old", 3, "x", None) | {"model": "text-embedding-3-small"},
    )
    assert len(record.steps) == 1
    assert [span.kind for span in record.spans] == ["llm", "embedding", "embedding"]


def test_a_call_that_failed_is_counted(tmp_path: Path) -> None:
    failed = generation("x", 0, ASKED, None, level="ERROR", statusMessage="429")
    record = read_one(tmp_path / "f", failed, HELLO)
    assert record.extra is not None
    assert (len(record.steps), record.extra["failed_calls"]) == (1, 1)
    assert record.spans[0].error == "429"


def test_agents_and_tools_are_told_by_their_types_and_by_the_spans_they_were(tmp_path: Path) -> None:
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "expert"}
    ask = CALL | {"function": {"name": "ask", "arguments": "{}"}}
    records, _ = read_file(
        written(
            tmp_path / "f",
            trace(
                observation("host", "AGENT"),
                generation("a", 1, ASKED, {"role": "assistant", "tool_calls": [ask]}, parentObservationId="host"),
                observation("ask", "TOOL", 2, parentObservationId="host", input={"q": 1}, output="Rain."),
                observation("run", "SPAN", 3, parentObservationId="ask", metadata={"attributes": attributes}),
                generation("b", 4, "Weather?", "Rain.", parentObservationId="run"),
            ),
        )
    )
    main, sub = records
    assert (main.steps[0].agent_id, sub.agent_id, sub.relation, sub.parent_step_index) == (
        "host",
        "expert",
        "subagent",
        0,
    )
    assert main.final_observation == [{"role": "tool", "content": "Rain.", "name": "ask", "tool_call_id": "c1"}]


def test_counts_and_prices_that_older_files_have_elsewhere_are_taken(tmp_path: Path) -> None:
    old = generation(
        "a", 1, ASKED, "Sunny.", usage={"input": 3, "output": 4, "unit": "TOKENS"}, calculatedTotalCost=0.5
    )
    del old["usageDetails"], old["costDetails"]
    step = read_one(tmp_path / "f", old).steps[0]
    assert (step.prompt_tokens, step.completion_tokens, step.cost) == (3, 4, 0.5)


def test_a_price_that_is_not_known_is_none_and_not_zero(tmp_path: Path) -> None:
    assert read_one(tmp_path / "f", generation("a", 1, ASKED, "Sunny.", totalCost=0)).cost is None


# ---------------------------------------------------------------- scores


def test_scores_are_numbers_where_their_type_has_some(tmp_path: Path) -> None:
    scores = [
        score("accuracy", 0.75, comment="mostly"),
        score("passed", 1, "BOOLEAN", stringValue="True"),
        score("tone", 0, "CATEGORICAL", stringValue="rude"),
        score("grade", 2, "CATEGORICAL", stringValue="good", configId="c"),
        score("note", 0, "TEXT", longStringValue="words"),
        score("step", 0.5, observationId="a"),
    ]
    record = read_one(tmp_path / "f", HELLO, scores=scores)
    score_by_name = {s.scorer: s for s in record.scores}
    assert {name: s.value for name, s in score_by_name.items()} == {
        "accuracy": 0.75,
        "passed": 1.0,
        "tone": None,
        "grade": 2.0,
        "note": None,
        "step": 0.5,
    }
    assert score_by_name["accuracy"].reason == "mostly"
    assert [name for name, s in score_by_name.items() if s.step_index == 0] == ["step"]
    assert score_by_name["tone"].metrics is not None
    assert score_by_name["tone"].metrics["label"] == "rude"
    assert score_by_name["note"].metrics is not None
    assert score_by_name["note"].metrics["text"] == "words"


def test_a_score_that_is_listed_twice_counts_once(tmp_path: Path) -> None:
    document = trace(HELLO, scores=[score("good", 1)]) | {"scores": [score("good", 1)]}
    (record,), _ = read_file(written(tmp_path / "f", document))
    assert [s.scorer for s in record.scores] == ["good"]


# ---------------------------------------------------------------- tasks and siblings


def test_siblings_are_traces_of_an_item_in_an_experiment(tmp_path: Path) -> None:
    metadata = {"dataset_item_id": "item-1", "experiment_run_name": "nightly", "experiment_name": "n"}
    expected = {"attributes": {"langfuse.experiment.item.expected_output": '{"sky": "blue"}'}}
    value = [trace(HELLO | {"metadata": metadata | expected}, id=name) for name in ("t1", "t2")]
    first, second = read_file(written(tmp_path / "f", value))[0]
    assert (first.task_id, first.run_id, first.ground_truth) == ("item-1", "nightly", {"sky": "blue"})
    assert (second.task_id, second.run_id) == ("item-1", "nightly")
    assert [first.rollout_index, second.rollout_index] == [hash_rollout_index("t1"), hash_rollout_index("t2")]


def test_traces_of_a_session_are_turns_of_a_conversation_and_no_siblings(tmp_path: Path) -> None:
    records, _ = read_file(written(tmp_path / "f", [trace(HELLO, id=name, sessionId="s") for name in ("t1", "t2")]))
    assert [(record.task_id, record.rollout_index) for record in records] == [("t1", 0), ("t2", 0)]
    assert [record.extra["trace"]["sessionId"] for record in records if record.extra] == ["s", "s"]


def test_a_trace_that_comes_again_replaces_itself(tmp_path: Path) -> None:
    records, _ = read_file(written(tmp_path / "f", [trace(HELLO), trace(HELLO)], lines=True))
    assert [record.attempt for record in records] == [0, 1]


def test_what_a_trace_says_of_itself_is_kept_once(tmp_path: Path) -> None:
    record = read_one(
        tmp_path / "f", observation("root", input={"q": 1}), HELLO, input='{"q": 1}', output="Bye", userId="u", tags=[]
    )
    assert record.extra is not None
    assert record.extra["trace"] == {
        "projectId": "p",
        "name": "weather",
        "timestamp": "2026-01-01T00:00:00.000Z",
        "output": "Bye",
        "userId": "u",
    }


# ---------------------------------------------------------------- files without trajectories


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([score("good", 1) | {"projectId": "p", "timestamp": "2026"}], "a table of scores of Langfuse"),
        (
            [{"id": "t", "project_id": "p", "timestamp": "2026", "name": "n", "session_id": None}],
            "without observations",
        ),
    ],
)
def test_tables_beside_the_observations_say_what_to_ingest(tmp_path: Path, value: Any, says: str) -> None:
    for lines in (False, True):
        with pytest.raises(FormatError, match=says):
            choose_format(written(tmp_path / "f", value, lines=lines))


# ---------------------------------------------------------------- damage


def rejected(path: Path, bad: Any) -> Reject:
    """The reject that a trace between two good ones becomes."""
    records, rejects = read_file(written(path, [trace(HELLO), bad, trace(HELLO, id="t3")]))
    assert [record.task_id for record in records] == ["t1", "t3"]
    (reject,) = rejects
    assert (reject.position, reject.reason) == (1, "invalid")
    return reject


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (7, "Expected `object`, got `int`"),
        (trace(), "has no call of a model: its 0 spans"),
        (trace(observation("x")), "its 1 spans are of kind span"),
        ({"trace": 7, "observations": []}, "`trace` is int; valid: an object"),
        ({"trace": {"id": "t2"}, "observations": 7}, "`observations` is int; valid: a list"),
        (trace(HELLO, id=7), "`trace.id` is 7; valid: a text"),
        ({"id": "t2", "projectId": "p", "observations": ["a", "b"]}, "holds only ids; export the trace with"),
        (trace(generation("x", 0, ASKED, None, level="ERROR", statusMessage="429")), "failed; the last: 429"),
    ],
)
def test_a_trace_of_the_wrong_shape_is_rejected_and_the_others_are_read(tmp_path: Path, bad: Any, says: str) -> None:
    assert says in rejected(tmp_path / "f", bad).message


def test_an_observation_that_is_none_is_rejected_alone(tmp_path: Path) -> None:
    (record,), (reject,) = read_file(written(tmp_path / "f", trace(7, HELLO)))  # type: ignore[arg-type]
    assert "`observations[0].id` is 'int'" in reject.message
    assert record.extra is not None
    assert record.extra["lost_observations"] == 1


def test_of_a_document_that_ends_too_early_the_whole_observations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    text = json.dumps(trace(HELLO, generation("b", 2, "More?", "No.")))
    path.write_text(text[: text.index("More?")], "utf-8")
    (record,), (reject,) = read_file(path)
    assert reject.reason == "truncated"
    assert [step.action for step in record.steps] == ["Sunny."]
    assert record.extra is not None
    assert record.extra["truncated"] is True


def test_a_line_that_is_damaged_is_rejected_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "f"
    good = json.dumps(trace(HELLO))
    path.write_bytes(b"\n".join((good.encode(), b'{"trace": {"id"', good.replace("t1", "t2").encode(), b"\xff\xfe")))
    records, rejects = read_file(path)
    assert [record.task_id for record in records] == ["t1", "t2"]
    assert [(reject.position, reject.reason) for reject in rejects] == [(2, "malformed"), (4, "malformed")]


@pytest.mark.parametrize("broken", ["\ud800", "[" * 2000 + "]" * 2000, 2**200, float("nan")])
def test_values_that_cannot_be_stored_cost_their_trace_and_no_more(tmp_path: Path, broken: Any) -> None:
    path = tmp_path / "f"
    text = json.dumps([trace(HELLO), trace(HELLO | {"metadata": {"x": "BROKEN"}}, id="t2"), trace(HELLO, id="t3")])
    path.write_text(text.replace('"BROKEN"', broken if str(broken).startswith("[") else json.dumps(broken)), "utf-8")
    records, rejects = read_file(path)
    assert [record.task_id for record in records][::2] in (["t1", "t3"], ["t1"])
    assert len(records) + len(rejects) >= 2


VARIANTS: list[Callable[[], Any]] = [
    lambda: trace(HELLO, observation("x", "TOOL", 2, output="ok"), scores=[score("good", 1)], sessionId="s"),
    lambda: ROWS[0],
]


@pytest.mark.parametrize("make", VARIANTS)
def test_nothing_in_a_file_makes_the_reader_raise(tmp_path: Path, make: Callable[[], Any]) -> None:
    assert_never_raises(tmp_path / "f.json", make())
