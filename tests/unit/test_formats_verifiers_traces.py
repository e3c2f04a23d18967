"""verifiers and prime-rl traces: the outcome of a graph of messages, of its tokens, and of several agents."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake import ids
from lake.errors import FormatError
from lake.formats.base.fields import hash_rollout_index
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject, TokensRecord, identify
from testkit.formats import Counts, assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "verifiers_traces" / "traces.jsonl"


def node(
    text: str, parent: int | None = None, ids: list[int] | None = None, sampled: int = 0, **fields: Any
) -> dict[str, Any]:
    """A node; the last `sampled` of its tokens are."""
    ids = ids or []
    node_fields: dict[str, Any] = {
        "message": {"role": "assistant" if sampled else "user", "content": text},
        "sampled": bool(sampled),
    }
    node_fields |= {"token_ids": ids, "mask": [False] * (len(ids) - sampled) + [True] * sampled}
    node_fields |= {"logprobs": [-0.5] * sampled} | ({} if parent is None else {"parent": parent})
    return node_fields | fields


LINE = [node("q", ids=[1, 2]), node("a", 0, [3, 4, 5], 2), node("go on", 1, [6]), node("b", 2, [7, 8], 1)]
TASK = {"type": "T", "data": {"idx": 0, "answer": "42"}, "key": "k"}


def trace(nodes: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A trace of 0.4."""
    trace_fields: dict[str, Any] = {
        "version": 1,
        "id": "t",
        "verifiers": {"version": "0.4.0"},
        "task": TASK,
        "agent": {"name": "solver"},
    }
    trace_fields |= {
        "nodes": LINE if nodes is None else nodes,
        "calls": [],
        "rewards": {"right": {"score": 1.0, "weight": 2.0}},
    }
    return trace_fields | {"is_completed": True, "ok": True, "stop_condition": "done", "errors": []} | fields


def episode(*traces: Any, **fields: Any) -> dict[str, Any]:
    """A line."""
    line_fields: dict[str, Any] = {
        "id": "e",
        "env": {"id": "toy"},
        "task": TASK,
        "group": {"id": "g"},
        "ok": True,
        "errors": [],
    }
    run = {"type": "train", "id": "run-1", "work": {"type": "train", "step": 5, "policy": {"start": 4, "end": 4}}}
    return line_fields | {"run": run, "traces": list(traces or [trace()])} | fields


