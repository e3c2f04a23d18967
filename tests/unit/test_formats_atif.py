"""ATIF documents and Harbor's trials: real ones counted, a rule a test, and what damage leaves."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lake import ids
from lake.errors import FormatError
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject, identify
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

JOB = Path(__file__).parents[1] / "golden/formats/harbor/2026-01-01__00-00-00"
USER = {"step_id": 1, "source": "user", "message": "How much is it?"}
CALL = {"tool_call_id": "c", "function_name": "ask", "arguments": {"q": "7?"}}


def agent(number: int = 2, message: Any = "It is 7.", **fields: Any) -> dict[str, Any]:
    """A step of the agent."""
    return {"step_id": number, "source": "agent", "message": message} | fields


def document(*steps: Any, **fields: Any) -> dict[str, Any]:
    """A document."""
    steps_given = list(steps) or [USER, agent()]
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "agent": {"name": "a", "version": "1"},
        "steps": steps_given,
    } | (fields)


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def read(path: Path, value: Any) -> list[tuple[int, EpisodeRecord] | Reject]:
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1), "utf-8")
    return list(FORMATS["atif"].read(path))


def record(path: Path, value: Any) -> EpisodeRecord:
    (item,) = read(path, value)
    assert isinstance(item, tuple), item
    return item[1]


def reject(path: Path, value: Any) -> Reject:
    (item,) = read(path, value)
    assert isinstance(item, Reject)
    return item


def text_id(record: EpisodeRecord, run_id: str = "trajectory") -> str:
    return ids.to_text(identify(record, record.run_id or run_id).episode_id)


def counted(*paths: Path) -> tuple[int, int, int, int]:
    """Documents, agent's steps, their calls and the characters of their texts, by the JSON alone."""
    documents, steps = 0, []
    todo = [json.loads(path.read_text("utf-8")) for path in paths]
    while todo:
        node = todo.pop()
        todo += node.get("subagent_trajectories") or []
        documents += 1
        steps += [step for step in node["steps"] if step["source"] == "agent"]
    calls = sum(len(step.get("tool_calls") or ()) for step in steps)
    return documents, len(steps), calls, sum(len(step["message"]) for step in steps)


# ---------------------------------------------------------------- real files


@pytest.mark.parametrize(
    "name", ["gen_trial_v18/agent/trajectory.json", "nat/exmp01_atif.json", "nat/exmp02_atif.json"]
)
def test_real_documents_hold_what_their_json_says(name: str) -> None:
    path = shared_data("formats", "atif", name)
    records, rejects = read_file(path)
    server_counts = counts(records)
    assert not rejects
    assert (
        server_counts.episodes,
        server_counts.decisions,
        server_counts.tool_calls,
        server_counts.characters,
    ) == counted(path)


def test_a_real_trial_gives_rewards_tokens_and_its_sub_agent() -> None:
    path = shared_data("formats", "atif", "gen_trial_v18", "agent", "trajectory.json")
    trial = json.loads((path.parents[1] / "result.json").read_text("utf-8"))
    main, helper = read_file(path)[0]
    assert main.task_id == trial["task_name"]
    assert {score.scorer: score.value for score in main.scores} == trial["verifier_result"]["rewards"]
    assert main.env_return == trial["verifier_result"]["rewards"]["reward"]
    (detail,) = trial["agent_result"]["rollout_details"]
    with_tokens = [step.tokens for step in main.steps if step.tokens]
    assert [tokens.action_ids for tokens in with_tokens] == detail["completion_token_ids"]
    assert [tokens.action_logprobs for tokens in with_tokens] == detail["logprobs"]
    assert [tokens.context_ids for tokens in with_tokens] == [[1, 2, 3], [6]], "the second prompt extends the first"
    assert (helper.relation, helper.parent_step_index, helper.parent_episode_id) == ("subagent", 0, text_id(main))
    assert [(step.is_copied_context, step.trainable) for step in main.steps] == [
        (False, False),
        (True, False),
        (False, False),
        (False, False),
    ]
    sounds = ["'audio'" in (step.extra or {}).get("not_trainable", "") for step in main.steps]
    assert sounds == [True, False, False, True], "what it was asked holds one, for which tokens are placeholders"
    assert [(step.extra or {}).get("llm_call_count") for step in main.steps] == [None, None, 0, 2]
    assert "rollout_details" not in (main.extra or {}), "a repetition of the steps' own tokens"


