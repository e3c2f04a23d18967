"""mini-swe-agent runs: of the tool itself with scripted models (1 and 1.1), bare lists, and what damage leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject
from testkit.formats import assert_never_raises, counts, damaged, read_file
from testkit.shared import shared_data

FOLDER = Path(__file__).parents[1] / "golden/formats/mini_swe_agent"
SYSTEM = {"role": "system", "content": "Finish with echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT."}
TASK = {"role": "user", "content": "Say hello."}
SEEN = {"role": "user", "content": "<returncode>0</returncode>"}


def model_message(text: str, **extra: Any) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": text} | ({"extra": extra} if extra else {})


def run(*messages: Any, **fields: Any) -> dict[str, Any]:
    """A document of 1.1."""
    chat = list(messages) or [
        SYSTEM,
        TASK,
        model_message("I look.", cost=0.5, timestamp=10.0),
        SEEN,
        model_message("Done."),
    ]
    info = {"exit_status": "Submitted", "submission": "+", "mini_version": "2.4.6", "config": {"model": {}}}
    return {"info": info, "messages": chat, "trajectory_format": "mini-swe-agent-1.1", "instance_id": "i"} | fields


def read(path: Path, value: Any) -> list[tuple[int, EpisodeRecord] | Reject]:
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=2), "utf-8")
    return list(FORMATS["mini_swe_agent"].read(path))


def record(path: Path, value: Any) -> EpisodeRecord:
    (item,) = read(path, value)
    assert isinstance(item, tuple), item
    return item[1]


def counted(messages: list[Any]) -> tuple[int, int, int]:
    """Assistant's messages, their calls and the characters of their texts, by the JSON alone."""
    decisions = calls = characters = 0
    for message in messages:
        if message.get("role") == "assistant":
            decisions += 1
            calls += len(message.get("tool_calls") or ())
            characters += len(message["content"] or "")
        for item in message["output"] if isinstance(message.get("output"), list) else ():
            calls += item["type"] == "function_call"
            characters += sum(len(part["text"]) for part in item.get("content") or ())
        decisions += isinstance(message.get("output"), list)
    return decisions, calls, characters


# ---------------------------------------------------------------- real files


def test_a_real_bare_list_holds_what_its_json_says() -> None:
    path = shared_data("formats", "mini_swe_agent", "github_issue.traj.json")
    ((episode,), rejects) = read_file(path)
    messages = json.loads(path.read_text("utf-8"))
    totals = counts([episode])
    assert not rejects
    assert (totals.decisions, totals.tool_calls, totals.characters) == counted(messages)
    assert [step.state for step in episode.steps[1:]] == [m["content"] for m in messages[3:-1] if m["role"] == "user"]
    assert episode.final_observation == messages[-1:]
    assert (episode.status, episode.terminated, episode.task_id[:7]) == ("completed", None, "prompt-")


@pytest.mark.parametrize("name", ["text", "calls", "responses", "limit"])
def test_a_run_of_the_tool_holds_what_its_json_says(name: str) -> None:
    path = FOLDER / f"{name}.traj.json"
    document = json.loads(path.read_text("utf-8"))
    ((episode,), rejects) = read_file(path)
    totals = counts([episode])
    assert not rejects
    assert (totals.decisions, totals.tool_calls, totals.characters) == counted(document["messages"])
    assert (episode.task_id, episode.source_version) == (document["instance_id"], document["trajectory_format"])
    assert (episode.stop_reason, episode.cost) == (
        document["info"]["exit_status"],
        document["info"]["model_stats"]["instance_cost"],
    )
    assert (episode.extra or {})["info"]["submission"] == document["info"]["submission"]
    assert episode.policy == document["info"]["config"]["model"]["model_name"]