def read(folder: Path, *lines: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Records and rejects of lines."""
    path = folder / "traces.jsonl"
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in lines))
    return read_file(path)


def of(folder: Path, *lines: Any) -> list[EpisodeRecord]:
    """Records of lines without rejects."""
    records, rejects = read(folder, *lines)
    assert not rejects, rejects[0].message
    return records


def ids_of(record: EpisodeRecord, step: int) -> list[int]:
    """The whole sequence up to the end of a step, put together of deltas."""
    tokens = record.steps[step].tokens
    assert tokens is not None
    before = ids_of(record, tokens.prefix_step_index) if isinstance(tokens.prefix_step_index, int) else []
    return [*before, *tokens.context_ids, *tokens.action_ids]


def counted(path: Path) -> Counts:
    """What a file of 0.4 holds, by plain counting."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    traces = [trace for line in lines for trace in line["traces"]]
    sampled = [node["message"] for trace in traces for node in trace["nodes"] if node["sampled"]]
    rewards: list[float] = []
    episodes = 0
    for raw_trace in traces:
        scored = list(raw_trace["rewards"].values())
        rewards += [reward["score"] for reward in scored if reward]
        if scored and all(scored):
            rewards.append(sum(reward["score"] * reward["weight"] for reward in scored))
        parents = {raw_node.get("parent") for raw_node in raw_trace["nodes"]}
        episodes += sum(index not in parents for index in range(len(raw_trace["nodes"])))
    calls = sum(len(message.get("tool_calls") or ()) for message in sampled)
    return Counts(episodes, len(sampled), calls, sorted(rewards), sum(len(m.get("content") or "") for m in sampled))


# ---------------------------------------------------------------- real files


def test_a_real_file_gives_what_plain_counting_gives() -> None:
    path = shared_data("formats", "verifiers_v1", "traces.jsonl")
    records, rejects = read_file(path)
    assert counts(records) == counted(path)
    assert counts(records)[:3] == (10, 12, 0)
    assert [(reject.position, reject.reason) for reject in rejects] == [(7, "invalid")], "it has no trace and no reward"
    roots = [record for record in records if record.relation is None]
    assert [record.task_id for record in roots] == ["ds/0"] * 3 + ["ds/1"] * 3
    assert len({record.rollout_index for record in roots}) == 6
    assert {record.collection_round for record in records} == {5}
    assert {record.run_id for record in records} == {"run-1"}
    assert {record.policy_version for record in records} == {None}, "it changed from 4 to 5 meanwhile"
    relations = [(record.agent_id, record.relation) for record in records if record.relation]
    assert relations == [("critic", "subagent"), ("solver/branch_0", "fork")] * 2


def test_what_0_4_0_writes_gives_what_plain_counting_gives() -> None:
    records, rejects = read_file(GOLDEN)
    assert not rejects
    assert counts(records) == counted(GOLDEN)
    assert [(r.task_id, r.agent_id, r.relation) for r in records] == [
        ("sums/0", "solver", None),
        ("sums/0", "solver/branch_0", "subagent"),
        ("sums/0", "solver", None),
        ("sums/0", "solver/branch_0", "fork"),
        ("sums/1", "solver", None),
        ("sums/1 [judge]", "judge", "subagent"),
    ]
    solver, checker, *_ = records
    assert [step.tool_calls for step in solver.steps] == [
        [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
        None,
    ]
    assert solver.steps[0].reasoning == "Call it."
    assert checker.parent_step_index == 0, "the turn that called the sub-agent"


def test_the_tokens_of_a_real_file_are_those_of_its_branches() -> None:
    lines = [json.loads(line) for line in GOLDEN.read_text("utf-8").splitlines()]
    nodes = lines[0]["traces"][0]["nodes"]
    expected = [token for index in (0, 1, 2, 3, 6) for token in nodes[index]["token_ids"]]
    solver = read_file(GOLDEN)[0][0]
    assert ids_of(solver, 1) == expected == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    tokens = solver.steps[0].tokens
    assert tokens is not None
    assert (tokens.context_ids, tokens.action_ids) == ([1, 2, 3, 4, 5], [6, 7]), "the header is context"
    assert (tokens.action_logprobs, tokens.temperature, tokens.top_p) == ([-0.125, -0.25], 0.75, 0.5)


# ---------------------------------------------------------------- graphs


def test_a_path_is_a_conversation(tmp_path: Path) -> None:
    (record,) = of(tmp_path, episode())
    assert [(step.state, step.action) for step in record.steps] == [("q", "a"), ("go on", "b")]
    assert record.initial_messages == [{"role": "user", "content": "q"}]
    assert (record.task_id, record.environment, record.split, record.ground_truth) == ("k", "toy", "train", "42")
    assert (record.env_return, record.status, record.terminated) == (2.0, "completed", True)
    assert (record.policy_version, record.steps[1].policy_version) == (4, 4)


def test_assistant_messages_that_were_not_sampled_are_context(tmp_path: Path) -> None:
    shown_node = node("shown", 0) | {"message": {"role": "assistant", "content": "shown"}}
    (record,) = of(tmp_path, episode(trace([node("q"), shown_node, node("a", 1, [1], 1)])))
    assert [(step.state, step.action) for step in record.steps] == [("q\nshown", "a")]


def test_a_fork_begins_where_it_leaves_its_parent(tmp_path: Path) -> None:
    nodes = [*LINE, node("c", 2, [9], 1), node("more", 4, [10]), node("d", 5, [11], 1)]
    trunk, fork = of(tmp_path, episode(trace(nodes)))
    assert [step.action for step in trunk.steps] == ["a", "c", "d"], "the branch of the last leaf"
    assert [(step.state, step.action) for step in fork.steps] == [("go on", "b")]
    assert (fork.relation, fork.parent_step_index) == ("fork", 0)
    assert [message["content"] for message in fork.initial_messages or ()] == ["q", "a", "go on"]
    assert ids_of(fork, 0) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ids_of(trunk, 2) == [1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert (fork.env_return, fork.scores) == (None, []), "the reward is the trace's, once"


def test_parents_are_the_episodes_that_were_read(tmp_path: Path) -> None:
    trunk, fork = of(tmp_path, episode(trace([*LINE, node("c", 2, [9], 1)])))
    assert fork.parent_episode_id == ids.to_text(identify(trunk, "run-1").episode_id)


@pytest.mark.parametrize(
    ("link", "relation"), [("subagent_call", "subagent"), ("compaction", "continuation"), ("vendor:x", "fork")]
)
def test_semantic_links_say_what_a_branch_is(tmp_path: Path, link: str, relation: str) -> None:
    nodes = [node("sub"), node("x", 4, [9], 1, semantic_parents=[{"node": 3, "type": link}])]
    records = of(tmp_path, episode(trace([*LINE, *nodes, node("end", 3), node("b2", 6, [10], 1)])))
    assert [[step.action for step in record.steps] for record in records] == [["a", "b", "b2"], ["x"]]
    assert records[1].relation == relation
    assert records[1].parent_step_index == (1 if relation != "fork" else None)


def test_a_sub_agent_that_came_last_is_not_the_trunk(tmp_path: Path) -> None:
    links = [{"node": 1, "type": "subagent_call"}]
    nodes = [*LINE, node("sub"), node("x", 4, [9], 1, semantic_parents=links)]
    records = of(tmp_path, episode(trace(nodes)))
    assert [[step.action for step in record.steps] for record in records] == [["a", "b"], ["x"]]


def test_messages_that_no_decision_saw_are_kept(tmp_path: Path) -> None:
    nodes = [*LINE, node("bye", 3, [9]), node("lost", 1)]
    (record,) = of(tmp_path, episode(trace([*nodes[:4], nodes[5], nodes[4]])))
    assert record.final_observation == [{"role": "user", "content": "bye", "token_ids": [9], "mask": [False]}]
    assert (record.extra or {})["other_nodes"] == {"4": nodes[5]}


@pytest.mark.parametrize(("parent", "valid"), [(9, False), (1, False), (-1, False), (0, True)])
def test_a_parent_is_an_earlier_node(tmp_path: Path, parent: int, valid: bool) -> None:
    records, rejects = read(tmp_path, episode(trace([node("q"), node("a", parent, [1], 1)])))
    assert bool(records) == valid
    assert valid or "`nodes[1].parent`" in rejects[0].message


def test_branches_that_repeat_too_much_are_rejected(tmp_path: Path) -> None:
    deep = [node("q"), *(node("q", n) for n in range(1200)), *(node("a", 1200, [1], 1) for _ in range(1000))]
    _, (reject,) = read(tmp_path, episode(trace(deep)))
    assert "the branches of `nodes`" in reject.message


# ---------------------------------------------------------------- tokens


def test_behind_a_turn_without_tokens_nothing_is_exact(tmp_path: Path) -> None:
    relayed = node("a", 0, [3], 1) | {"token_ids": [], "mask": [], "logprobs": []}
    (record,) = of(tmp_path, episode(trace([LINE[0], relayed, *LINE[2:]])))
    assert [step.tokens for step in record.steps] == [None, None]


def test_a_prompt_may_stand_in_the_masked_part_of_the_answer(tmp_path: Path) -> None:
    (record,) = of(tmp_path, episode(trace([node("q"), node("a", 0, [1, 2, 3, 4], 1)])))
    tokens = record.steps[0].tokens
    assert tokens is not None
    assert (tokens.context_ids, tokens.action_ids, tokens.policy_version) == ([1, 2, 3], [4], 4)


def test_tokens_behind_an_answer_belong_to_what_follows(tmp_path: Path) -> None:
    closed = LINE[1] | {"mask": [False, True, False], "logprobs": [-0.5]}
    (record,) = of(tmp_path, episode(trace([LINE[0], closed, *LINE[2:]])))
    second = record.steps[1].tokens
    assert second is not None
    assert (second.context_ids, second.prefix_step_index) == ([5, 6, 7], 0)


def test_tokens_inside_an_answer_that_were_not_sampled_are_masked(tmp_path: Path) -> None:
    odd = node("a", 0, [3, 4, 5], 3) | {"mask": [True, False, True], "logprobs": [-0.25, -0.5]}
    (record,) = of(tmp_path, episode(trace([LINE[0], odd])))
    assert record.steps[0].tokens == TokensRecord(
        context_ids=[1, 2],
        action_ids=[3, 4, 5],
        action_logprobs=[-0.25, 0.0, -0.5],
        action_mask=[True, False, True],
        prefix_step_index=None,
        policy_version=4,
    )


def test_log_probabilities_that_do_not_fit_are_none(tmp_path: Path) -> None:
    (record,) = of(tmp_path, episode(trace([LINE[0], LINE[1] | {"logprobs": [-0.5]}])))
    tokens = record.steps[0].tokens
    assert tokens is not None
    assert tokens.action_logprobs is None


# ---------------------------------------------------------------- rewards, calls, ends


def test_a_reward_that_is_unknown_makes_the_return_unknown(tmp_path: Path) -> None:
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "style": None}
    (record,) = of(tmp_path, episode(trace(rewards=rewards)))
    assert record.env_return is None
    assert [(s.scorer, s.value, s.metrics) for s in record.scores] == [
        ("right", 1.0, {"weight": 0.5}),
        ("style", None, None),
    ]


def test_no_rewards_are_no_return(tmp_path: Path) -> None:
    (record,) = of(tmp_path, episode(trace(rewards={}, metrics={"len": 3.0})))
    assert (record.env_return, record.scores) == (None, [])
    assert (record.extra or {})["metrics"] == {"len": 3.0}


def test_calls_say_what_happened_at_a_node(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 5, "cached_input_tokens": 3, "completion_tokens": 2, "cost": 0.5, "reasoning_tokens": 1}
    time = {"start": 1_750_000_000.0, "end": 1_750_000_001.5}
    error = {"type": "ProviderError", "message": "overloaded"}
    calls = [
        {"model": "tiny", "error": error},
        {"node": 1, "model": "old", "time": {"start": 0.0, "end": 0.0}},
        {"node": 1, "model": "tiny", "finish_reason": "stop", "usage": usage, "time": time, "endpoint": "/chat"},
        {"node": 3, "model": "tiny", "finish_reason": "length", "sampling": {"temperature": 0.5, "top_k": 8}},
    ]
    (record,) = of(tmp_path, episode(trace(calls=calls)))
    first, second = record.steps
    assert (first.model, first.prompt_tokens, first.completion_tokens, first.cost) == ("tiny", 8, 2, 0.5)
    assert (first.latency, first.finish_reason) == (1.5, "stop")
    assert first.extra is not None
    assert first.extra["usage"] == {"cached_input_tokens": 3, "reasoning_tokens": 1}
    assert [call["model"] for call in first.extra["earlier_calls"]] == ["old"]
    assert second.tokens is not None
    assert (second.tokens.temperature, second.tokens.top_k) == (0.5, 8)
    assert (record.status, record.terminated, record.policy) == ("truncated", False, "tiny")
    assert (record.extra or {})["calls_without_message"] == [calls[0]]


@pytest.mark.parametrize(
    ("fields", "status", "terminated"),
    [
        ({"stop_condition": "max_turns"}, "truncated", False),
        ({"ok": False, "is_timeout": True}, "truncated", False),
        ({"ok": False, "errors": [{"type": "E", "message": "boom"}]}, "failed", None),
        ({"ok": True, "errors": [{"type": "E", "message": "boom"}]}, "completed", True),
        ({"is_completed": False}, "aborted", None),
    ],
)
def test_how_a_trace_ended(tmp_path: Path, fields: Any, status: str, terminated: bool | None) -> None:
    (record,) = of(tmp_path, episode(trace(**fields)))
    assert (record.status, record.terminated) == (status, terminated)
    assert record.error == ("E: boom" if "errors" in fields else None)


# ---------------------------------------------------------------- agents, siblings, files


def test_the_first_agent_that_is_trained_is_the_root(tmp_path: Path) -> None:
    judge = trace([node("right?"), node("yes", 0, [1], 1)], agent={"name": "judge", "trainable": False})
    solvers = [trace(agent={"name": "solver", "trainable": True}, id=f"t{n}") for n in range(2)]
    root, other_record, second = of(tmp_path, episode(judge, *solvers))
    assert [(r.agent_id, r.task_id, r.relation) for r in (root, other_record, second)] == [
        ("solver", "k", None),
        ("judge", "k [judge]", "subagent"),
        ("solver#2", "k", "subagent"),
    ]
    assert (other_record.steps[0].trainable, other_record.policy_version, second.policy_version) == (False, None, 4)
    assert len({root.rollout_index, other_record.rollout_index, second.rollout_index}) == 1


def test_siblings_of_a_task_are_numbered_by_the_id_of_their_episode(tmp_path: Path) -> None:
    """So an episode that stands in two files, `all` and `effective`, is one."""
    first, second = of(tmp_path, episode(), episode(id="f"))
    assert [first.rollout_index, second.rollout_index] == [hash_rollout_index("e"), hash_rollout_index("f")]
    nameless = [{key: item for key, item in episode().items() if key != "id"} for _ in range(2)]
    assert [record.rollout_index for record in of(tmp_path, *nameless)] == [0, 1]


def test_groups_of_one_task_at_several_steps_do_not_meet(tmp_path: Path) -> None:
    later = episode()["run"] | {"work": {"type": "train", "step": 6}}
    first, second = of(tmp_path, episode(), episode(id="f", run=later, group={"id": "h"}))
    assert (first.collection_round, second.collection_round) == (5, 6)
    assert identify(first, "run-1").group_id != identify(second, "run-1").group_id
    assert ((first.extra or {})["group"], (second.extra or {})["group"]) == ("g", "h")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({"data": {"idx": 3}}, "3"),
        ({"data": {"idx": 3, "id": "django-1"}}, "django-1"),
        ({"data": {"idx": 3}, "hash": "h"}, "h"),
        ({"data": {"prompt": "q"}}, ids.to_text(ids.text_hash('{"prompt":"q"}'))),
    ],
)
def test_a_task_without_key_is_called_by_what_it_has(tmp_path: Path, task: Any, name: str) -> None:
    (record,) = of(tmp_path, episode(task=task))
    assert record.task_id == name


