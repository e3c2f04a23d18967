"""SWE-agent trajectories of 0.x, early 1.0 and 1.x, and demonstrations. Those of 1.x are built from the field table."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject, identify
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

SYSTEM = {"role": "system", "content": "You program.", "agent": "main", "message_type": "system_prompt"}
TASK = {"role": "user", "content": "Fix the colon.", "agent": "main", "message_type": "observation"}
SHOWN = {"role": "user", "content": "main.py\n(Open file: n/a)\nbash-$", "agent": "main", "message_type": "observation"}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def entry(response: str, action: str = "ls", observation: str = "main.py", **fields: Any) -> dict[str, Any]:
    """An entry of a trajectory of 1.x."""
    entry_fields = {"action": action, "observation": observation, "response": response, "thought": response}
    return entry_fields | {"execution_time": 0.25, "state": {"working_dir": "/repo"}, "extra_info": {}} | fields


def model_message(response: str, action: str = "ls", **fields: Any) -> dict[str, Any]:
    """What the history has of it."""
    return {"role": "assistant", "content": response, "thought": response, "action": action, "agent": "main"} | (
        {"tool_calls": None, "message_type": "action", "thinking_blocks": []} | fields
    )


def trajectory(*entries: Any, **fields: Any) -> dict[str, Any]:
    """A trajectory of 1.x of two calls."""
    sent = [SYSTEM, TASK]
    first, second = (
        entry("I look.", query=sent),
        entry("Done.", "submit", "+:", query=[*sent, model_message("I look."), SHOWN]),
    )
    stats = {"instance_cost": 0.5, "tokens_sent": 70, "tokens_received": 9, "api_calls": 2}
    info = {"exit_status": "submitted", "submission": "+:", "model_stats": stats, "swe_agent_version": "1.1.0"}
    config = {
        "agent": {"model": {"name": "gpt-4o", "temperature": 0.0, "top_p": 1.0, "api_key": "sk-1"}},
        "problem_statement": {"type": "github", "id": "test__repo-1"},
    }
    return {
        "trajectory": list(entries) or [first, second],
        "history": [*sent, model_message("I look.", tool_calls=[CALL]), SHOWN, model_message("Done.", "submit")],
        "info": info,
        "replay_config": json.dumps(config),
        "environment": "main",
    } | fields


def read(path: Path, value: Any) -> list[tuple[int, EpisodeRecord] | Reject]:
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=2), "utf-8")
    return list(FORMATS["swe_agent"].read(path))


def record(path: Path, value: Any) -> EpisodeRecord:
    (item,) = read(path, value)
    assert isinstance(item, tuple), item
    return item[1]


# ---------------------------------------------------------------- real files


def test_a_real_trajectory_of_0_x_holds_what_its_json_says() -> None:
    path = shared_data("formats", "swe_agent", "swe-agent__test-repo-i1.traj")
    document = json.loads(path.read_text("utf-8"))
    ((episode,), rejects) = read_file(path)
    entries = document["trajectory"]
    assert not rejects
    assert counts([episode]).decisions == len(entries)
    assert counts([episode]).characters == sum(len(entry["response"]) for entry in entries)
    assert episode.task_id == "swe-agent__test-repo-i1"
    assert episode.initial_messages is not None
    assert [bool(message.get("is_demo")) for message in episode.initial_messages] == [False, True, False]
    observations = [message["content"] for message in document["history"] if message["role"] == "user"]
    assert [step.state for step in episode.steps[1:]] == observations[2:], (
        "as the model saw it, with the prompt of the shell"
    )
    assert [(step.extra or {})["state"] for step in episode.steps] == [entry["state"] for entry in entries]
    assert episode.final_observation == [{"role": "user", "content": entries[-1]["observation"]}]
    assert (episode.stop_reason, episode.terminated, episode.cost) == ("submitted", True, 0.53839)
    assert (episode.prompt_tokens, episode.completion_tokens) == (52861, 326)
    assert (episode.extra or {})["info"]["submission"] == document["info"]["submission"]


def test_a_real_demonstration_holds_its_assistant_entries() -> None:
    path = shared_data("formats", "swe_agent", "function_calling_simple.traj")
    history = [m for m in json.loads(path.read_text("utf-8"))["history"] if m["role"] == "assistant"]
    ((episode,), rejects) = read_file(path)
    totals = counts([episode])
    assert not rejects
    assert totals.decisions == len(history)
    assert totals.tool_calls == sum(len(message["tool_calls"]) for message in history)
    assert totals.characters == sum(len(message["content"]) for message in history)
    assert [step.tool_calls for step in episode.steps] == [message["tool_calls"] for message in history]
    assert episode.steps[1].context[0]["tool_call_id"] == history[0]["tool_calls"][0]["id"]


# ---------------------------------------------------------------- rules


def test_a_trajectory_of_1_x_says_what_was_seen_called_and_asked_of_which_model(tmp_path: Path) -> None:
    episode = record(tmp_path / "other.traj", trajectory())
    assert (episode.task_id, episode.policy, episode.source_version) == ("test__repo-1", "gpt-4o", "1.1.0")
    assert episode.sampling == {"temperature": 0.0, "top_p": 1.0}
    assert [step.state for step in episode.steps] == ["Fix the colon.", SHOWN["content"]]
    assert [step.tool_calls for step in episode.steps] == [[CALL], None]
    assert "sk-1" not in str(episode.extra), "keys are no part of a lake"


def test_the_prompt_that_each_entry_repeats_is_dropped(tmp_path: Path) -> None:
    text = str(record(tmp_path / "f", trajectory()))
    assert text.count("You program.") == 1


@pytest.mark.parametrize("name", ["query", "messages"])
def test_what_the_model_had_to_say_again_is_a_decision_that_the_history_lacks(tmp_path: Path, name: str) -> None:
    sent = [SYSTEM, TASK]
    again = [*sent, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "No command was found."}]
    entries = [
        entry("Hm.", "", "") | {name: sent},
        entry("I look.") | {name: again},
        entry("Done.", "submit") | {name: [*sent, model_message("I look."), SHOWN]},
    ]
    episode = record(tmp_path / "f", trajectory(*entries))
    assert [step.state for step in episode.steps] == ["Fix the colon.", "No command was found.", SHOWN["content"]]
    assert [step.tool_calls for step in episode.steps] == [None, [CALL], None]
    assert [step.is_action_valid for step in episode.steps] == [False, None, None]


def test_an_entry_without_a_call_is_not_trained_on(tmp_path: Path) -> None:
    entries = [entry("I look.", query=[SYSTEM, TASK]), entry("Exit due to cost limit", "", "", query=[{}])]
    info = {"exit_status": "submitted (exit_cost)", "submission": "+:"}
    episode = record(tmp_path / "f", trajectory(*entries, info=info))
    assert [step.trainable for step in episode.steps] == [True, False]
    assert (episode.status, episode.terminated, episode.stop_reason) == ("truncated", False, "submitted (exit_cost)")
    old = [entry("I look."), entry("", "exit_cost", "")]
    assert [step.trainable for step in record(tmp_path / "f", trajectory(*old)).steps] == [True, False]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("submitted", ("completed", True)),
        ("exit_forfeit", ("completed", True)),
        ("exit_context", ("truncated", False)),
        ("submitted (exit_total_execution_time)", ("truncated", False)),
        ("exit_format", ("failed", None)),
        ("submitted (exit_environment_error)", ("failed", None)),
        ("something_new", ("completed", None)),
        (None, ("aborted", None)),
    ],
)
def test_the_exit_status_says_how_it_ended(tmp_path: Path, status: str | None, expected: tuple[str, bool]) -> None:
    episode = record(tmp_path / "f", trajectory(info={"exit_status": status}))
    assert ((episode.status, episode.terminated), episode.stop_reason) == (expected, status)


def test_thinking_is_reasoning_and_its_signature_is_kept(tmp_path: Path) -> None:
    blocks = [{"type": "thinking", "thinking": "Where is it?", "signature": "abc"}]
    history = [SYSTEM, TASK, model_message("I look.", thinking_blocks=blocks), SHOWN, model_message("Done.", "submit")]
    step = record(tmp_path / "f", trajectory(history=history)).steps[0]
    assert (step.reasoning, (step.extra or {})["thinking_blocks"]) == ("Where is it?", blocks)


def test_demonstrations_in_the_prompt_are_no_decisions(tmp_path: Path) -> None:
    messages = [SYSTEM, model_message("I look.", is_demo=True), TASK]
    entries = [entry("I look.")]
    for value in (
        trajectory(*entries, history=[*messages, model_message("I look.")]),
        {"history": [*messages, model_message("I look.")]},
    ):
        episode = record(tmp_path / "f", value)
        assert [step.action for step in episode.steps] == ["I look."]
        assert episode.initial_messages is not None
        assert [message["role"] for message in episode.initial_messages] == ["system", "assistant", "user"]


def test_what_the_tool_cut_of_an_observation_is_kept(tmp_path: Path) -> None:
    long = "line\n" * 100
    step = record(tmp_path / "f", trajectory(entry("I look.", observation=long), entry("Done.", "submit"))).steps[0]
    assert (step.extra or {})["observation"] == long


def test_attempts_are_siblings_and_a_score_says_which_was_chosen(tmp_path: Path) -> None:
    review = {"accept": 0.5, "outputs": ["fair"]}
    other_attempt = trajectory(
        entry("I guess.", execution_time=0.5), info={"exit_status": "submitted", "review": review}
    )
    chosen_attempt = trajectory()
    info = chosen_attempt["info"] | {"best_attempt_idx": 1, "rloop_model_stats": {"instance_cost": 2.0}}
    items = read(tmp_path / "f", {"attempts": [other_attempt, chosen_attempt]} | chosen_attempt | {"info": info})
    first, second = (item[1] for item in items if isinstance(item, tuple))
    assert first.task_id == second.task_id
    assert first.rollout_index != second.rollout_index
    assert [(score.scorer, score.value) for score in first.scores] == [("review", 0.5), ("best_attempt", 0.0)]
    assert [(score.scorer, score.value) for score in second.scores] == [("best_attempt", 1.0)]
    alone = record(tmp_path / "attempt_1.traj", chosen_attempt)
    assert identify(alone, "run") == identify(second, "run"), "the attempt's own file is the same episode"


def test_rollouts_of_an_instance_are_told_apart_by_their_first_entry(tmp_path: Path) -> None:
    first = record(tmp_path / "f", trajectory(entry("I look."), entry("Done.")))
    grown = record(tmp_path / "g", trajectory(entry("I look."), entry("Done."), entry("More.")))
    other_record = record(tmp_path / "f", trajectory(entry("I look.", execution_time=0.3), entry("Done.")))
    assert first.rollout_index == grown.rollout_index != other_record.rollout_index


# ---------------------------------------------------------------- damage


def test_another_major_version_is_unsupported(tmp_path: Path) -> None:
    (rejected,) = read(tmp_path / "f", trajectory(info={"swe_agent_version": "2.0.1"}))
    assert isinstance(rejected, Reject)
    assert rejected.reason == "unsupported"
    assert all(version in rejected.message for version in ("2.0.1", "0.x", "1.x"))


def test_a_document_that_ends_too_early_keeps_its_whole_entries(tmp_path: Path) -> None:
    text = json.dumps(trajectory(), indent=2)
    episode, lost = read(tmp_path / "f", text[: text.index('"replay_config"') + 30])
    assert isinstance(episode, tuple)
    assert isinstance(lost, Reject)
    assert (lost.position, lost.reason, episode[1].status) == (0, "truncated", "aborted")
    assert [step.action for step in episode[1].steps] == ["I look.", "Done."]
    second = text.index('"response": "Done."')
    episode, lost = read(tmp_path / "f", text[:second])
    assert isinstance(episode, tuple)
    assert [step.action for step in episode[1].steps] == ["I look."]
    assert episode[1].initial_messages is not None
    assert len(episode[1].initial_messages) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"trajectory": [entry("I look.", observation=7)]}, "at `$.trajectory[0].observation`"),
        ({"trajectory": [{"action": "ls"}]}, "missing required field `response` - at `$.trajectory[0]`"),
        ({"trajectory": {}}, "at `$.trajectory`"),
        ({"history": [{"content": "?"}]}, "`history[0].role` is None"),
        ({"trajectory": [entry("I look.", query=[{"role": "user", "content": 7}])]}, "`trajectory[0].query[0]` is int"),
        ({"info": []}, "at `$.info`"),
        ({"trajectory": []}, "no decision of an agent"),
    ],
)
def test_a_document_of_the_wrong_shape_is_rejected_with_its_path(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    (rejected,) = read(tmp_path / "f", trajectory(**fields))
    assert isinstance(rejected, Reject)
    assert (rejected.position, rejected.reason) == (0, "invalid")
    assert says in rejected.message


def test_bytes_that_are_no_text_reject_the_document(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(json.dumps(trajectory(), indent=2).replace("I look.", "caf\xe9").encode("latin-1"))
    (rejected,) = FORMATS["swe_agent"].read(path)
    assert isinstance(rejected, Reject)
    assert rejected.reason == "malformed"


def test_nothing_that_a_trajectory_holds_raises(tmp_path: Path) -> None:
    assert_never_raises(tmp_path / "f.traj", trajectory())
    assert_never_raises(tmp_path / "f.traj", {"attempts": [trajectory()], "info": {"best_attempt_idx": 0}})
    assert_never_raises(tmp_path / "f.traj", {"history": trajectory()["history"]})