def test_the_result_beside_a_trajectory_is_its_companion() -> None:
    trial = shared_data("formats", "atif", "gen_trial_v18")
    for name in ("result.json", "verifier/reward.json", "verifier/reward.txt"):
        with pytest.raises(FormatError, match=r"holds no trajectory: it .* read together with"):
            choose_format(trial / name)


# ---------------------------------------------------------------- a job, written by Harbor's own models


def test_a_job_of_harbor_holds_what_its_json_says() -> None:
    paths = sorted(JOB.glob("**/trajectory*.json"))
    records = [record for path in paths for record in read_file(path)[0]]
    server_counts = counts(records)
    assert (
        server_counts.episodes,
        server_counts.decisions,
        server_counts.tool_calls,
        server_counts.characters,
    ) == counted(*paths)
    assert {record.run_id for record in records} == {JOB.name}
    assert server_counts.rewards == [0.0, 0.0, 0.75, 0.75, 1.0, 1.0, 1.0]
    keys = {identify(record, "run").episode_id for record in records}
    assert len(keys) == len(records), "no two files of a job hold the same episode"


def test_a_continuation_and_a_sub_agent_in_files_of_their_own_find_their_parent() -> None:
    folder = JOB / "count__AAAAAAA" / "agent"
    (main,), (later,), (summary,) = (
        read_file(folder / name)[0]
        for name in ("trajectory.json", "trajectory.cont-1.json", "trajectory.summarization-1-summary.json")
    )
    assert (later.relation, summary.relation, main.relation) == ("continuation", "subagent", None)
    for record in (later, summary):
        assert record.parent_episode_id == record.root_episode_id == text_id(main)
        assert (record.parent_step_index, record.scores, record.env_return) == (0, [], None)
    assert [step.is_copied_context for step in later.steps] == [True, False, False]
    assert [step.trainable for step in later.steps] == [False, True, True]
    assert (main.env_return, main.cost, main.prompt_tokens) == (0.75, 1.5, 9)


def test_a_trial_without_a_trajectory_is_its_outcome_and_its_tokens() -> None:
    ((record,), rejects) = read_file(JOB / "count__BBBBBBB" / "result.json")
    assert not rejects
    assert (record.status, record.terminated, record.stop_reason) == ("truncated", False, "AgentTimeoutError")
    assert (record.env_return, record.error) == (0.0, "AgentTimeoutError: too slow")
    assert [(step.state, step.action) for step in record.steps] == [(None, ""), (None, "")]
    tokens = [step.tokens for step in record.steps if step.tokens]
    assert [(t.context_ids, t.action_ids, t.action_logprobs) for t in tokens] == [
        ([1, 2], [3], [-1.0]),
        ([4], [5, 6], [-2.0, 0.0]),
    ]


def test_each_step_of_a_task_of_several_is_a_task_with_its_own_rewards() -> None:
    trial = JOB / "count__CCCCCCC"
    (make_record,), (test,) = (read_file(trial / f"steps/{name}/agent/trajectory.json")[0] for name in ("make", "test"))
    assert (make_record.task_id, make_record.env_return) == ("demo/count/make", 1.0)
    assert (test.task_id, test.env_return) == ("demo/count/test", 0.0)
    assert make_record.rollout_index == test.rollout_index
    assert (make_record.extra or {})["trial"]["verifier_result"] == {"rewards": {"reward": 0.5}}