def test_an_episode_without_traces_is_rejected(tmp_path: Path) -> None:
    _, (reject,) = read(tmp_path, episode() | {"traces": []})
    assert "no decision of an" in reject.message


def test_what_training_adds_is_no_part_of_the_episode(tmp_path: Path) -> None:
    trained = [*LINE[:3], LINE[3] | {"advantages": [0.0], "trainer_logprobs": [-0.25]}]
    info = {"level": "easy"}
    (before,) = of(tmp_path, episode(trace(info=info)))
    (after,) = of(tmp_path, episode(trace(trained, info=info | {"advantage": 0.0, "train": {"effective": True}})))
    assert identify(before, "r").content_hash == identify(after, "r").content_hash
    assert [(s.scorer, s.value, s.step_index, s.metrics) for s in after.scores[1:]] == [
        ("training", None, None, {"advantage": 0.0, "train": {"effective": True}}),
        ("training", None, 1, {"advantages": [0.0], "trainer_logprobs": [-0.25]}),
    ]


def test_annotations_beside_the_file_are_read_along(tmp_path: Path) -> None:
    folder = tmp_path / "annotations"
    folder.mkdir()
    stream = [None] * 4 + [None] * 3 + [-0.125]
    update = {
        "version": 1,
        "trace_id": "t",
        "info": {"advantage": 1.5},
        "branches": [{"index": 0, "entropies": stream}],
    }
    (folder / "trainer.jsonl").write_text(json.dumps(update) + '\n{"broken\n')
    (record,) = of(tmp_path, episode())
    assert [(s.scorer, s.step_index, s.metrics) for s in record.scores[1:]] == [
        ("training.trainer", None, {"advantage": 1.5}),
        ("training.trainer", 1, {"entropies": [-0.125]}),
    ]
    with pytest.raises(FormatError, match="ingest the traces"):
        choose_format(folder / "trainer.jsonl")


