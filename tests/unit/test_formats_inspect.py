"""Inspect logs: what real ones hold, by counts that know nothing of the reader, and what each rule is."""

import gc
import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lake.errors import FormatError
from lake.formats import inspect_logs
from lake.formats.base import archives
from lake.formats.base.format import read_head
from lake.formats.base.source import Meter
from lake.formats.inspect_logs import no_trajectory, recognise
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject, ScoreRecord, identify
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "inspect"
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
SYSTEM = {"id": "m0", "role": "system", "content": "You add."}
ASK = {"id": "m1", "role": "user", "source": "input", "content": "What is 1 + 2?"}
CALL = {
    "id": "m2",
    "role": "assistant",
    "source": "generate",
    "model": "small-1",
    "content": [
        {"type": "reasoning", "reasoning": "I add.", "signature": "c2ln", "redacted": False},
        {"type": "text", "text": "I call add."},
    ],
    "tool_calls": [{"id": "c1", "function": "add", "arguments": {"a": 1, "b": 2}, "type": "function"}],
}
RESULT = {"id": "m3", "role": "tool", "tool_call_id": "c1", "function": "add", "content": "3"}
ANSWER = {"id": "m4", "role": "assistant", "source": "generate", "content": "The sum is 3."}
CHAT = [SYSTEM, ASK, CALL, RESULT, ANSWER]
OUTPUT = {
    "model": "small-1",
    "choices": [{"message": ANSWER, "stop_reason": "stop"}],
    "completion": "The sum is 3.",
    "usage": {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13},
    "time": 0.5,
}
AT = "2026-01-01T10:00:00+02:00"


def model_event(output: Any = OUTPUT, **fields: Any) -> dict[str, Any]:
    event = {"event": "model", "uuid": "e1", "timestamp": AT, "completed": AT, "model": "org/small", "input": []}
    return event | {"tools": [], "tool_choice": "auto", "config": {}, "output": output} | fields


def sample(**fields: Any) -> dict[str, Any]:
    sample_fields: dict[str, Any] = {"id": "s1", "epoch": 1, "input": "What is 1 + 2?", "target": "3", "messages": CHAT}
    sample_fields |= {
        "output": OUTPUT,
        "scores": {"includes": {"value": "C", "answer": "3", "explanation": "It is there."}},
    }
    return sample_fields | {"events": [model_event()], "attachments": {}, "metadata": {"level": 1}} | fields


def log(*samples: Any, **fields: Any) -> dict[str, Any]:
    spec = {"eval_id": "eVaL1234xyz", "run_id": "r1", "task_id": "t1", "task": "sums", "model": "org/small"}
    spec |= {"created": AT, "config": {"epochs": 2}, "dataset": {"name": "d"}, "packages": {"inspect_ai": "0.3.285"}}
    head = {"version": 2, "status": "success", "eval": spec, "plan": {"steps": [], "config": {"temperature": 0.5}}}
    return head | {"samples": list(samples)} | fields