def test_siblings_are_numbered_by_their_trial_wherever_it_lies(tmp_path: Path) -> None:
    (record_here,), _ = read_file(JOB / "count__AAAAAAA" / "agent" / "trajectory.json", "run")
    copy = shutil.copytree(JOB / "count__AAAAAAA", tmp_path / "elsewhere")
    (record_there,), _ = read_file(copy / "agent" / "trajectory.json", "run")
    (other_record,), _ = read_file(JOB / "count__BBBBBBB" / "result.json", "run")
    assert identify(record_here, "run") == identify(record_there, "run")
    assert record_here.task_id == other_record.task_id
    assert record_here.rollout_index != other_record.rollout_index


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{JOB.name}/result.json", "the result of a Harbor job"),
        ("count__AAAAAAA/result.json", "read together with the trial's trajectory.json"),
    ],
)
def test_what_stands_beside_trajectories_says_what_it_is(name: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        choose_format(JOB.parent / name if name.startswith(JOB.name) else JOB / name)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"job_name": "j", "jobs_dir": "jobs", "n_attempts": 2}, "configuration of a Harbor job"),
        ({"task": {"path": "t"}, "trial_name": "t__1", "trials_dir": "jobs/j"}, "configuration of a Harbor trial"),
        ({"id": "x", "results": [{"task_id": "t", "is_resolved": None}], "accuracy": 0.5}, "Terminal-Bench"),
        ({"trial_name": "t.1", "task_id": "t", "is_resolved": True, "failure_mode": "unset"}, "Terminal-Bench"),
        ([{"instance_id": "i", "model_name_or_path": "m", "model_patch": "+"}], "predictions for SWE-bench"),
        ({"i": {"instance_id": "i", "model_patch": "+"}}, "predictions for SWE-bench"),
    ],
)
def test_files_of_related_tools_without_trajectories_are_named(tmp_path: Path, value: Any, says: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(value), "utf-8")
    with pytest.raises(FormatError, match=f"holds no trajectory: it .*{says}"):
        choose_format(path)


def test_an_agents_raw_log_is_no_second_rollout_of_its_trial(tmp_path: Path) -> None:
    trial = shutil.copytree(JOB / "count__AAAAAAA", tmp_path / "trial")
    raw = trial / "agent" / "mini-swe-agent.trajectory.json"
    raw.write_text(json.dumps({"trajectory_format": "mini-swe-agent-1.1", "messages": [], "info": {}}), "utf-8")
    with pytest.raises(FormatError, match="of a Harbor trial"):
        choose_format(raw)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("minor", range(9))
def test_every_version_up_to_1_8_is_read(tmp_path: Path, minor: int) -> None:
    episode = record(tmp_path / "f", document(schema_version=f"ATIF-v1.{minor}"))
    assert (episode.source_version, episode.steps[0].action) == (f"ATIF-v1.{minor}", "It is 7.")


@pytest.mark.parametrize("version", ["ATIF-v1.9", "ATIF-v2.0", "ATIF-v1.10", "ATIF-1"])
def test_another_version_is_unsupported(tmp_path: Path, version: str) -> None:
    rejected = reject(tmp_path / "f", document(schema_version=version))
    assert rejected.reason == "unsupported"
    assert f"{version!r}; known: ATIF-v1.0 to ATIF-v1.8" in rejected.message


def test_a_state_is_what_came_since_the_last_decision(tmp_path: Path) -> None:
    results = [{"source_call_id": "c", "content": "7"}, {"content": "and a bell"}]
    steps = [
        {"step_id": 1, "source": "system", "message": "Be short.", "observation": {"results": [{"content": "Ready."}]}},
        USER | {"step_id": 2},
        agent(3, "I ask.", tool_calls=[CALL], observation={"results": results}),
        agent(4),
    ]
    episode = record(tmp_path / "f", document(*steps))
    assert [step.state for step in episode.steps] == ["Ready.\nHow much is it?", "7\nand a bell"]
    assert episode.steps[0].tool_calls == [
        {"id": "c", "type": "function", "function": {"name": "ask", "arguments": {"q": "7?"}}}
    ]
    assert episode.steps[1].context == [
        {"role": "tool", "tool_call_id": "c", "name": "ask", "content": "7"},
        {"role": "user", "content": "and a bell"},
    ]


