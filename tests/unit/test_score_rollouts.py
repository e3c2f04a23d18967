"""What a reward function is called with: conversations and facts of episodes, put together from the lake's rows."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lake
from lake import EpisodeRecord, StepRecord, ids
from lake.errors import LakeAccessError
from lake.read.episodes import split_batches
from pipelines.score.rollouts import ARGUMENTS, RolloutInput, make_call, make_joint_call, read_rollouts
from testkit.copies import empty_lake
from testkit.lakes import rollout as maze
from testkit.score_lakes import conversation, conversations
from testkit.shared import shared_data

KEYS = ("run_id", "group_id", "episode_id", "num_steps")


def read(lk: lake.Lake, arguments: Any = ARGUMENTS) -> dict[tuple[str, int], RolloutInput]:
    """All rollouts by task and number."""
    names = lk.scan("episodes").select("episode_id", "task_id", "rollout_index").collect()
    called = {row["episode_id"]: (row["task_id"], row["rollout_index"]) for row in names.to_dicts()}
    inputs = read_rollouts(lk.snapshot(), lk.scan("episodes").select(KEYS).collect(), arguments)
    return {called[rollout_input.episode_id]: rollout_input for rollout_input in inputs}


def called_with(rollout: RolloutInput) -> Any:
    return msgspec.json.decode(msgspec.json.encode(make_call(rollout, {})))


def test_a_conversation_is_what_was_said_in_order(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 1, 2)
    rollout_input = read(lk)["t0", 1]
    call = called_with(rollout_input)
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in call["messages"]] == roles
    assert rollout_input.steps_S == (0, 1, 2)
    assert rollout_input.messages_S == (2, 4, 6)
    first = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"n": 0}'}}
    assert call["messages"][2] == {"role": "assistant", "content": "", "tool_calls": [first]}
    assert call["messages"][3] == {"role": "tool", "tool_call_id": "c0", "content": "result 0"}
    assert call["messages"][-1] == {"role": "assistant", "content": "done with t0.1"}


def test_the_facts_of_an_episode_come_along(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    fields = {"tools": [{"name": "look"}], "extra": {"k": [1]}, "status": "truncated", "policy_version": 4, "seed": 9}
    lk.append([conversation("t", 1, turns=2, **fields)], run_id="r")
    call = called_with(read(lk)["t", 1])
    row = lk.scan("episodes").collect().row(0, named=True)
    assert set(call) == set(ARGUMENTS)
    assert ids.from_text(call["episode_id"]) == row["episode_id"]
    assert ids.from_text(call["group_id"]) == row["group_id"]
    facts = {name: call[name] for name in ("run_id", "task_id", "rollout_index", "num_steps", "env_return", "agent_id")}
    assert facts == {
        "run_id": "r", "task_id": "t", "rollout_index": 1, "num_steps": 2, "env_return": 1.0, "agent_id": None
    }  # fmt: skip
    assert {name: call[name] for name in fields} == fields
    assert call["ground_truth"] == {"answer": "done with t.0"}
    step = {"index": 1, "message_index": 4, "state": "result 0", "action": "done with t.1", "reward": 1.0}
    assert call["steps"][1] == step | {"is_action_valid": None}


def test_only_what_a_function_takes_is_read(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 1, 1)
    rollout_input = read(lk, {"messages", "task_id", "words"})["t0", 0]
    assert set(rollout_input.arguments) == {"messages", "task_id"}
    assert make_call(rollout_input, {"words": 3, "task_id": "mine"})["task_id"] == "mine"


def test_states_stand_for_messages_that_no_source_kept(tmp_path: Path) -> None:
    """As the trainer renders them: the state is the user's, unless the source says whose."""
    lk = empty_lake(tmp_path / "lake")
    bare = EpisodeRecord(
        task_id="bare",
        steps=[
            StepRecord(state="a", action="1"),
            StepRecord(state="b", action="2", state_role="tool", reasoning="why"),
        ],
    )
    lk.append([maze("m", 0, 1.0), bare], run_id="r")
    inputs = read(lk)
    assert called_with(inputs["bare", 0])["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "2", "reasoning_content": "why"},
    ]
    spoken = [(m["role"], m["content"]) for m in called_with(inputs["m", 0])["messages"]]
    assert spoken[:3] == [("system", "You walk through a maze."), ("user", "You are at the gate."), spoken[2]]
    assert spoken[-1] == ("user", "The end.")
    assert [index for index, (role, _) in enumerate(spoken) if role == "assistant"] == list(inputs["m", 0].messages_S)