def read(path: Path, *samples: Any, **fields: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    path.write_text(json.dumps(log(*samples, **fields), indent=1), "utf-8")
    return read_file(path)


def read_one(path: Path, **fields: Any) -> EpisodeRecord:
    """The episode of a sample."""
    (record,), rejects = read(path, sample(**fields))
    assert rejects == []
    return record


def archive(path: Path, entries: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in entries.items():
            file.writestr(name, value if isinstance(value, bytes) else json.dumps(value))
    return path


def eval_file(path: Path, *samples: dict[str, Any]) -> Path:
    head = {key: value for key, value in log().items() if key != "samples"}
    named = {f"samples/{sample_line['id']}_epoch_{sample_line['epoch']}.json": sample_line for sample_line in samples}
    return archive(path, {"_journal/start.json": head, **named, "summaries.json": [], "header.json": head})


def entries_of(path: Path) -> dict[str, Any]:
    """The JSON values in an archive, by the standard library and pyarrow alone."""
    documents = {}
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            if info.compress_type == 93:
                start = info.header_offset + 30 + sum(data[info.header_offset + at] for at in (26, 28))
                packed = data[start : start + info.compress_size]
                text = pa.Codec("zstd").decompress(packed, info.file_size).to_pybytes()
            else:
                text = file.read(info)
            documents[info.filename] = json.loads(text)
    return documents


def samples_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".eval":
        return [value for name, value in entries_of(path).items() if name.startswith("samples/")]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(json.loads(text)["samples"])


def plain_counts(samples: list[dict[str, Any]]) -> Counts:
    """By the messages and scores alone."""
    acted = [m for s in samples for m in s["messages"] if m["role"] == "assistant" and m["source"] == "generate"]
    contents = [m["content"] if isinstance(m["content"], list) else [{"text": m["content"]}] for m in acted]
    rewards: list[Any] = []
    for s in samples:
        named = s["scores"] if "scores" in s else {"": s["score"]}
        on_the_way = [e["score"] for e in s.get("events", []) if e.get("intermediate") and "scorer" in e]
        values = [score["value"] for score in [*named.values(), *on_the_way]]
        rewards += [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
        rewards += values if len(values) == 1 else []
    numbers = [GRADES.get(value, value) if isinstance(value, str) else float(value) for value in rewards]
    return Counts(
        episodes=len(samples),
        decisions=len(acted),
        tool_calls=sum(len(m.get("tool_calls") or []) for m in acted),
        rewards=sorted(number for number in numbers if number == number),
        characters=sum(len(part.get("text", "")) for content in contents for part in content),
    )


# ---------------------------------------------------------------- real files

SECURITY = "2025-09-23T08-09-58-04-00_security-guide_LuxZJVwvymC3S3SyoJczxB.eval"
REAL = [SECURITY, "gen_0.3.285_addition_3epochs.eval", "gen_0.3.285_addition_3epochs.json", "log_formats.eval"]


@pytest.mark.parametrize("name", REAL)
def test_a_real_log_gives_what_it_holds(name: str) -> None:
    path = shared_data("formats", "inspect", name)
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records) == plain_counts(samples_of(path))
    assert counts(records).episodes in (1, 6, 16)


@pytest.mark.parametrize("name", ["zstd.eval", "deflate.eval", "log.json.gz", "version_1.json"])
def test_a_log_of_each_version_and_shape_gives_what_it_holds(name: str) -> None:
    records, rejects = read_file(GOLDEN / name)
    assert rejects == []
    assert counts(records) == plain_counts(samples_of(GOLDEN / name))
    assert counts(records).decisions > 1


def test_a_real_log_without_a_decision_and_a_score_is_rejected() -> None:
    records, (reject,) = read_file(shared_data("formats", "inspect", "log_tool_call_error.json"))
    assert records == []
    assert (reject.position, reject.reason) == (0, "invalid")
    assert "no decision of an" in reject.message


def test_the_same_log_is_the_same_episodes_as_archive_as_document_and_in_chunks() -> None:
    deflated, document, chunked = (
        {(r.task_id, r.rollout_index): r for r in read_file(GOLDEN / name)[0]}
        for name in ("zstd.eval", "log.json.gz", "chunked.eval")
    )
    assert document.keys() == chunked.keys() == {("loop", 0), ("7", 0)}
    for key, record in document.items():
        assert identify(record, "x") == identify(deflated[key], "x") == identify(chunked[key], "x")
        assert msgspec.json.encode(record.scores) == msgspec.json.encode(chunked[key].scores)
    assert any("/messages/5.json" in name for name in entries_of(GOLDEN / "chunked.eval")), "more than one chunk"


def test_epochs_of_a_sample_are_siblings_and_two_evals_of_a_task_are_two_runs() -> None:
    first, _ = read_file(shared_data("formats", "inspect", REAL[1]))
    second, _ = read_file(shared_data("formats", "inspect", REAL[2]))
    assert sorted((r.task_id, r.rollout_index) for r in first) == [(t, n) for t in ("7", "s1") for n in range(3)]
    assert len({identify(r, r.run_id or "").group_id for r in first}) == 2
    assert {r.run_id for r in first} == {"addition-mockllm/model-aX3SngQE"}
    assert {r.run_id for r in second} == {"addition-mockllm/model-2JxfqwLH"}
    assert {r.expected_group_size for r in first} == {3}


def test_calls_of_a_grader_are_spans_and_no_decisions() -> None:
    records, _ = read_file(shared_data("formats", "inspect", SECURITY))
    (record,) = (r for r in records if r.task_id == "14")
    assert [step.action for step in record.steps] == [
        "Use end-to-end encryption, strong access controls, regular audits, and data redundancy."
    ]
    assert (record.steps[0].model, record.steps[0].prompt_tokens, record.steps[0].finish_reason) == (
        "gpt-4o-mini-2024-07-18",
        64,
        "stop",
    )
    calls = {span.step_index: span.attributes or {} for span in record.spans if span.kind == "model"}
    assert calls.keys() == {0, None}
    assert "input" not in calls[0], "the conversation has it"
    assert calls[None]["input"][0]["content"].lstrip().startswith("You are comparing a submitted answer")
    assert record.scores[0].reason is not None
    assert "GRADE: I" in record.scores[0].reason
    assert (record.scores[0].scorer, record.scores[0].value, record.env_return) == ("model_graded_fact", 0.0, 0.0)


def test_a_log_of_0_3_100_has_its_errors_limits_and_notes() -> None:
    records, _ = read_file(GOLDEN / "deflate.eval")
    records_by_slot = {(r.task_id, r.rollout_index): r for r in records}
    loop, error, picture, shot = (
        records_by_slot["loop", 0],
        records_by_slot["error", 0],
        records_by_slot["7", 0],
        records_by_slot["shot", 0],
    )
    assert (loop.status, loop.terminated, loop.stop_reason) == ("truncated", False, "message")
    assert [step.state_is_error for step in loop.steps] == [False, True, True]
    assert "is not of type 'integer'" in (loop.steps[1].state or "")
    assert (error.status, error.error, error.env_return) == ("failed", "RuntimeError('broken down')", None)
    assert "broken down" in error.extra["error"]["traceback"]  # type: ignore[index]
    assert [span.error for span in error.spans if span.kind == "error"] == [error.error]
    assert (picture.status, picture.steps[0].finish_reason) == ("truncated", "max_tokens")
    assert picture.initial_messages is not None
    assert picture.initial_messages[1]["content"][1]["image"].startswith("data:image/png;base64,iVBOR")
    assert [m["content"] for m in shot.initial_messages or []][1:] == ["0 + 0?", "0", "1 + 2?"]
    (note,) = (span.attributes or {} for span in shot.spans if span.kind == "info")
    assert note["data"]["note"].startswith("Numbers are added digit by digit")
    assert shot.ground_truth == ["3", "three"]


def test_a_log_of_version_1_is_read() -> None:
    first, second = read_file(GOLDEN / "version_1.json")[0]
    assert (first.task_id, first.source_version, first.env_return) == ("sum", "0.3.8", 1.0)
    assert first.scores == [
        ScoreRecord(
            scorer="includes", value=1.0, reason="The sum is 3.", metrics={"answer": "The sum is 3.", "value": "C"}
        )
    ]
    assert (first.steps[0].finish_reason, first.steps[0].prompt_tokens, first.steps[0].model) == (
        "stop",
        40,
        "scripted",
    )
    assert [step.action for step in second.steps] == ["The sum is 3."]
    assert first.run_id is not None
    assert first.run_id.count("-") == 3, "task, model, and the beginnings of two ids"


def test_every_tool_offered_and_all_settings_are_kept() -> None:
    records, _ = read_file(GOLDEN / "zstd.eval")
    record = next(r for r in records if r.task_id == "sum")
    assert record.tools is not None
    assert [tool["function"]["name"] for tool in record.tools] == ["add"]
    assert record.sampling == {"temperature": 0.5}
    assert record.steps[0].prompt_tokens == 70, "40, and 30 from a cache"
    assert record.extra is not None
    assert record.extra["eval"]["config"]["message_limit"] == 7
    assert record.extra["store"] == {"asides": 1}
    assert "sample_ids" not in record.extra["eval"]["dataset"]
    assert [s.value for s in record.scores if s.scorer == "style.length"] == [13.0, 13.0]
    assert [s.step_index for s in record.scores] == [None] * 4 + [1] * 4, "the final ones, and those on the way"


def test_real_logs_without_samples_and_their_parts_are_named(tmp_path: Path) -> None:
    entries = entries_of(shared_data("formats", "inspect", SECURITY))
    for name, says in [
        ("summaries.json", "summaries of the samples"),
        ("_journal/summaries/1.json", "summaries of the samples"),
        ("reductions.json", "reduced scores"),
        ("header.json", "without samples (its status: success)"),
        ("_journal/start.json", "the beginning of an Inspect log"),
    ]:
        (tmp_path / "f.json").write_text(json.dumps(entries[name]), "utf-8")
        with pytest.raises(FormatError, match="holds no trajectory: it ") as raised:
            choose_format(tmp_path / "f.json")
        assert says in str(raised.value), name
    path = archive(tmp_path / "f.eval", {name: value for name, value in entries.items() if "samples" not in name})
    assert "without samples" in str(no_trajectory(read_head(path)))


@pytest.mark.parametrize("samples", [{"samples": []}, {"samples": None}, {"status": "cancelled"}])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_cancelled_log_without_samples_is_empty_and_told_so(tmp_path: Path, samples: Any, indent: Any) -> None:
    document = {key: value for key, value in (log() | samples).items() if key != "samples" or "samples" in samples}
    (tmp_path / "f").write_text(json.dumps(document, indent=indent), "utf-8")
    with pytest.raises(FormatError, match="an Inspect log"):
        choose_format(tmp_path / "f")


def test_no_file_of_another_format_is_taken_for_a_log() -> None:
    paths = [path for path in shared_data("formats").rglob("*") if path.is_file() and path.parent.name != "inspect"]
    assert len(paths) > 20
    for path in paths:
        head = read_head(path)
        assert not recognise(head), path
        assert no_trajectory(head) is None, path


# ---------------------------------------------------------------- identity


def test_a_log_that_is_still_written_has_the_same_episodes(tmp_path: Path) -> None:
    entries = entries_of(eval_file(tmp_path / "a.eval", sample(), sample(epoch=2)))
    complete, _ = read_file(tmp_path / "a.eval")
    del entries["header.json"], entries["samples/s1_epoch_2.json"]
    (started,), _ = read_file(archive(tmp_path / "b.eval", entries))
    assert identify(started, "") == identify(complete[0], "")


def test_a_log_that_a_newer_tool_wrote_again_has_the_same_episodes(tmp_path: Path) -> None:
    """It spells out defaults, and writes times as UTC."""
    spec = log()["eval"]
    before = read_one(tmp_path / "a")
    utc = "2026-01-01T08:00:00+00:00"
    event = model_event(timestamp=utc, completed=utc, metadata=None, pending=None)
    document = sample(events=[event], store={}, error_retries=[], role_usage={}, choices=None)
    (after,), _ = read(tmp_path / "b", document, eval=spec | {"task_args": {}, "tags": [], "metadata": None})
    assert identify(before, "") == identify(after, "")
    args = {"task_args": {"n": 1}}
    (first,), _ = read(tmp_path / "a", sample(), eval=spec | args)
    (second,), _ = read(tmp_path / "b", sample(), eval=spec | args | {"task_args_passed": {"n": 1}})
    assert identify(first, "") == identify(second, "")


@pytest.mark.parametrize(
    ("ids", "run"),
    [
        ({"eval_id": "eVaL1234xyz"}, "sums-org/small-eVaL1234"),
        ({"task_id": "t" * 20, "run_id": "r" * 20}, "sums-org/small-tttttttt-rrrrrrrr"),
        ({"run_id": "r" * 20, "model": None}, "sums-rrrrrrrr"),
        ({}, None),
    ],
)
def test_a_run_is_called_by_task_model_and_the_beginning_of_its_id(tmp_path: Path, ids: Any, run: str | None) -> None:
    spec = {"task": "sums", "model": "org/small", "created": AT} | ids
    (record,), _ = read(tmp_path / "f", sample(), eval=spec)
    assert record.run_id == run


def test_a_sample_that_was_tried_again_says_how_often_and_why(tmp_path: Path) -> None:
    failed = model_event(output={"choices": []}, uuid="e0", error="Timeout")
    retry = {"message": "it broke", "traceback": "line 1", "traceback_ansi": "line 1", "events": [failed]}
    record = read_one(tmp_path / "f", error_retries=[retry])
    assert record.attempt == 1
    attempt, call = (span for span in record.spans if span.span_id in ("attempt-0", "e0"))
    assert (attempt.kind, attempt.attributes) == ("error_retry", {"message": "it broke", "traceback": "line 1"})
    assert (call.parent_span_id, call.error, call.step_index) == ("attempt-0", "Timeout", None)


# ---------------------------------------------------------------- decisions


def test_text_reasoning_calls_and_results_have_their_places(tmp_path: Path) -> None:
    first, second = read_one(tmp_path / "f").steps
    assert (first.state, first.action, first.reasoning, first.model) == (
        "What is 1 + 2?",
        "I call add.",
        "I add.",
        "small-1",
    )
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert first.tool_calls == [{"id": "c1", "type": "function", "function": function}]
    assert first.extra == {"reasoning_part": {"signature": "c2ln"}}
    result = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3", "is_error": False}
    assert second.context == [result]
    assert (second.state, second.state_role, second.state_is_error) == ("3", "tool", False)


def test_ids_of_messages_stand_apart_so_that_siblings_start_alike(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f")
    assert record.initial_messages == [{k: v for k, v in message.items() if k != "id"} for message in (SYSTEM, ASK)]
    assert record.extra is not None
    assert record.extra["message_ids"] == ["m0", "m1", "m2", "m3", "m4"]


@pytest.mark.parametrize(
    ("fields", "is_decision"),
    [
        ({"source": "generate"}, True),
        ({"source": "input"}, False),
        ({"source": "operator"}, False),
        ({}, False),
        ({"model": "small-1"}, True),
        ({"id": "m4"}, True),
    ],
)
def test_an_assistant_message_is_a_decision_if_a_model_wrote_it(tmp_path: Path, fields: Any, is_decision: bool) -> None:
    message = {"role": "assistant", "content": "Well."} | fields
    calls = [model_event()] if "id" in fields else []
    record = read_one(tmp_path / "f", messages=[ASK, message, ASK, CALL], events=calls)
    assert ("Well." in [step.action for step in record.steps]) is is_decision
    assert len(record.steps) == 1 + is_decision


def test_where_no_message_says_who_wrote_it_all_of_the_assistant_are_decisions(tmp_path: Path) -> None:
    chat = [ASK, {"role": "assistant", "content": "Well."}]
    assert [step.action for step in read_one(tmp_path / "f", messages=chat, output={}, events=[]).steps] == ["Well."]


def test_what_a_solver_left_in_the_output_alone_is_the_decision(tmp_path: Path) -> None:
    (step,) = read_one(tmp_path / "f", messages=[SYSTEM, ASK]).steps
    assert (step.state, step.action, step.latency) == ("What is 1 + 2?", "The sum is 3.", 0.5)


def test_several_thoughts_stay_in_order_with_all_their_parts(tmp_path: Path) -> None:
    pieces = [
        {"type": "text", "text": "One. "},
        {"type": "reasoning", "reasoning": "xUzY", "summary": "Hm.", "redacted": True},
        {"type": "reasoning", "reasoning": "So.", "redacted": False},
        {"type": "text", "text": "Two."},
    ]
    step = read_one(tmp_path / "f", messages=[ASK, ANSWER | {"content": pieces}]).steps[0]
    assert (step.action, step.reasoning, step.extra) == ("One. Two.", "Hm.\nSo.", {"content": pieces})


def test_reasoning_of_early_2025_is_a_key(tmp_path: Path) -> None:
    assert read_one(tmp_path / "f", messages=[ASK, ANSWER | {"reasoning": "Hm."}]).steps[0].reasoning == "Hm."


def test_a_call_that_did_not_parse_is_no_valid_action(tmp_path: Path) -> None:
    call = {"id": "c1", "function": "add", "arguments": {}, "type": "function", "parse_error": "not JSON"}
    step = read_one(tmp_path / "f", messages=[ASK, CALL | {"tool_calls": [call]}]).steps[0]
    assert step.is_action_valid is False
    assert step.tool_calls is not None
    assert step.tool_calls[0]["parse_error"] == "not JSON"


@pytest.mark.parametrize(
    ("fields", "state", "is_error"),
    [
        ({"content": "Error in the text"}, "Error in the text", False),
        ({"content": "", "error": {"type": "timeout", "message": "too slow"}}, "too slow", True),
        ({"content": "half", "error": {"type": "timeout", "message": "too slow"}}, "half", True),
        ({"content": "", "tool_error": "too slow"}, "too slow", True),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb", False),
    ],
)
def test_a_tool_s_error_is_told_by_the_source(tmp_path: Path, fields: Any, state: str, is_error: bool) -> None:
    step = read_one(tmp_path / "f", messages=[ASK, CALL, RESULT | fields, ANSWER]).steps[1]
    assert (step.state, step.state_is_error) == (state, is_error)


def test_texts_that_stand_elsewhere_are_put_in_their_places(tmp_path: Path) -> None:
    image = {"type": "image", "image": "attachment://k1"}
    question = ASK | {
        "content": [{"type": "text", "text": "attachment://k2"}, image, {"type": "text", "text": "tc://k2"}]
    }
    events = [{"event": "info", "data": ["attachment://k2", "attachment://none"]}]
    texts = {"k1": "data:image/png;base64,AA", "k2": "Look."}
    record = read_one(tmp_path / "f", messages=[question, ANSWER], events=events, attachments=texts)
    assert record.steps[0].state == "Look.\nLook."
    assert "data:image/png;base64,AA" in json.dumps(record.initial_messages)
    assert (record.spans[0].attributes or {})["data"] == ["Look.", "attachment://none"]


def test_an_input_that_solvers_rewrote_is_kept(tmp_path: Path) -> None:
    assert "input" not in (read_one(tmp_path / "f").extra or {})
    assert (read_one(tmp_path / "f", input="1 + 2").extra or {})["input"] == "1 + 2"
    other_message = {"role": "user", "content": "Other."}
    assert (read_one(tmp_path / "f", input=[{"role": "user", "content": "What is 1 + 2?"}, other_message]).extra or {})[
        "input"
    ] == [other_message]


# ---------------------------------------------------------------- events


def test_a_call_completes_the_decision_that_it_led_to(tmp_path: Path) -> None:
    usage = {"input_tokens": 5, "output_tokens": 4, "total_tokens": 12, "input_tokens_cache_read": 3, "total_cost": 0.1}
    logprobs = {"content": [{"token": "The", "logprob": -0.1}]}
    choice = {"message": ANSWER, "stop_reason": "stop", "logprobs": logprobs}
    output = OUTPUT | {"usage": usage, "choices": [choice]}
    record = read_one(tmp_path / "f", events=[model_event(output, retries=2, config={"seed": 1})], output=output)
    step = record.steps[1]
    assert (step.prompt_tokens, step.completion_tokens, step.cost, step.latency) == (8, 4, 0.1, 0.5)
    assert (step.finish_reason, str(step.started_at)) == ("stop", "2026-01-01 08:00:00+00:00")
    assert step.extra == {"logprobs": logprobs}
    assert step.tokens is None, "tokens are texts in this format"
    (span,) = record.spans
    assert (span.kind, span.step_index, span.name) == ("model", 1, "org/small")
    assert span.attributes == {"retries": 2, "config": {"seed": 1}, "usage": usage}
    assert record.prompt_tokens is None, "the other call is not known"


def test_without_ids_a_call_is_matched_by_what_it_said_if_that_is_plain(tmp_path: Path) -> None:
    message = {"role": "assistant", "source": "generate", "content": "Yes."}
    output = {"choices": [{"message": message, "stop_reason": "stop"}], "time": 2.0}
    again = read_one(tmp_path / "f", messages=[ASK, message, ASK, message], events=[model_event(output)], output={})
    assert [step.latency for step in again.steps] == [None, None]
    once = read_one(tmp_path / "f", messages=[ASK, message], events=[model_event(output)], output={})
    assert [step.latency for step in once.steps] == [2.0]


def test_of_each_prompt_only_what_is_new_is_kept(tmp_path: Path) -> None:
    hint = {"id": "h", "role": "user", "content": "attachment://k"}
    graded = {"choices": [{"message": {"id": "g", "role": "assistant", "content": "Good."}}]}
    inline = [model_event(graded, uuid=f"e{n}", input=[SYSTEM, ASK, hint]) for n in range(3)]
    pooled = [model_event(graded, uuid=f"e{n}", input_refs=[[0, 2 + n]]) for n in range(3)]
    for events in (inline, pooled):
        pool = {"messages": [SYSTEM, ASK, hint, ANSWER], "calls": []}
        record = read_one(tmp_path / "f", events=events, events_data=pool, attachments={"k": "Hint."})
        new = [(span.attributes or {}).get("input") for span in record.spans]
        assert [message for messages in new if messages for message in messages] == [hint | {"content": "Hint."}]


def test_spans_have_their_begin_end_and_parent(tmp_path: Path) -> None:
    later = "2026-01-01T10:00:05+02:00"
    newer = [
        {"event": "span_begin", "id": "a", "span_id": "a", "type": "agent", "name": "react", "timestamp": AT},
        {"event": "tool", "uuid": "b", "span_id": "a", "id": "c1", "function": "add", "arguments": {}, "result": "3"},
        {"event": "tool", "uuid": "c", "span_id": "a", "id": "c9", "function": "sub", "arguments": {}, "result": "7"},
        {"event": "span_end", "id": "a", "timestamp": later},
    ]
    older = [
        {"event": "step", "action": "begin", "type": "agent", "name": "react", "timestamp": AT},
        *({key: value for key, value in event.items() if key not in ("span_id", "uuid")} for event in newer[1:3]),
        {"event": "step", "action": "end", "timestamp": later},
    ]
    for events in (newer, older):
        spans = read_one(tmp_path / "f", events=events).spans
        agent, known_span, other_span = sorted(spans, key=lambda span: (span.kind != "agent", span.name))
        assert (agent.kind, agent.name) == ("agent", "react")
        assert agent.started_at is not None
        assert agent.ended_at is not None
        assert (agent.ended_at - agent.started_at).total_seconds() == 5
        assert known_span.parent_span_id == other_span.parent_span_id == agent.span_id
        assert (known_span.step_index, known_span.attributes) == (0, None), "the messages have it"
        assert (other_span.step_index, other_span.attributes) == (None, {"result": "7"})


def test_changes_of_state_keep_what_stands_nowhere_else(tmp_path: Path) -> None:
    changes = [
        {"op": "add", "path": "/messages/1", "value": ANSWER},
        {"op": "replace", "path": "/metadata/level", "value": 2},
    ]
    events = [{"event": "state", "changes": changes[:1]}, {"event": "state", "changes": changes}]
    (span,) = read_one(tmp_path / "f", events=events).spans
    assert span.attributes == {"changes": changes[1:]}


def test_events_inside_a_tool_are_told_apart_and_ids_that_are_there_twice_too(tmp_path: Path) -> None:
    inner = {"event": "info", "uuid": "x", "source": "scan", "data": 1}
    tool = {"event": "tool", "uuid": "x", "id": "c1", "function": "add", "arguments": {}, "events": [inner]}
    outer, nested = read_one(tmp_path / "f", events=[tool]).spans
    assert (nested.parent_span_id, nested.name, nested.span_id != outer.span_id) == ("x", "scan", True)


def test_a_score_on_the_way_belongs_to_the_decision_before_it(tmp_path: Path) -> None:
    way = {"event": "score", "intermediate": True, "scorer": "includes", "score": {"value": 0.25}}
    first = model_event({"choices": [{"message": CALL}]}, uuid="e0")
    events = [way | {"score": {"value": 9}}, first, way, model_event(), way | {"scorer": None}]
    record = read_one(tmp_path / "f", events=events)
    assert [(s.scorer, s.value, s.step_index) for s in record.scores] == [
        ("includes", 1.0, None),
        ("includes", 0.25, 0),
    ]
    unknown = [
        span.attributes or {} for span in record.spans if span.kind == "score" and "score" in (span.attributes or {})
    ]
    assert [attributes["score"]["value"] for attributes in unknown] == [9, 0.25], "before any decision; of no scorer"


# ---------------------------------------------------------------- scores and ends


@pytest.mark.parametrize(
    ("value", "number", "raw"),
    [
        ("C", 1.0, "C"),
        ("P", 0.5, "P"),
        ("I", 0.0, "I"),
        ("N", 0.0, "N"),
        ("yes", None, "yes"),
        (True, 1.0, True),
        (0, 0.0, None),
        (0.25, 0.25, None),
        (float("nan"), None, "nan"),
        (float("inf"), None, "inf"),
        (None, None, None),
        ([1, 2], None, [1, 2]),
    ],
)
def test_a_score_is_a_number_where_it_is_one_and_stays_what_it_was(
    tmp_path: Path, value: Any, number: float | None, raw: Any
) -> None:
    record = read_one(tmp_path / "f", scores={"s": {"value": value}})
    (score,) = record.scores
    assert score.value == number
    assert (score.metrics or {}).get("value") == raw
    assert record.env_return == number


def test_each_part_of_a_score_is_a_score(tmp_path: Path) -> None:
    score_fields = {
        "value": {"a": "C", "b": 2, "c": float("nan")},
        "explanation": "Well.",
        "reason": "refusal",
        "history": [],
    }
    record = read_one(tmp_path / "f", scores={"s": score_fields})
    assert [(s.scorer, s.value) for s in record.scores] == [("s", None), ("s.a", 1.0), ("s.b", 2.0), ("s.c", None)]
    assert record.scores[0].reason == "Well."
    assert (record.scores[0].metrics or {})["reason"] == "refusal"
    assert record.env_return is None


def test_the_return_is_the_score_where_the_eval_has_one_scorer(tmp_path: Path) -> None:
    named = log()["eval"] | {"scorers": [{"name": "a"}, {"name": "b"}]}
    assert read_one(tmp_path / "f").env_return == 1.0
    assert read_one(tmp_path / "f", scores={"a": {"value": 1}, "b": {"value": 1}}).env_return is None
    (record,), _ = read(tmp_path / "f", sample(), eval=named)
    assert record.env_return is None, "the other scorer did not score this sample"


def test_edits_of_a_score_are_kept(tmp_path: Path) -> None:
    history = [{"value": "I"}, {"value": "C", "provenance": {"author": "me"}}]
    record = read_one(tmp_path / "f", scores={"s": {"value": "C", "history": history}})
    assert (record.scores[0].value, (record.scores[0].metrics or {})["history"]) == (1.0, history)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ("completed", True, "stop")),
        ({"limit": {"type": "token", "limit": 9}}, ("truncated", False, "token")),
        ({"limit": {"type": "operator", "limit": 1}}, ("aborted", None, "operator")),
        ({"error": {"message": "broken", "traceback": "t"}}, ("failed", None, None)),
        ({"error": {"message": "broken"}, "limit": {"type": "time"}}, ("failed", None, None)),
    ],
)
def test_an_error_or_a_limit_says_how_it_ended(tmp_path: Path, fields: Any, end: Any) -> None:
    record = read_one(tmp_path / "f", **fields)
    assert (record.status, record.terminated, record.stop_reason) == end
    assert record.error == ("broken" if "error" in fields else None)