def test_text_parts_are_one_action_and_media_are_kept(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    pieces = [{"type": "text", "text": "It is "}, image, {"type": "text", "text": "7."}]
    step = record(tmp_path / "f", document(USER, agent(message=pieces))).steps[0]
    assert step.action == "It is 7."
    assert step.extra == {"content": pieces}


def test_what_other_writers_leave_out_costs_nothing(tmp_path: Path) -> None:
    call = CALL | {"arguments": None}
    step = {"source": "agent", "message": None, "tool_calls": [call]}
    episode = record(tmp_path / "t.json", document(USER, step, agent={"version": "1"}))
    assert (episode.agent_id, episode.steps[0].tool_calls) == (
        "agent",
        [{"id": "c", "type": "function", "function": {"name": "ask", "arguments": None}}],
    )


def test_what_has_no_column_is_kept(tmp_path: Path) -> None:
    metrics = {"prompt_tokens": 3, "completion_tokens": 2, "cost_usd": 0.5, "cached_tokens": 1}
    fields = {"metrics": metrics, "reasoning_content": "hm", "reasoning_effort": "low", "extra": {"k": 1}}
    episode = record(tmp_path / "f", document(USER, agent(timestamp="2026-01-01T00:00:00Z", **fields), notes="n"))
    step = episode.steps[0]
    assert (step.prompt_tokens, step.completion_tokens, step.cost, step.reasoning) == (3, 2, 0.5, "hm")
    assert step.extra == {"reasoning_effort": "low", "extra": {"k": 1}, "metrics": {"cached_tokens": 1}}
    assert (episode.extra or {})["notes"] == "n"
    assert step.started_at == episode.started_at == episode.ended_at


def test_tokens_of_a_step_that_hides_several_calls_are_taken_only_if_they_are_as_many_as_it_counts(
    tmp_path: Path,
) -> None:
    def tokens(counted: int) -> Any:
        metrics = {"prompt_tokens": 2, "completion_tokens": counted, "prompt_token_ids": [1, 2]}
        metrics["completion_token_ids"] = [3, 4]
        step = agent(llm_call_count=2, metrics=metrics)
        return record(tmp_path / "f", document(USER, step)).steps[0].tokens

    assert tokens(2).action_ids == [3, 4]
    assert tokens(5) is None


@pytest.mark.parametrize(
    ("detail", "is_taken"),
    [
        ({"prompt_token_ids": [[1]], "completion_token_ids": [[2, 3]]}, True),
        ({"prompt_token_ids": [[1]], "completion_token_ids": [[2, 3]], "logprobs": [[-1.0]]}, True),
        ({"prompt_token_ids": [[1]], "completion_token_ids": [[2]]}, False),
        ({"prompt_token_ids": [[1], [2]], "completion_token_ids": [[2, 3], [4]]}, False),
        ({"prompt_token_ids": [["x"]], "completion_token_ids": [[2, 3]]}, False),
        ({"completion_token_ids": [[2, 3]]}, False),
    ],
)
def test_rollout_details_are_taken_only_if_they_fit_the_steps(
    tmp_path: Path, detail: dict[str, Any], is_taken: bool
) -> None:
    result = {"task_name": "t", "trial_name": "t__1", "agent_result": {"rollout_details": [detail]}}
    (tmp_path / "result.json").write_text(json.dumps(result), "utf-8")
    (tmp_path / "agent").mkdir()
    step = agent(metrics={"completion_tokens": 2})
    episode = record(tmp_path / "agent" / "trajectory.json", document(USER, step))
    assert (episode.steps[0].tokens is not None) is is_taken
    assert ("rollout_details" in (episode.extra or {})) is not is_taken
    if episode.steps[0].tokens is not None:
        assert episode.steps[0].tokens.action_logprobs is None


@pytest.mark.parametrize(
    ("exception", "status", "terminated"),
    [
        (None, "completed", True),
        ("AgentTimeoutError", "truncated", False),
        ("ContextLengthExceededError", "truncated", False),
        ("CancelledError", "aborted", None),
        ("VerifierTimeoutError", "completed", True),
        ("NonZeroAgentExitCodeError", "failed", None),
    ],
)
def test_the_trials_exception_says_how_it_ended(
    tmp_path: Path, exception: str | None, status: str, terminated: bool | None
) -> None:
    fault = exception and {"exception_type": exception, "exception_message": "why"}
    result = {"task_name": "t", "trial_name": "t__1", "agent_info": {}, "exception_info": fault}
    (tmp_path / "result.json").write_text(json.dumps(result), "utf-8")
    episode = record(tmp_path / "trajectory.json", document())
    assert (episode.status, episode.terminated, episode.stop_reason) == (status, terminated, exception)


@pytest.mark.parametrize(("name", "text"), [("reward.txt", "0.5\n"), ("reward.json", '{"reward": 0.5}')])
def test_the_verifiers_file_gives_the_reward_where_no_result_is(tmp_path: Path, name: str, text: str) -> None:
    for folder in ("agent", "verifier"):
        (tmp_path / folder).mkdir()
    (tmp_path / "verifier" / name).write_text(text, "utf-8")
    episode = record(tmp_path / "agent" / "trajectory.json", document())
    assert (episode.env_return, [score.scorer for score in episode.scores]) == (0.5, ["reward"])


def test_a_damaged_companion_does_not_lose_the_trajectory(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"task_name": "t", "trial', "utf-8")
    episode = record(tmp_path / "trajectory.json", document())
    assert "result.json is not JSON" in (episode.extra or {})["trial"]["unreadable"]["result.json"]
    assert episode.steps[0].action == "It is 7."


def test_outside_of_a_trial_the_document_may_say_what_it_is_of(tmp_path: Path) -> None:
    extra = {"task_id": 4, "rollout_index": 2, "reward": 1, "policy_version": 9}
    episode = record(tmp_path / "f", document(extra=extra))
    assert (episode.task_id, episode.rollout_index, episode.env_return, episode.policy_version) == ("4", 2, 1.0, 9)
    assert record(tmp_path / "f", document()).task_id == "s"


def test_rollouts_of_one_session_name_are_told_apart_by_how_they_begin(tmp_path: Path) -> None:
    first = record(tmp_path / "f", document(USER | {"timestamp": "2026-01-01T00:00:00Z"}, agent()))
    grown = record(tmp_path / "g", document(USER | {"timestamp": "2026-01-01T00:00:00Z"}, agent(), agent(3)))
    other_record = record(tmp_path / "f", document(USER | {"timestamp": "2026-01-01T00:00:09Z"}, agent()))
    assert first.rollout_index == grown.rollout_index != other_record.rollout_index


def test_equal_files_of_a_folder_are_siblings_under_any_names(tmp_path: Path) -> None:
    def number(*paths: Path) -> set[int]:
        return {record.rollout_index for path in paths for record in read_file(path)[0]}

    first, second = (tmp_path / name for name in ("a.json", "b.json"))
    (first_number,) = number(write(first, document()))
    assert number(write(second, document(USER, agent(message="It is 8.")))) == {first_number}, "growth tells them apart"
    three = [write(tmp_path / f"{name}.json", document()) for name in ("a", "c", "d")]
    numbers = number(*three)
    assert len(numbers) == 3
    assert first_number in numbers
    three[0].rename(tmp_path / "z.json")
    assert number(tmp_path / "z.json", *three[1:]) == numbers
    named = [write(tmp_path / f"{name}.json", document(trajectory_id="t")) for name in ("e", "f")]
    assert len(number(*named)) == 1, "its own id says that it is one rollout"


def test_sub_agents_inside_sub_agents_are_episodes_under_their_parents(tmp_path: Path) -> None:
    result = {"content": "7", "subagent_trajectory_ref": [{"trajectory_id": "sub"}]}
    asks = agent(observation={"results": [result]})
    inner = document(trajectory_id="sub")
    outer = document(USER, asks, trajectory_id="sub", subagent_trajectories=[inner, inner])
    path = tmp_path / "f"
    path.write_text(json.dumps(document(USER, asks, subagent_trajectories=[outer])), "utf-8")
    main, below, *lowest = read_file(path, "f")[0]
    assert [record.agent_id for record in (main, below, *lowest)] == ["a", "a:sub", "a:sub/a:sub", "a:sub/a:sub#1"]
    assert {record.parent_episode_id for record in lowest} == {text_id(below, "f")}
    assert {record.root_episode_id for record in (below, *lowest)} == {text_id(main, "f")}


def test_what_the_simulated_user_did_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "user-agent").mkdir()
    episode = record(tmp_path / "user-agent" / "trajectory.json", document())
    assert (episode.agent_id, [step.trainable for step in episode.steps]) == ("user-agent:a", [False])


def test_lines_and_lists_of_documents_are_read(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(document(session_id=name)) for name in "ab") + "\n"
    assert [item[0] for item in read(tmp_path / "f", lines) if isinstance(item, tuple)] == [1, 2]
    assert [item[0] for item in read(tmp_path / "f", [document(), document()]) if isinstance(item, tuple)] == [0, 1]
    assert len(read_file(tmp_path / "f")[0]) == 2


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (agent(message=7), "at `$.steps[1].message`"),
        (agent(number="2"), "at `$.steps[1].step_id`"),
        (agent(source="robot"), "at `$.steps[1].source`"),
        (agent(tool_calls=[CALL | {"arguments": [1]}]), "at `$.steps[1].tool_calls[0].arguments`"),
        (agent(metrics={"prompt_token_ids": [-1]}), "at `$.steps[1].metrics.prompt_token_ids[0]`"),
        (agent(metrics={"cost_usd": "1"}), "at `$.steps[1].metrics.cost_usd`"),
        (agent(observation={"results": {}}), "at `$.steps[1].observation.results`"),
        (agent(message=["a", 7]), "`steps[1]` is list"),
        (agent(observation={"results": [{"content": [7]}]}), "`steps[1].observation` is list"),
        ("step", "at `$.steps[1]`"),
    ],
)
def test_a_step_of_the_wrong_type_rejects_the_document_with_its_path(tmp_path: Path, wrong: Any, says: str) -> None:
    rejected = reject(tmp_path / "f", document(USER, wrong))
    assert (rejected.position, rejected.reason) == (0, "invalid")
    assert re.search(re.escape(says), rejected.message), rejected.message


