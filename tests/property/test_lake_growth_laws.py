"""Which documents are readings of one rollout: in every format of documents that grow, and in any order of ingest.

The oracle knows nothing of keys: of the documents that share an id, those count that no other document extends.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import Lake, StepRecord
from lake.write.growth import is_extension, list_paths, names_same_file
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.episodes import assert_whole, episode
from testkit.examples import examples
from testkit.shared import shared_data

Actions = tuple[str, ...]
ASK = "Which way?"


def at(second: int) -> str:
    return f"2026-01-02T10:00:{second:02d}.000Z"


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def write_atif(actions: Actions, name: str) -> str:
    turns = [[{"source": "user", "message": ASK}, {"source": "agent", "message": action}] for action in actions]
    steps = [step | {"step_id": index} for index, step in enumerate((s for turn in turns for s in turn), 1)]
    return json.dumps(
        {"schema_version": "ATIF-v1.6", "session_id": "shared", "agent": {"name": "a", "version": "1"}, "steps": steps}
    )


def write_openhands(actions: Actions, name: str) -> str:
    def message(number: int, source: str, role: str, text: str) -> dict[str, Any]:
        content = {"role": role, "content": [{"type": "text", "text": text}]}
        event = {"kind": "MessageEvent", "id": f"e{number}", "timestamp": at(number), "source": source}
        return event | {"llm_message": content} | ({"llm_response_id": f"r{number}"} if role == "assistant" else {})

    events = []
    for index, action in enumerate(actions):
        events += [message(2 * index, "user", "user", ASK), message(2 * index + 1, "agent", "assistant", action)]
    return lines(*events)


def write_claude_code(actions: Actions, name: str) -> str:
    session = []
    for index, action in enumerate(actions):
        asked, parent = f"u{index}", f"a{index - 1}" if index else None
        common = {"cwd": "/shop", "sessionId": "s1", "version": "2.0.14", "isSidechain": False}
        user = {"type": "user", "uuid": asked, "parentUuid": parent, "message": {"role": "user", "content": ASK}}
        answer = {"role": "assistant", "model": "m", "content": [{"type": "text", "text": action}]}
        message = answer | {"id": f"msg_{name}_{index}", "usage": {"input_tokens": 1, "output_tokens": 1}}
        model = {"type": "assistant", "uuid": f"a{index}", "parentUuid": asked, "message": message}
        session += [common | {"timestamp": at(index)} | line for line in (user, model)]
    return lines(*session)


def write_codex(actions: Actions, name: str) -> str:
    def line(kind: str, second: int, **payload: Any) -> dict[str, Any]:
        return {"timestamp": at(second), "type": kind, "payload": payload}

    def message(second: int, role: str, kind: str, text: str) -> dict[str, Any]:
        return line("response_item", second, type="message", role=role, content=[{"type": kind, "text": text}])

    rollout = "01a20000-0000-7000-8000-000000000000"
    session = [line("session_meta", 0, id=rollout, timestamp=at(0), cwd="/home/user/shop", cli_version="0.89.0")]
    for index, action in enumerate(actions):
        session += [message(index, "user", "input_text", ASK), message(index, "assistant", "output_text", action)]
    return lines(*session)


def write_mini_swe_agent(actions: Actions, name: str) -> str:
    messages = [{"role": "system", "content": "You program."}]
    for action in actions:
        messages += [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": action, "extra": {"timestamp": 1.0}},
        ]
    info = {"exit_status": "Submitted", "submission": "+", "mini_version": "2.4.6", "config": {"model": {}}}
    document = {"info": info, "messages": messages, "trajectory_format": "mini-swe-agent-1.1", "instance_id": "i"}
    return json.dumps(document)


def write_mini_swe_agent_0(actions: Actions, name: str) -> str:
    """Without times."""
    return write_mini_swe_agent(actions, name).replace('"timestamp"', '"cost"')


def write_swe_agent(actions: Actions, name: str) -> str:
    fields = {"observation": ASK, "state": {}}
    trajectory = [fields | {"action": action, "response": action, "thought": action} for action in actions]
    history = [{"role": "user", "content": ASK, "agent": "main"}]
    for action in actions:
        history += [
            {"role": "assistant", "content": action, "thought": action, "action": action, "agent": "main"},
            {"role": "user", "content": ASK, "agent": "main"},
        ]
    config = json.dumps({"problem_statement": {"id": "t"}, "agent": {}})
    return json.dumps(
        {"environment": "main", "trajectory": trajectory, "history": history, "info": {}, "replay_config": config}
    )


def write_gemini_cli(actions: Actions, name: str) -> str:
    head = {"sessionId": "s1", "projectHash": "p", "startTime": at(0), "kind": "main"}
    chat = []
    for index, action in enumerate(actions):
        chat += [
            {"id": f"u{index}", "timestamp": at(index), "type": "user", "content": ASK},
            {"id": f"{name}{index}", "timestamp": at(index), "type": "gemini", "content": action, "model": "m"},
        ]
    return lines(head, *chat)


FORMATS: dict[str, tuple[Callable[[Actions, str], str], str]] = {
    "atif": (write_atif, ".json"),
    "openhands": (write_openhands, ".jsonl"),
    "claude_code": (write_claude_code, ".jsonl"),
    "codex": (write_codex, ".jsonl"),
    "mini_swe_agent": (write_mini_swe_agent, ".traj.json"),
    "mini_swe_agent_0": (write_mini_swe_agent_0, ".traj.json"),
    "swe_agent": (write_swe_agent, ".traj"),
    "gemini_cli": (write_gemini_cli, ".jsonl"),
}
DOCUMENTS: list[Actions] = [("north",), ("north", "south"), ("north", "west"), ("north", "west", "south"), ("south",)]
ANY_DOCUMENTS = st.lists(
    st.lists(st.sampled_from(["north", "south", "west"]), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8
)


def list_visible(lk: Lake) -> list[Actions]:
    assert_whole(lk.snapshot())
    rows = lk.sql("SELECT list(action ORDER BY step_index) FROM steps GROUP BY episode_id").rows()
    return sorted(tuple(actions) for (actions,) in rows)


def select_longest(documents: Sequence[Actions]) -> list[Actions]:
    """The documents that no other one extends."""
    return sorted(one for one in documents if not any(other != one and other[: len(one)] == one for other in documents))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 2, 1)])
def test_what_no_other_document_extends_counts(fmt: str, order: Sequence[int], tmp_path: Path) -> None:
    """A folder is read in the order of its names."""
    (write, suffix), lk, run = FORMATS[fmt], empty_lake(tmp_path / "lake"), tmp_path / "run"
    run.mkdir()
    for number, document in enumerate(order):
        (run / f"d{number}{suffix}").write_text(write(DOCUMENTS[document], f"d{number}"))
    report = ingest(lk, run)
    visible = list_visible(lk)
    assert visible == select_longest(DOCUMENTS)
    assert (report.records, report.rejected) == (len(DOCUMENTS), 0)
    assert report.new - report.replaced == len(visible)
    assert report.present == report.shorter
    again = ingest(lk, run, batch_size=2)
    assert (again.new, again.present, again.shorter) == (0, len(DOCUMENTS), report.shorter)
    assert list_visible(lk) == visible


@settings(max_examples=examples(12))
@given(documents=ANY_DOCUMENTS, data=st.data())
def test_any_documents_in_any_order_and_any_batches(
    documents: list[Actions], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lk = empty_lake(tmp_path_factory.mktemp("any") / "lake")
    waiting, new, replaced = list(documents), 0, 0
    while waiting:
        size = data.draw(st.integers(1, len(waiting)))
        records = [
            episode("shared", steps=0, run_id="run", source_uri=f"{'-'.join(actions)}.json")
            for actions in waiting[:size]
        ]
        for record, actions in zip(records, waiting, strict=False):
            record.steps = [StepRecord(state=None, action=action) for action in actions]
        with lk.job(kind="ingest", run_id="run") as job:
            counts = job.record_checked(records, range(size), session_positions=range(size))
        assert (counts.new + counts.present, counts.rejected) == (size, 0)
        new, replaced, waiting = new + counts.new, replaced + counts.replaced, waiting[size:]
    assert list_visible(lk) == select_longest(list(set(documents)))
    assert new - replaced == len(list_visible(lk))


@pytest.mark.parametrize("fmt", ["atif", "claude_code"])
def test_a_file_that_is_written_again_with_other_steps_is_said_and_loses_nothing(fmt: str, tmp_path: Path) -> None:
    write, suffix = FORMATS[fmt]
    lk, path = empty_lake(tmp_path / "lake"), tmp_path / f"d{suffix}"
    seen = []
    for actions in (("north", "south"), ("north", "so"), ("north",), ("north", "west"), ("north", "west", "south")):
        path.write_text(write(actions, "d"))
        report = ingest(lk, path, run_id="run")
        seen.append((report.new, report.replaced, report.siblings, report.shorter))
    assert seen == [(1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 1), (1, 0, 1, 0), (1, 1, 0, 0)]
    assert list_visible(lk) == [("north", "south"), ("north", "west", "south")]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("03_atif_siblings/25c_atif_eight", 8),
        ("03_atif_siblings/25d_atif_minimal", 4),
        ("03_atif_siblings/25b_atif_same_session_noid", 2),
        ("14_openhands_critic_attempts/run", 3),
    ],
)
def test_rollouts_that_were_reported_as_one_are_each_an_episode(case: str, expected: int, tmp_path: Path) -> None:
    lk, source = empty_lake(tmp_path / "lake"), shared_data("cases", *case.split("/"))
    report = ingest(lk, source)
    assert (report.new, report.replaced, report.rejected) == (expected, 0, 0)
    assert len(list_visible(lk)) == expected
    assert ingest(lk, source).new == 0


Decisions = st.lists(
    st.tuples(st.sampled_from(["a", "ab", "b"]), st.sampled_from([None, '["x"]', '["x","y"]'])), max_size=4
)


@given(earlier=Decisions, later=Decisions)
def test_an_extension_begins_with_what_was_decided(earlier: list[Any], later: list[Any]) -> None:
    assert is_extension(later, earlier) == (later[: len(earlier)] == earlier)
    assert is_extension([*earlier, *later], earlier, is_same_file=True)
    if earlier and is_extension(later, earlier, is_same_file=True):
        assert len(later) >= len(earlier)
        assert later[: len(earlier) - 1] == earlier[:-1]


def test_the_last_decision_of_a_file_may_have_been_incomplete() -> None:
    half = [("go", None), ("I lo", '["x"]')]
    for whole, is_grown in ((("I look", '["x","y"]'), True), (("I look", None), False), (("You", '["x"]'), False)):
        assert is_extension([half[0], whole], half, is_same_file=True) == is_grown
        assert not is_extension([half[0], whole], half)


def test_paths_of_forks_begin_where_they_left() -> None:
    forks = {"main": [("first", 0)], "first": [("second", 0)]}
    steps = {name: [(f"{name}{n}", None) for n in range(2)] for name in ("main", "first", "second")}
    paths = list_paths("main", steps.__getitem__, lambda name: forks.get(name, ()))
    assert [[action for action, _ in path] for path in paths] == [
        ["main0", "main1"],
        ["main0", "first0", "first1"],
        ["main0", "first0", "second0", "second1"],
    ]


@pytest.mark.parametrize(
    ("name", "other", "is_same"),
    [("a/b.json", "b.json", True), ("b.json", "a/b.json", True), ("ab.json", "b.json", False), ("", "b.json", False)],
)
def test_a_file_is_named_by_a_path_below_the_folder_that_was_given(name: str, other: str, is_same: bool) -> None:
    assert names_same_file(name, other) is is_same


@pytest.mark.parametrize("whole", ['{"path": "a.py"}', {"path": "a.py"}], ids=["text", "object"])
def test_a_call_whose_arguments_still_come_is_the_beginning_of_the_whole_call(whole: Any) -> None:
    def decide(arguments: Any, name: str = "read") -> tuple[str, str]:
        return "", json.dumps([{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}])

    for part in ('{"path"', '{"path":"a'):
        assert is_extension([decide(whole)], [decide(part)], is_same_file=True)
        assert not is_extension([decide(whole)], [decide(part)])
        assert not is_extension([decide(whole)], [decide(part, name="write")], is_same_file=True)
        assert not is_extension([decide(part)], [decide(whole)], is_same_file=True)
    assert not is_extension([decide(whole)], [decide('{"name')], is_same_file=True)