def test_a_sample_without_decisions_counts_by_its_score(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f", messages=[ASK], output={}, events=[])
    assert [(step.action, step.trainable) for step in record.steps] == [("", False)]
    assert record.env_return == 1.0


# ---------------------------------------------------------------- versions and damage


@pytest.mark.parametrize("version", [1, 2, 3])
def test_versions_1_to_3_are_read(tmp_path: Path, version: int) -> None:
    (record,), _ = read(tmp_path / "f", sample(), version=version)
    assert len(record.steps) == 2


def test_events_and_texts_of_2024_stand_under_transcript(tmp_path: Path) -> None:
    document = sample(messages=[ASK | {"content": "tc://k"}, ANSWER])
    document["transcript"] = {"events": document.pop("events"), "content": {"k": "Sum?"}}
    del document["attachments"]
    (record,), _ = read(tmp_path / "f", document)
    assert record.steps[0].state == "Sum?"
    assert [span.kind for span in record.spans] == ["model"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [(4, "unsupported"), (99, "unsupported"), (0, "invalid"), ("2", "invalid"), (True, "invalid")],
)
def test_an_unknown_version_is_refused_once(tmp_path: Path, version: Any, reason: str) -> None:
    records, (reject,) = read(tmp_path / "f", sample(), sample(epoch=2), version=version)
    assert (records, reject.position, reject.reason) == ([], 0, reason)
    assert "1 to 3" in reject.message
    path = eval_file(tmp_path / "f.eval", sample())
    head = log(version=version)
    path = archive(path, entries_of(path) | {"header.json": head, "_journal/start.json": head})
    records, (reject,) = read_file(path)
    assert (records, reject.reason) == ([], reason)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (7, "Expected `object`, got `int`"),
        (sample(epoch=0), "`$.epoch`"),
        (sample(id=None), "missing required field `id`"),
        (sample(id=1.5), "`$.id`"),
        (sample(messages={}), "`$.messages`"),
        (sample(messages=["hi"]), "`$.messages[0]`"),
        (sample(messages=[{"content": "hi"}]), "`messages[0].role` is None"),
        (sample(messages=[ASK | {"content": 5}, ANSWER]), "is int; valid: text, or parts"),
        (sample(messages=[CALL | {"tool_calls": [{"id": 1}]}]), "`messages[0].tool_calls[0]` is not a call"),
        (sample(scores={"s": 1}), "`$.scores[...]`"),
        (sample(events=[{"no": "event"}]), "`events[0]` is not an event"),
        (sample(attachments={"k": 1}), "`$.attachments[...]`"),
        (sample(messages=[ASK | {"content": "lone \ud800"}, ANSWER]), "cannot be stored as UTF-8"),
        (sample(messages=[ASK], output={}, scores={}), "no decision of an agent, and no outcome"),
    ],
)
def test_a_bad_sample_is_rejected_by_its_place_and_the_others_are_read(tmp_path: Path, bad: Any, says: str) -> None:
    records, (reject,) = read(tmp_path / "f", sample(), bad, sample(epoch=2))
    assert [record.rollout_index for record in records] == [0, 1]
    assert (reject.position, reject.reason) == (1, "invalid")
    assert says in reject.message
    good = eval_file(tmp_path / "f.eval", sample(), sample(epoch=2))
    records, (reject,) = read_file(archive(good, entries_of(good) | {"samples/x_epoch_1.json": bad}))
    assert len(records) == 2
    assert reject.message.startswith("samples/x_epoch_1.json: ")
    assert says in reject.message