def test_a_document_that_ends_too_early_is_kept_as_far_as_it_goes(tmp_path: Path) -> None:
    text = json.dumps(document(USER, agent(), agent(3, "Yes."), agent(4, "Sure.")))
    episode, lost = read(tmp_path / "f", text[: text.index("Sure.")])
    assert isinstance(episode, tuple)
    assert isinstance(lost, Reject)
    assert [step.action for step in episode[1].steps] == ["It is 7.", "Yes."]
    assert (episode[1].status, (episode[1].extra or {})["is_cut"]) == ("aborted", True)
    assert (lost.position, lost.reason) == (0, "truncated")


def test_a_line_that_is_damaged_is_a_reject_and_the_others_are_read(tmp_path: Path) -> None:
    lines = [json.dumps(document(session_id="a")), '{"schema_version": "ATIF-v1.8", "steps": [}', "\xff{"]
    path = tmp_path / "f"
    path.write_bytes("\n".join([*lines, json.dumps(document(session_id="b"))]).encode("latin-1"))
    items = list(FORMATS["atif"].read(path))
    assert [item.position if isinstance(item, Reject) else item[0] for item in items] == [1, 2, 3, 4]
    assert [isinstance(item, Reject) for item in items] == [False, True, True, False]


def test_a_document_without_a_decision_or_an_outcome_is_rejected(tmp_path: Path) -> None:
    assert "no decision of an" in reject(tmp_path / "f", document(USER)).message