def test_chunks_of_a_stream_find_annotations_in_the_folder_above(tmp_path: Path) -> None:
    for name in ("stream", "annotations/orchestrator"):
        (tmp_path / name).mkdir(parents=True)
    update = {"version": 1, "trace_id": "t", "info": {"advantage": 1.5}, "branches": []}
    (tmp_path / "annotations/orchestrator/000000.jsonl").write_text(json.dumps(update) + "\n")
    (record,) = of(tmp_path / "stream", episode())
    assert record.scores[1].scorer == "training.orchestrator"


def test_an_index_of_a_stream_is_no_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    path.write_text('{"line": 1, "offset": 0, "id": "e", "trace_ids": ["t"], "num_errors": 0, "ok": true}\n')
    with pytest.raises(FormatError, match="a trace stream"):
        choose_format(path)


# ---------------------------------------------------------------- versions


def test_a_trace_of_0_2_1_stands_alone(tmp_path: Path) -> None:
    old = trace(version=2, rewards={"right": 0.5, "style": 0.25}, run={"type": "eval", "id": "r", "step": 3})
    old["agent"] = {"model": "tiny", "sampling": {"temperature": 0.5}}
    old["task"] = {"type": "T", "data": {"idx": 7}}
    (record,) = of(tmp_path, old)
    assert (record.task_id, record.run_id, record.collection_round, record.split) == ("7", "r", 3, "eval")
    assert (record.env_return, record.policy, record.sampling) == (0.75, "tiny", {"temperature": 0.5})
    assert [(score.scorer, score.value) for score in record.scores] == [("right", 0.5), ("style", 0.25)]