def test_a_document_that_is_cut_keeps_the_samples_before(tmp_path: Path) -> None:
    text = json.dumps(log(sample(), sample(epoch=2), sample(epoch=3)), indent=1)
    cut = text.index('"epoch": 3') - 20
    (tmp_path / "f").write_text(text[:cut], "utf-8")
    records, (reject,) = read_file(tmp_path / "f")
    assert [record.rollout_index for record in records] == [0, 1]
    assert (reject.position, reject.reason) == (2, "truncated")


def test_an_archive_that_is_cut_keeps_the_samples_before(tmp_path: Path) -> None:
    path = eval_file(tmp_path / "f.eval", *(sample(id=f"s{n}") for n in range(3)))
    data = path.read_bytes()
    inside = data.index(b"samples/s2_epoch_1.json") + 60
    for cut, count in ((inside, 2), (data.index(b"summaries.json"), 3), (len(data) - 5, 3)):
        path.write_bytes(data[:cut])
        records, (reject,) = read_file(path)
        assert len(records) == count
        assert (reject.position, reject.reason) == (count, "truncated")
        assert "its directory is missing" in reject.message
    assert "ends inside" not in reject.message
    for cut in range(0, len(data), 97):
        path.write_bytes(data[:cut])
        try:
            read_file(path)
        except FormatError:
            continue