def test_nothing_that_a_document_holds_raises(tmp_path: Path) -> None:
    inner = document(trajectory_id="sub-1") | {"session_id": None}
    metrics = {"prompt_tokens": 1, "prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.0]}
    result = {"source_call_id": "c", "content": "7", "subagent_trajectory_ref": [{"trajectory_id": "sub-1"}]}
    step = agent(tool_calls=[CALL], observation={"results": [result]}, metrics=metrics)
    final = {"total_prompt_tokens": 1, "total_cost_usd": 1.0}
    assert_never_raises(tmp_path / "f", document(USER, step, subagent_trajectories=[inner], final_metrics=final))


def test_nothing_that_a_trials_result_holds_raises(tmp_path: Path) -> None:
    result = json.loads((JOB / "count__BBBBBBB" / "result.json").read_text("utf-8"))
    assert_never_raises(tmp_path / "result.json", result)
    for name in ("agent_result", "verifier_result", "exception_info", "config", "agent_info", "step_results"):
        for wrong in (7, "x", [1], {"rewards": [1]}, {"rollout_details": [{"prompt_token_ids": 3}]}):
            (tmp_path / "result.json").write_text(json.dumps(result | {name: wrong}), "utf-8")
            assert record(tmp_path / "trajectory.json", document()).steps[0].action == "It is 7."