def test_a_trace_of_0_2_0_has_usage_at_its_nodes(tmp_path: Path) -> None:
    old = {"id": "t", "task": {"type": "T", "data": {"idx": 7}}, "rewards": {"right": 1.0}, "is_completed": True}
    message = LINE[1] | {"finish_reason": "stop", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    (record,) = of(tmp_path, old | {"nodes": [LINE[0], message]})
    assert (record.steps[0].finish_reason, record.prompt_tokens) == ("stop", 5)


@pytest.mark.parametrize(("late", "version"), [(0, 12), (1, None)])
def test_a_rollout_of_prime_rl_before_episodes_names_its_policy(tmp_path: Path, late: int, version: int | None) -> None:
    about: dict[str, Any] = {
        "kind": "train",
        "env_name": "math",
        "group_id": "g",
        "policy_version": 12,
        "off_policy_steps": late,
    }
    (record,) = of(tmp_path, trace(advantage=0.5, **about))
    assert (record.environment, record.policy_version, record.split) == ("math", version, "train")
    assert record.scores[-1].metrics == {"advantage": 0.5}


def test_a_newer_version_is_unsupported_and_the_others_are_read(tmp_path: Path) -> None:
    records, (reject,) = read(tmp_path, episode(), episode(trace(version=3), id="f"), episode(id="g"))
    assert len(records) == 2
    assert (reject.position, reject.reason) == (2, "unsupported")
    assert all(version in reject.message for version in ("1 (verifiers 0.3", "2 (0.2.1)"))


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        (json.dumps(episode(trace(info=0.125))).replace("0.125", "NaN"), "malformed", "NaN"),
        ([], "invalid", "Expected `object`"),
        ({}, "invalid", "missing required field"),
        (episode(7), "invalid", "`$.traces[0]`"),
        (episode(trace([7])), "invalid", "`$.traces[0].nodes[0]`"),
        (trace([{"sampled": True}]), "invalid", "`message` - at `$.nodes[0]`"),
        (episode(trace([node("q") | {"mask": [True]}])), "invalid", "`nodes[0].mask` has 1 entries for 0"),
        (episode(trace([node("q") | {"token_ids": [-1]}])), "invalid", "token_ids"),
        (episode(trace([node("q") | {"message": {"content": "x"}}])), "invalid", "`nodes[0].message.role` is None"),
        (
            episode(trace([node("q"), node("a", 0, [1], 1) | {"message": {"role": "assistant", "content": 5}}])),
            "invalid",
            "at `nodes[1].message` is int; valid: text, or parts",
        ),
        (episode(trace(version="1")), "invalid", "`$.traces[0].version`"),
        (episode(run={"id": 5}), "invalid", "`run.id` is 5"),
        (episode(trace(calls=[5])), "invalid", "`$.traces[0].calls[0]`"),
    ],
)
def test_a_line_of_the_wrong_shape_is_rejected_and_the_others_are_read(
    tmp_path: Path, bad: Any, reason: str, says: str
) -> None:
    records, rejects = read(tmp_path, episode(), bad, episode(id="f"))
    assert len(records) == 2
    assert [(reject.position, reject.reason) for reject in rejects] == [(2, reason)]
    assert says in rejects[0].message