def test_steps_that_are_not_active_are_not_there(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    steps = [StepRecord(state=f"s{n}", action=f"a{n}", is_active=n < 2) for n in range(4)]
    lk.append([EpisodeRecord(task_id="t", steps=steps)], run_id="r")
    rollout_input = read(lk)["t", 0]
    assert (rollout_input.steps_S, rollout_input.messages_S) == ((0, 1), (1, 3))
    assert len(called_with(rollout_input)["messages"]) == 4


def test_payloads_that_were_moved_out_are_put_back(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    long = "x" * 70_000
    record = conversation("t", answers=[long], tools=[{"description": long}], extra={"log": long})
    record.initial_messages = [{"role": "user", "content": long}]
    record.final_observation = [{"role": "user", "content": long}]
    lk.append([record], run_id="r")
    assert lk.scan("blobs").collect().height > 0
    call = called_with(read(lk)["t", 0])
    assert [m["content"] == long for m in call["messages"]] == [True, False, True, False, False, False, True]
    assert call["tools"][0]["description"] == call["extra"]["log"] == long


def test_an_episode_of_which_no_step_is_active_is_a_conversation_too(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    padding = [StepRecord(state="s", action="a", is_active=False)]
    first = [{"role": "user", "content": "?"}]
    lk.append([EpisodeRecord(task_id="t", steps=padding, initial_messages=first)], run_id="r")
    rollout_input = read(lk)["t", 0]
    assert (rollout_input.steps_S, called_with(rollout_input)["messages"]) == ((), first)


def test_a_joint_call_has_a_list_of_each(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 1, 3)
    unit = [read(lk)["t0", index] for index in (2, 0, 1)]
    call = msgspec.json.decode(msgspec.json.encode(make_joint_call(unit, {"words": 4})))
    assert [messages[-1]["content"] for messages in call["rollouts_messages"]] == [
        f"done with t0.{n}" for n in (2, 0, 1)
    ]
    assert call["ground_truth_list"] == [{"answer": "done with t0.0"}] * 3
    assert call["rollout_index"] == [2, 0, 1]
    assert call["words"] == 4
    assert {"messages", "ground_truth"} & set(call) == set()


def test_messages_that_are_no_list_are_a_damaged_lake(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", 1, 1)
    rows = lk.scan("steps").collect().with_columns(context=pl.lit('{"a": 1'))
    snapshot = lk.snapshot()
    scan = snapshot.scan
    snapshot.scan = lambda name: rows.lazy() if name == "steps" else scan(name)  # type: ignore[method-assign]
    with pytest.raises(LakeAccessError, match=r"episode [0-9a-z]{13} .*not a JSON list"):
        read_rollouts(snapshot, lk.scan("episodes").select(KEYS).collect(), ARGUMENTS)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 9)), max_size=30), st.integers(1, 12))
def test_parts_hold_every_episode_once_and_groups_whole(rows: list[tuple[int, int, int]], bound: int) -> None:
    columns = {
        "run_id": [f"r{run}" for run, _, _ in rows],
        "group_id": [10 * run + group for run, group, _ in rows],
        "episode_id": list(range(len(rows))),
        "num_steps": [steps for _, _, steps in rows],
    }
    episodes = pl.DataFrame(
        columns, schema_overrides={"run_id": pl.String, "group_id": pl.Int64, "num_steps": pl.Int32}
    )
    batches = list(split_batches(episodes, steps=bound, most=4))
    assert all(len(part) for part in batches)
    if batches:
        assert pl.concat(batches).equals(episodes.sort("run_id", "group_id", "episode_id"))
    assert len(batches) == 0 or rows
    groups = [set(part["group_id"]) for part in batches]
    assert sum(map(len, groups)) == len(set().union(*groups))
    for part in batches:
        if part["group_id"].n_unique() > 1:
            assert part["num_steps"].sum() <= bound
            assert len(part) <= 4


def test_real_conversations_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    """tau-bench: every message of every trajectory, in order; only the assistant's null content is empty text here."""
    path = shared_data("tau_bench", "gpt-4o-airline.json")
    from lake.write.ingest import ingest

    lk = empty_lake(tmp_path / "lake")
    ingest(lk, path)
    inputs = read(lk, {"messages"})
    originals = msgspec.json.decode(path.read_bytes())
    assert len(inputs) == len(originals) == 200
    for row in originals:
        messages = called_with(inputs[str(row["task_id"]), row["trial"]])["messages"]
        expected = [
            {key: value for key, value in message.items() if value is not None} | {"content": message["content"] or ""}
            for message in row["traj"]
        ]
        assert messages == [
            {k: v for k, v in message.items() if k in ("role", "content", "tool_calls", "tool_call_id", "name")}
            for message in expected
        ]