@pytest.mark.parametrize("name", ["zstd.eval", "deflate.eval", "chunked.eval"])
def test_a_sample_whose_data_is_damaged_is_rejected_by_its_name(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / "f.eval", bytearray((GOLDEN / name).read_bytes())
    episodes, _ = read_file(GOLDEN / name)
    with zipfile.ZipFile(GOLDEN / name) as file:
        entry = next(info for info in file.infolist() if info.filename.startswith("samples/loop_epoch_1"))
    data[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 0xFF
    path.write_bytes(data)
    records, (reject,) = read_file(path)
    assert len(records) == len(episodes) - 1
    assert reject.reason == "malformed"
    assert reject.message.startswith(f"{entry.filename}: its ")


def test_a_header_that_is_damaged_is_taken_from_the_start(tmp_path: Path) -> None:
    path = eval_file(tmp_path / "f.eval", sample())
    entries = entries_of(path)
    (record,), rejects = read_file(archive(path, entries | {"header.json": b"{"}))
    assert (record.run_id, rejects) == ("sums-org/small-eVaL1234", [])
    records, (reject,) = read_file(archive(path, entries | {"header.json": b"{", "_journal/start.json": b"["}))
    assert (records, reject.reason) == ([], "invalid")
    assert "header.json: not JSON" in reject.message
    assert "_journal/start.json: not JSON" in reject.message


def test_a_chunk_that_is_missing_or_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_logs, "_MAX_MESSAGES", 20)
    entries = entries_of(GOLDEN / "chunked.eval")
    prefix = "samples/loop_epoch_1"
    shell = entries[f"{prefix}/sample.json"]
    without = {name: value for name, value in entries.items() if name != f"{prefix}/events/0.json"}
    for document, says in [
        (without, "events/5.json: a chunk before it is missing"),
        (entries | {f"{prefix}/messages/0.json": {}}, "messages/0.json: it is not a list"),
        (entries | {f"{prefix}/events/5.json": b"["}, "events/5.json: not JSON"),
        (
            entries | {f"{prefix}/sample.json": shell | {"message_refs": [[0, 99]]}},
            "`message_refs` holds [0, 99]; valid: ranges of the 7",
        ),
        (entries | {f"{prefix}/sample.json": shell | {"message_refs": [0]}}, "`message_refs` holds 0;"),
        (entries | {f"{prefix}/sample.json": shell | {"message_refs": [[0, 2]] * 11}}, "`message_refs` holds [0, 2];"),
    ]:
        records, (reject,) = read_file(archive(tmp_path / "f.eval", document))
        assert [record.task_id for record in records] == ["7"]
        assert says in reject.message


def test_what_stands_in_samples_of_chunks_is_read_once(tmp_path: Path) -> None:
    entries = entries_of(GOLDEN / "chunked.eval")
    del entries["samples/7_epoch_1/sample.json"]
    (record,), _ = read_file(archive(tmp_path / "f.eval", entries | {"samples/note.txt": b"hi"}))
    assert record.task_id == "loop"
    assert (record.extra or {}).get("metadata") is None, "there may be none"


def test_an_entry_that_cannot_be_unpacked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = eval_file(tmp_path / "f.eval", sample(), sample(epoch=2))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_LZMA) as file:
        file.writestr("samples/lzma_epoch_1.json", json.dumps(sample()))
    records, (reject,) = read_file(path)
    assert len(records) == 2
    assert all(part in reject.message for part in ("method 14", "0 (stored)", "8 (deflate)", "93 (zstd)"))
    (entry, *_), _ = archives.list_entries(path)
    for field, wrong, says in [
        ("is_encrypted", True, "it is encrypted"),
        ("offset", -9, "no such entry stands at byte -9"),
        ("offset", 1, "no such entry stands at byte 1"),
        ("packed", 1 << 60, "no such entry stands at byte 0"),
        ("crc", 0, "(CRC-32)"),
        ("length", 1 << 40, "valid: at most 1024 MB"),
    ]:
        with path.open("rb") as file, pytest.raises(archives.EntryError) as raised:
            msgspec.structs.replace(entry, **{field: wrong}).read(file)
        assert says in str(raised.value)
    monkeypatch.setattr(archives, "ENTRY_LIMIT", 900)
    _, rejects = read_file(eval_file(path, sample()))
    assert ["valid: at most 0 MB" in reject.message for reject in rejects] == [True]


