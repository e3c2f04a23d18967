"""A taskset of verifiers, played by its own runner in its own environment, without its hub."""

from pathlib import Path
from typing import Any

import pytest

import lake
from lake.errors import MissingExtraError, UsageError
from pipelines.collect.agents.loading import VerifiersTaskset, load_agent
from pipelines.collect.players import Rollout
from testkit.agent_rollouts import played
from testkit.consumers import environment
from testkit.engine_server import engine_server
from testkit.processes import TESTS

VERIFIERS = ("install", "--no-compile", "verifiers==0.4.0")
TASKSET = TESTS / "testkit" / "sum_tasks.py"


@pytest.fixture(scope="module")
def python() -> str:
    return str(environment("verifiers", VERIFIERS, shares=False))


@pytest.mark.slow
def test_rewards_are_those_of_its_traces_and_tokens_those_of_the_proxy(python: str, tmp_path: Path) -> None:
    """Two seats: the solver is the rollout, the judge its sub-agent; each of their calls is a step with its tokens."""
    taskset = load_agent(f"verifiers:{TASKSET}?take=2", python=python)
    assert isinstance(taskset, VerifiersTaskset)
    tasks = taskset.tasks()
    assert [(task.data["idx"], task.ground_truth) for task in tasks] == [(0, "0"), (1, "2")]
    rollouts = [Rollout(run_id="r", task=task, rollout_index=index) for task in tasks for index in range(2)]
    with engine_server() as engine:
        endings = played(taskset, [engine.url], tmp_path, rollouts, sampling={"temperature": 0.5})
        calls = {call.number: call for call in engine.calls}
    assert [(ending.status, ending.error) for ending in endings] == 4 * [("completed", None)]
    lk = lake.open(str(tmp_path / "lake"))
    rows = lk.sql(
        "SELECT e.*, s.action, s.extra ->> 'id' AS answer_id, t.context_ids, t.action_ids, t.temperature "
        "FROM episodes e JOIN steps s USING (episode_id) JOIN tokens t USING (episode_id, step_index)"
    ).to_dicts()
    check_tokens(rows, calls)
    solved = {(row["task_id"], row["rollout_index"]): row for row in rows if row["agent_id"] is None}
    assert len(solved) == 4
    for task in tasks:
        for index in range(2):
            row = solved[str(task.name), index]
            assert row["env_return"] == 1 + 0.5 * task.data["idx"] / 4
    scores = lk.sql("SELECT scorer, count(*) AS n, sum(value) AS v FROM scores GROUP BY scorer ORDER BY scorer").rows()
    assert scores == [("answered", len(rows), float(len(rows))), ("short", len(rows), len(rows) / 8)]
    judged = [row for row in rows if row["agent_id"] == "judge"]
    assert len(judged) == 4
    assert {row["parent_episode_id"] for row in judged} == {row["episode_id"] for row in solved.values()}
    assert {row["task_id"] for row in judged} == {f"{task.name} [judge]" for task in tasks}, "a group of its own"


def check_tokens(rows: list[dict[str, Any]], calls: dict[int, Any]) -> None:
    """Every call of the engine is one step with its tokens."""
    assert len(rows) == len(calls)
    for row in rows:
        sampled = calls[int(row["answer_id"].split("-")[1])]
        assert (row["context_ids"], row["action_ids"]) == (sampled.prompt_ids, sampled.action_ids)
        assert row["temperature"] == 0.5


def test_without_verifiers_it_says_what_to_install() -> None:
    taskset = load_agent("verifiers:any")
    assert isinstance(taskset, VerifiersTaskset)
    with pytest.raises(MissingExtraError, match=r"verifiers==0\.4\.0"):
        taskset.tasks()


@pytest.mark.parametrize("name", ["verifiers:", "verifiers:a?take=none", "verifiers:no/file.py"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="verifiers:"):
        load_agent(name)
