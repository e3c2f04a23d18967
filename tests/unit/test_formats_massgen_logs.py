"""MassGen's session logs: what agents handed in, what they saw, who won, and files that are damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.errors import FormatError
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.massgen_files import TASK, event, session, session_events, write_session


def agents(tmp_path: Path, **fields: Any) -> tuple[EpisodeRecord, EpisodeRecord]:
    (first, second), rejects = read_file(write_session(tmp_path, session(**fields)))
    assert rejects == []
    return first, second


def test_a_session_is_read_whole(tmp_path: Path) -> None:
    records, rejects = read_file(write_session(tmp_path))
    assert rejects == []
    assert counts(records) == Counts(2, 5, 2, [0.0, 1.0], len("Paris.") + len("Lyon?") + len("It is Paris."))
    assert {record.task_id for record in records} == {TASK}
    assert [record.agent_id for record in records] == ["agent_a", "agent_b"]
    assert len({record.rollout_index for record in records}) == 1, "the agents of a session belong together"


def test_what_an_agent_hands_in_is_a_decision_and_its_context_the_state(tmp_path: Path) -> None:
    first, second = agents(tmp_path)
    answer, vote = first.steps
    assert (answer.action, answer.state) == ("Lyon?", f"{TASK}\nReceived context with 0 answers")
    assert (vote.action, vote.state) == ("", "CURRENT ANSWERS: <agent2.1> Paris.")
    assert (vote.tool_calls or [])[0]["function"] == {
        "name": "vote",
        "arguments": {"voted_for": "agent_b", "reason": "It is better."},
    }
    assert (vote.extra or {})["vote"]["voter_id"] == "agent_a"
    assert [step.action for step in second.steps] == ["Paris.", "", "It is Paris."]


@pytest.mark.parametrize("with_mappings", [True, False])
def test_the_texts_are_found_by_the_mappings_or_by_their_order(tmp_path: Path, with_mappings: bool) -> None:
    records, _ = read_file(write_session(tmp_path, with_mappings=with_mappings))
    assert [[step.action for step in record.steps] for record in records] == [
        ["Lyon?", ""],
        ["Paris.", "", "It is Paris."],
    ]


def test_the_others_choose_the_winner(tmp_path: Path) -> None:
    first, second = agents(tmp_path)
    assert [(score.scorer, score.value, score.metrics) for score in (*first.scores, *second.scores)] == [
        ("final_winner", 0.0, {"votes": 0}),
        ("final_winner", 1.0, {"votes": 2}),
    ]
    assert first.env_return is None


def test_events_of_an_agent_and_of_the_session_are_spans(tmp_path: Path) -> None:
    first, _ = agents(tmp_path)
    events = session_events()
    assert [span.attributes for span in first.spans] == [
        log_event for log_event in events if log_event["agent_id"] in ("agent_a", None)
    ]
    assert [span.step_index for span in first.spans] == [None, None, 0, None, 1, None]


def test_how_a_session_ended_for_an_agent(tmp_path: Path) -> None:
    late = event("agent_timeout", 7, "agent_a", "TIMEOUT: 60s")
    first, second = agents(tmp_path, events=[*session_events(), late])
    assert (first.status, first.terminated, first.error) == ("truncated", False, "TIMEOUT: 60s")
    assert (second.status, second.terminated) == ("completed", True)
    metadata = session()["session_metadata"] | {"end_time": None, "final_winner": None}
    first, second = agents(tmp_path, events=session_events()[:4], session_metadata=metadata)
    assert (first.status, second.status) == ("aborted", "aborted")
    assert first.scores == []


def test_a_text_that_is_missing_loses_no_decision(tmp_path: Path) -> None:
    path = write_session(tmp_path, with_mappings=False)
    (tmp_path / "agent_a" / "20251101_120003_000000" / "answer.txt").unlink()
    (first, _), _ = read_file(path)
    assert first.steps[0].action == ""
    assert (first.steps[0].extra or {})["missing"] == "answer.txt"


def test_mappings_lead_nowhere_outside_of_the_folder(tmp_path: Path) -> None:
    path = write_session(tmp_path / "log")
    (tmp_path / "answer.txt").write_text("secret")
    mappings = {"agent1.1": {"type": "answer", "label": "agent1.1", "agent_id": "agent_a", "path": "../answer.txt"}}
    (tmp_path / "log" / "snapshot_mappings.json").write_text(json.dumps(mappings))
    hostile = session()
    hostile["events"][3]["agent_id"] = hostile["session_metadata"]["agent_ids"][0] = ".."
    for value in (session(), hostile):
        path.write_text(json.dumps(value))
        records, _ = read_file(path)
        assert "secret" not in [step.action for record in records for step in record.steps]


def test_events_alone_as_older_versions_wrote_them(tmp_path: Path) -> None:
    path = write_session(tmp_path, session_events())
    records, rejects = read_file(path)
    assert rejects == []
    assert [(record.agent_id, len(record.steps)) for record in records] == [("agent_a", 2), ("agent_b", 3)]
    assert records[0].task_id.startswith("session 1762000000")
    text = json.dumps(session_events(), indent=1)
    path.write_text(text[: text.rindex('"session_end"')])
    records, (reject,) = read_file(path)
    assert len(records) == 2
    assert (reject.position, reject.reason) == (9, "truncated")


def test_the_other_files_of_a_session_are_named_as_what_they_are(tmp_path: Path) -> None:
    write_session(tmp_path)
    text_event = {
        "timestamp": "2025-11-01T12:00:00",
        "event_type": "text",
        "agent_id": "a",
        "round_number": 0,
        "data": {},
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(text_event) + "\n")
    for name, says in (
        ("snapshot_mappings.json", "where the answers"),
        ("agent_a/20251101_120005_000000/vote.json", "a single vote"),
        ("events.jsonl", "screen output"),
    ):
        with pytest.raises(FormatError, match=says):
            choose_format(tmp_path / name)


def test_a_session_that_is_cut_keeps_its_events_until_then(tmp_path: Path) -> None:
    path = write_session(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.rindex('"vote_cast"')])
    records, (reject,) = read_file(path)
    assert [len(record.steps) for record in records] == [2, 1]
    assert (reject.position, reject.reason) == (0, "truncated")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"events": {}}, "at `$.events`"),
        ({"events": [5]}, "at `$.events[0]`"),
        ({"events": [event("new_answer", 0, 5)]}, "at `$.events[0].agent_id`"),
        ({"session_metadata": []}, "at `$.session_metadata`"),
        ({"events": [], "session_metadata": {"agent_ids": ["a"]}}, "none of the 0 events is an answer"),
    ],
)
def test_a_wrong_session_is_rejected(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    path = write_session(tmp_path, session(**fields))
    (reject,) = FORMATS["massgen_logs"].read(path)
    assert isinstance(reject, Reject)
    assert reject.reason == "invalid"
    assert says in reject.message


def test_no_file_makes_the_reader_raise(tmp_path: Path) -> None:
    path = write_session(tmp_path)
    assert_never_raises(path, session())
    assert_never_raises(path, session_events())
    mappings = json.loads((tmp_path / "snapshot_mappings.json").read_text())
    for damaged in ("{", "[]", json.dumps(dict.fromkeys(mappings, 5)), json.dumps({"agent1.1": {"path": "\0"}})):
        (tmp_path / "snapshot_mappings.json").write_text(damaged)
        path.write_text(json.dumps(session()))
        assert len(read_file(path)[0]) == 2