class Pipe(io.BytesIO):
    """A stream that cannot go back."""

    def tell(self) -> int:
        raise OSError


def test_entries_of_a_cut_archive_are_found_if_they_say_where_they_end(tmp_path: Path) -> None:
    head, path = {key: value for key, value in log().items() if key != "samples"}, tmp_path / "f.eval"
    for stream, count, says in [(io.BytesIO(), 2, "2 whole entries"), (Pipe(), 0, "ends it does not say")]:
        with zipfile.ZipFile(stream, "w") as file:
            for name, value in {"_journal/start.json": head, "samples/s1_epoch_1.json": sample()}.items():
                with file.open(name, "w", force_zip64=True) as entry:
                    entry.write(json.dumps(value).encode())
        path.write_bytes(stream.getvalue())
        assert len(read_file(path)[0]) == 1
        path.write_bytes(stream.getvalue()[:-70])
        entries, fault = archives.list_entries(path)
        assert len(entries) == count
        assert says in str(fault)


def test_an_archive_is_read_sample_by_sample(tmp_path: Path) -> None:
    path, meter = eval_file(tmp_path / "f.eval", *(sample(id=f"s{n}") for n in range(20))), Meter()
    records = FORMATS["inspect"].read(path, meter)
    next(records)
    assert meter.done < path.stat().st_size / 4
    assert len(list(records)) == 19