def test_what_the_answer_repeats_is_left_out_and_the_rest_is_known() -> None:
    ((episode,), _) = read_file(FOLDER / "calls.traj.json")
    first, second = episode.steps
    assert (first.model, first.finish_reason, first.reasoning) == ("scripted-1", "tool_calls", "Which command?")
    assert (first.prompt_tokens, first.completion_tokens, first.cost) == (11, 4, 1.0)
    assert (episode.prompt_tokens, episode.completion_tokens) == (22, 8)
    assert first.extra == {"extra": {"timestamp": 1_780_000_000.0, "response": {"id": "chatcmpl-2"}}}
    assert [message["tool_call_id"] for message in second.context] == ["call_0", "call_1"]
    assert [message["extra"]["returncode"] for message in second.context] == [0, 1]


def test_items_of_the_responses_api_are_messages() -> None:
    ((episode,), _) = read_file(FOLDER / "responses.traj.json")
    first, second = episode.steps
    assert (first.action, first.state) == ("I look.", "Task: Say hello.")
    arguments = '{"command": "echo hello"}'
    assert first.tool_calls == [
        {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    ]
    assert (second.state_role, second.context[0]["tool_call_id"]) == ("tool", "call_0")
    assert second.context[0]["extra"]["raw_output"] == "hello\n"


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Submitted", ("completed", True)),
        ("LimitsExceeded", ("truncated", False)),
        ("TimeExceeded", ("truncated", False)),
        ("UserInterruption", ("aborted", None)),
        ("RepeatedFormatError", ("failed", None)),
        ("", ("aborted", None)),
        (None, ("completed", None)),
    ],
)
def test_the_exit_status_says_how_it_ended(tmp_path: Path, status: str | None, expected: tuple[str, Any]) -> None:
    episode = record(tmp_path / "f", run(info={"exit_status": status, "mini_version": "2.4.6"}))
    assert ((episode.status, episode.terminated), episode.stop_reason) == (expected, status or None)


def test_an_exception_is_the_error(tmp_path: Path) -> None:
    info = {"exit_status": "RuntimeError", "exception_str": "no more disk", "mini_version": "2.4.6"}
    assert record(tmp_path / "f", run(info=info)).error == "no more disk"


def test_exact_tokens_of_an_engine_are_taken(tmp_path: Path) -> None:
    def answered(*ids: list[int]) -> dict[str, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": "I look."}, "token_ids": ids[1]}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5} for _ in ids[1]]}
        return model_message("I look.", response={"id": "r", "choices": [choice], "prompt_token_ids": ids[0]})

    messages = [SYSTEM, TASK, answered([1, 2], [3]), SEEN, answered([1, 2, 3, 4], [5, 6])]
    tokens = [step.tokens for step in record(tmp_path / "f", run(*messages)).steps if step.tokens]
    assert [(t.context_ids, t.action_ids, t.action_logprobs) for t in tokens] == [
        ([1, 2], [3], [-0.5]),
        ([4], [5, 6], [-0.5, -0.5]),
    ]


def test_runs_of_an_instance_are_told_apart_by_their_first_answer(tmp_path: Path) -> None:
    first = record(tmp_path / "f", run())
    grown = record(tmp_path / "g", run(*run()["messages"], SEEN, model_message("More.")))
    other_record = record(tmp_path / "f", run(SYSTEM, TASK, model_message("I look.", timestamp=11.0)))
    assert first.rollout_index == grown.rollout_index != other_record.rollout_index


def test_a_bare_list_is_known_by_the_tools_words_or_by_its_name(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "You are kind."}, TASK, model_message("Hello.")]
    recognise = FORMATS["mini_swe_agent"].recognise
    from lake.formats.base.format import read_head

    def looks(name: str, value: Any) -> bool:
        (tmp_path / name).write_text(json.dumps(value), "utf-8")
        return recognise(read_head(tmp_path / name))

    assert looks("a.json", [SYSTEM, TASK, model_message("Hello.")])
    assert looks("a.traj.json", chat)
    assert not looks("a.json", chat)
    assert not looks("a.traj.json", [{"messages": chat}])


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("version", ["mini-swe-agent-2", "mini-swe-agent-1.2"])
def test_another_version_is_unsupported(tmp_path: Path, version: str) -> None:
    (rejected,) = read(tmp_path / "f", run(trajectory_format=version))
    assert isinstance(rejected, Reject)
    assert rejected.reason == "unsupported"
    assert "known: mini-swe-agent-1 to mini-swe-agent-1.1" in rejected.message


