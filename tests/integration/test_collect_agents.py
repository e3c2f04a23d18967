"""Agents as functions before the recording proxy: each call is a step of its rollout, what they return is its end.

The engine is the small conforming one; proxies are their own processes.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lake
from pipelines.collect.agents import Client, Result
from pipelines.collect.environments import Task
from testkit.agent_rollouts import fork_proxies, played, rollout
from testkit.engine_server import engine_server

MANY, SOME = 64, 8
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
STEPS = """
    SELECT e.*, s.step_index, s.action, s.extra ->> 'id' AS answer_id, s.trainable,
           t.context_ids, t.action_ids, t.prefix_step_index, t.temperature
    FROM episodes e LEFT JOIN steps s USING (episode_id) LEFT JOIN tokens t USING (episode_id, step_index)
    ORDER BY e.task_id, e.rollout_index, e.attempt, s.step_index
"""


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_proxies(monkeypatch)


def steps_in(folder: Path) -> list[dict[str, Any]]:
    return lake.open(str(folder / "lake")).sql(STEPS).to_dicts()


def reward_of(task: Task, text: str) -> float:
    """Another number for each task, so that a reward in the wrong place is seen."""
    return int(str(task.name)[-3:]) / 100 + len(text)


def turns(task: Task, ask: Callable[[list[Any]], Any]) -> str:
    """A conversation with a tool; `ask` makes a call."""
    messages: list[Any] = list(task.messages)
    while True:
        message = ask(messages)
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            thing = json.loads(call.function.arguments)["at"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"a {thing}"})


def blocking(task: Task, client: Client) -> float:
    with client.openai() as api:

        def ask(messages: list[Any]) -> Any:
            completion = api.chat.completions.create(
                model=client.model, messages=messages, tools=[LOOK], **client.sampling
            )
            return completion.choices[0].message

        return reward_of(task, turns(task, ask))


async def asynchronous(task: Task, client: Client) -> Result:
    messages: list[Any] = list(task.messages)
    async with client.async_openai() as api:
        while True:
            completion = await api.chat.completions.create(
                model=client.model, messages=messages, tools=[LOOK], **client.sampling
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return Result(reward=reward_of(task, str(message.content)), messages=messages)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "a thing"} for call in message.tool_calls]


def streaming(task: Task, client: Client) -> float:
    messages: list[Any] = list(task.messages)
    with client.openai() as api:
        for _ in range(3):
            stream = api.chat.completions.create(model=client.model, messages=messages, stream=True, **client.sampling)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    return reward_of(task, text)


def check(engine_calls: list[Any], rows: list[dict[str, Any]]) -> None:
    """Every call of an engine is one step, of the task that its prompt names, with its tokens."""
    numbers = [int(re.split("[-_]", row["answer_id"])[1]) for row in rows]
    assert sorted(numbers) == list(range(len(engine_calls))), "none lost, none twice"
    sequences: dict[tuple[int, int | None], list[int]] = {}
    for row, number in zip(rows, numbers, strict=True):
        sampled = engine_calls[number]
        assert f"of {row['task_id']}." in str(sampled.body), "the step is in its episode"
        prompt = sequences.get((row["episode_id"], row["prefix_step_index"]), []) + row["context_ids"]
        assert prompt == sampled.prompt_ids
        assert row["action_ids"] == sampled.action_ids
        sequences[row["episode_id"], row["step_index"]] = prompt + row["action_ids"]


@pytest.mark.parametrize(
    ("agent", "many"), [(asynchronous, MANY), (blocking, SOME), pytest.param(streaming, SOME, marks=pytest.mark.slow)]
)
def test_64_at_once(agent: Any, many: int, tmp_path: Path) -> None:
    """Tasks of eight siblings: every call is a step of its rollout, each reward is there, groups are whole.

    Agents that run in threads are fewer: what they share is shared by those of the event loop too.
    """
    rollouts = [
        rollout(f"task-{number // 8:03}", number % 8, expected_group_size=8, seed=1000 + number, collection_round=2)
        for number in range(many)
    ]
    with engine_server() as engine:
        sampling = {"temperature": 0.5}
        endings = played(agent, [engine.url], tmp_path, rollouts, sampling=sampling, environment="agents.py:agent")
        rows = steps_in(tmp_path)
        check(engine.calls, rows)
    assert len(rows) == 3 * many
    assert {(e.status, e.num_steps) for e in endings} == {("completed", 3)}
    assert all(e.completion_tokens for e in endings)
    last = [row for row in rows if row["step_index"] == 2]
    assert [row["env_return"] for row in last] == [e.env_return for e in endings]
    for row in last:
        assert row["env_return"] == int(row["task_id"][-3:]) / 100 + len(row["action"])
        assert (row["collection_round"], row["expected_group_size"], row["environment"]) == (2, 8, "agents.py:agent")
        assert (row["temperature"], row["seed"], row["attempt"]) == (0.5, 0, 0)
    groups = {row["group_id"]: row["task_id"] for row in rows}
    assert len(groups) == len(set(groups.values())) == many // 8
    assert sorted(call.body["seed"] for call in engine.calls) == sorted(3 * [*range(1000, 1000 + many)])