@pytest.mark.parametrize("name", ["zstd.eval", "deflate.eval", "chunked.eval", "log.json.gz"])
def test_reading_leaves_nothing_to_the_garbage_collector(name: str) -> None:
    """Ingest stops it: a sample that is part of a cycle would stay in memory permanently."""
    list(FORMATS["inspect"].read(GOLDEN / name))
    gc.disable()
    gc.freeze()  # earlier objects are not looked at
    try:
        list(FORMATS["inspect"].read(GOLDEN / name))
        assert gc.collect() == 0
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "utf-16"])
def test_other_encodings_are_read_or_told(tmp_path: Path, encoding: str) -> None:
    text = json.dumps(log(sample(), sample(epoch=2, metadata={"who": "Zoë"})), indent=1, ensure_ascii=False)
    (tmp_path / "f").write_bytes(text.encode(encoding))
    try:
        records, rejects = read_file(tmp_path / "f")
    except FormatError:
        assert encoding == "utf-16"
        return
    assert len(records) == (2 if encoding == "utf-8-sig" else 1)
    assert [(r.position, r.reason) for r in rejects] == ([] if encoding == "utf-8-sig" else [(1, "invalid")])


def test_nothing_that_a_log_holds_raises(tmp_path: Path) -> None:
    events = [
        {"event": "span_begin", "id": "a", "type": "agent", "name": "react", "timestamp": AT},
        model_event(),
        {"event": "tool", "id": "c1", "function": "add", "arguments": {}, "error": {"type": "x", "message": "y"}},
        {"event": "score", "intermediate": True, "scorer": "a", "score": {"value": 1}, "target": "3"},
        {"event": "state", "changes": [{"op": "add", "path": "/a"}]},
        {"event": "error", "error": {"message": "m"}},
        {"event": "span_end", "id": "a"},
    ]
    full = sample(events=events, messages=[ASK, CALL, RESULT], limit={"type": "time"}, error_retries=[{"events": []}])
    assert_never_raises(tmp_path / "f", log(full | {"events_data": {"messages": [ASK]}}))


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_nesting_that_is_too_deep_is_rejected_alone(tmp_path: Path, depth: int) -> None:
    deep = json.dumps(sample(metadata="deep")).replace('"deep"', "[" * depth + "]" * depth)
    path = eval_file(tmp_path / "f.eval", sample(epoch=2))
    records, rejects = read_file(archive(path, entries_of(path) | {"samples/s1_epoch_1.json": deep.encode()}))
    assert len(records) + len(rejects) == 2
    assert depth < 500 or len(rejects) == 1