def test_a_document_that_ends_too_early_keeps_its_whole_messages(tmp_path: Path) -> None:
    text = json.dumps(run(), indent=2)
    episode, lost = read(tmp_path / "f", text[: text.index("Done.")])
    assert isinstance(episode, tuple)
    assert isinstance(lost, Reject)
    assert [step.action for step in episode[1].steps] == ["I look."]
    assert (episode[1].status, (episode[1].extra or {})["is_cut"]) == ("aborted", True)
    assert (lost.position, lost.reason) == (0, "truncated")


def test_a_run_of_the_first_versions_is_known_by_what_it_says_of_its_end(tmp_path: Path) -> None:
    info = {"exit_status": "LimitsExceeded", "submission": "", "model_stats": {"instance_cost": 0.5, "api_calls": 1}}
    messages = [{"role": "system", "content": "You help."}, TASK, model_message("I look."), SEEN]
    (tmp_path / "x.json").write_text(json.dumps({"info": info, "messages": messages}))
    ((episode,), rejects) = read_file(tmp_path / "x.json")
    assert (episode.source_format, episode.status, episode.cost, rejects) == ("mini_swe_agent", "truncated", 0.5, [])


def test_a_bare_list_keeps_the_messages_that_are_whole(tmp_path: Path) -> None:
    chat = [SYSTEM, TASK, model_message("I look."), {"role": 7, "content": "?"}, SEEN, model_message("Done.")]
    text = json.dumps(chat)
    wrong, episode = read(tmp_path / "f", text)
    assert isinstance(wrong, Reject)
    assert (wrong.position, wrong.reason) == (3, "invalid")
    assert "`messages[3].role` is 7" in wrong.message
    assert isinstance(episode, tuple)
    assert [step.action for step in episode[1].steps] == ["I look.", "Done."]
    assert (episode[1].extra or {})["lost_messages"] == 1
    *_, cut, episode = read(tmp_path / "f", text[: text.index("Done.")])
    assert isinstance(cut, Reject)
    assert (cut.position, cut.reason) == (5, "truncated")
    assert isinstance(episode, tuple)
    assert (len(episode[1].steps), episode[1].status) == (1, "aborted")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": {}}, "at `$.messages`"),
        ({"messages": [TASK, {"content": "?"}]}, "`messages[1].role` is None"),
        ({"messages": [TASK, {"object": "response", "output": 7}]}, "`messages[1].output` is int"),
        ({"info": {"exit_status": 7}}, "at `$.info.exit_status`"),
        ({"messages": [TASK]}, "no decision of an agent"),
    ],
)
def test_a_document_of_the_wrong_shape_is_rejected_with_its_path(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    (rejected,) = read(tmp_path / "f", run(**fields))
    assert isinstance(rejected, Reject)
    assert (rejected.position, rejected.reason) == (0, "invalid")
    assert says in rejected.message


def test_bytes_that_are_no_text_reject_only_their_message(tmp_path: Path) -> None:
    path = tmp_path / "f.traj.json"
    text = json.dumps([SYSTEM, TASK, model_message("caf\xe9"), SEEN, model_message("Done.")], ensure_ascii=False)
    path.write_bytes(text.encode("latin-1"))
    wrong, episode = FORMATS["mini_swe_agent"].read(path)
    assert isinstance(wrong, Reject)
    assert (wrong.position, wrong.reason) == (2, "invalid")
    assert isinstance(episode, tuple)
    assert [step.action for step in episode[1].steps] == ["Done."]


def test_nothing_that_a_run_holds_raises(tmp_path: Path) -> None:
    for name in ("calls", "responses"):
        document = json.loads((FOLDER / f"{name}.traj.json").read_text("utf-8"))
        del document["info"]["config"]["model"]["outputs"]
        assert_never_raises(tmp_path / "f.traj.json", document)
    chat = [SYSTEM, TASK, model_message("I look.", timestamp=1), SEEN]
    for changed in damaged(chat):
        read(tmp_path / "f.traj.json", changed)