def test_a_line_that_is_cut_is_a_reject(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    text = json.dumps(episode())
    path.write_text(f"{text}\n{text[:-20]}")
    records, (reject,) = read_file(path)
    assert (len(records), reject.position, reject.reason) == (1, 2, "truncated")


def test_nothing_in_a_line_makes_it_raise(tmp_path: Path) -> None:
    full = trace(
        [LINE[0], LINE[1] | {"advantages": [1.0, 2.0], "semantic_parents": [{"node": 0, "type": "subagent_call"}]}],
        calls=[{"node": 1, "usage": {"prompt_tokens": 1}, "time": {"start": 1.0, "end": 2.0}}],
        timing={"start": 1.0, "scoring": {"end": 2.0}},
        info={"advantage": 1.0},
    )
    assert_never_raises(tmp_path / "traces.jsonl", [episode(full)], lines=True)


def test_the_files_are_recognised(tmp_path: Path) -> None:
    read(tmp_path, episode())
    alone = tmp_path / "alone.jsonl"
    alone.write_text(json.dumps(trace()) + "\n")
    pretty = tmp_path / "pretty.json"
    pretty.write_text(json.dumps(episode(), indent=1))
    for path in (GOLDEN, tmp_path / "traces.jsonl", alone, pretty):
        assert choose_format(path).name == "verifiers_traces"
        assert read_file(path)[0]
