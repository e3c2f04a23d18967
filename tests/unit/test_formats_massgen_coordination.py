"""MassGen's coordination logs of 2025: text by agent, without boundaries of calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data


def log(**fields: Any) -> dict[str, Any]:
    chunk = {"timestamp": "2025-08-02T23:59:35", "type": "thinking", "content": "Paris"}
    return {
        "metadata": {"start_time": "2025-08-02T23:59:32", "status": "completed", "logger_version": "1.0"},
        "session": {"question": "Where?", "agent_ids": ["a", "b", "c"], "final_answer": ""},
        "agent_outputs": {"a": [chunk, chunk | {"type": "status", "content": "."}], "b": [chunk], "c": []},
        "orchestrator_events": [{"timestamp": "2025-08-02T23:59:36", "event": "FINAL: a"}],
        "aggregated_responses": {
            "orchestrator": {"other_content": "Starting"},
            "a": {"thinking": "", "other_content": "Paris.", "first_timestamp": "t"},
            "b": {"other_content": "Rome"},
        },
        "workflow_analysis": {"votes": 0},
    } | fields


def read(path: Path, value: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=2), "utf-8")
    return read_file(path)


def test_a_real_log_is_read_whole() -> None:
    path = shared_data("formats", "massgen", "mass_coordination_20250802_235932.json")
    value = json.loads(path.read_text("utf-8"))
    texts = ["".join(chunk["content"] for chunk in chunks) for chunks in value["agent_outputs"].values()]
    records, rejects = read_file(path)
    assert rejects == []
    assert counts(records) == Counts(len(texts), len(texts), 0, [], sum(map(len, texts)))
    (record,) = records
    assert (record.task_id, record.agent_id, record.status) == (value["session"]["question"], "agent1", "completed")
    assert len(record.spans) == len(value["orchestrator_events"])
    assert record.source_version == "1.0"
    assert set((record.extra or {})["aggregated_responses"]["agent1"]) == {"first_timestamp", "last_timestamp"}


def test_all_that_an_agent_put_out_is_one_decision_that_is_not_trained_on(tmp_path: Path) -> None:
    (first, second), _ = read(tmp_path / "m.json", log())
    (step,) = first.steps
    assert (step.action, step.state, step.trainable) == ("Paris.", "Where?", False)
    assert [(piece["type"], piece["characters"]) for piece in (step.extra or {})["chunks"]] == [
        ("thinking", 5),
        ("status", 1),
    ]
    assert (first.agent_id, second.agent_id) == ("a", "b")
    assert first.rollout_index == second.rollout_index
    (other_record, _), _ = read(
        tmp_path / "n.json", log(metadata=log()["metadata"] | {"start_time": "2026-01-01T00:00:00"})
    )
    assert other_record.rollout_index != first.rollout_index, "another session about the same question is a sibling"


def test_summaries_that_say_something_else_are_kept(tmp_path: Path) -> None:
    (first, second), _ = read(tmp_path / "m.json", log())
    assert (first.extra or {})["aggregated_responses"] == {
        "a": {"first_timestamp": "t"},
        "orchestrator": {"other_content": "Starting"},
    }
    assert (second.extra or {})["aggregated_responses"]["b"] == {"other_content": "Rome"}


@pytest.mark.parametrize(
    ("status", "is_called"), [("failed", "failed"), ("in_progress", "aborted"), (None, "completed")]
)
def test_how_a_session_ended(tmp_path: Path, status: str | None, is_called: str) -> None:
    (first, _), _ = read(tmp_path / "m.json", log(metadata=log()["metadata"] | {"status": status}))
    assert first.status == is_called


def test_a_newer_version_is_not_guessed_at(tmp_path: Path) -> None:
    records, (reject,) = read(tmp_path / "m.json", log(metadata={"logger_version": "2.0"}))
    assert records == []
    assert reject.reason == "unsupported"
    assert "'2.0'; known: 1.0" in reject.message


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (json.dumps(log(), indent=2)[:-200], "truncated"),
        (json.dumps(log(), indent=2).replace('"a": [', '"a": ]', 1), "malformed"),
        (json.dumps(log(agent_outputs={"a": [{"type": "thinking"}]}), indent=2), "invalid"),
        (json.dumps(log(session=None), indent=2), "invalid"),
        (json.dumps(log(agent_outputs={"a": [], "b": []}), indent=2), "invalid"),
    ],
)
def test_a_damaged_log_is_rejected(tmp_path: Path, value: str, reason: str) -> None:
    (tmp_path / "m.json").write_text(value)
    (reject,) = FORMATS["massgen_coordination"].read(tmp_path / "m.json")
    assert isinstance(reject, Reject)
    assert (reject.position, reject.reason) == (0, reason)


def test_bytes_that_are_no_text_are_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(json.dumps(log(), indent=2).encode().replace(b"Paris", b"Par\xffis", 1))
    records, (reject,) = read_file(path)
    assert records == []
    assert reject.reason == "malformed"


def test_no_file_makes_the_reader_raise(tmp_path: Path) -> None:
    assert_never_raises(tmp_path / "m.json", log())
