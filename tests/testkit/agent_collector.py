"""A process that plays rollouts of an agent which are not yet in the lake, as a manager does; for tests that kill it.

Arguments: a folder, the engine's URL, how many rollouts.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp  # noqa: F401 - before the process forks
import openai  # noqa: F401

import lake
from lake.errors import TrajlakeError
from pipelines.collect.agents import Client
from pipelines.collect.environments import Task
from testkit.agent_rollouts import NoLog, player, rollout


async def agent(task: Task, client: Client) -> float:
    messages = list(task.messages)
    async with client.async_openai() as api:
        for _ in range(3):
            completion = await api.chat.completions.create(model=client.model, messages=messages, **client.sampling)
            messages += [
                {"role": "assistant", "content": completion.choices[0].message.content},
                {"role": "user", "content": "?"},
            ]
    return float(len(messages[-2]["content"]))


def recorded(folder: Path) -> set[tuple[str, int]]:
    """Rollouts that are in the lake."""
    try:
        return set(lake.open(str(folder / "lake")).sql("SELECT task_id, rollout_index FROM episodes").rows())
    except TrajlakeError:
        return set()


async def collect(folder: Path, engine: str, count: int) -> None:
    playing = player(agent, [engine], folder)
    await playing.settle()
    present = recorded(folder)
    slots = [(f"task-{number // 4:03}", number % 4) for number in range(count)]
    print("settled", len(present), flush=True)
    slots_left = [slot for slot in slots if slot not in present]

    async def play(name: str, index: int) -> None:
        await playing.play(rollout(name, index, seed=index), NoLog())
        print("ended", flush=True)

    await asyncio.gather(*(play(*slot) for slot in slots_left))
    await playing.settle()
    await playing.close()
    print("done", flush=True)


def main(args: Sequence[str]) -> None:
    """Play; for `testkit.processes.Forked`."""
    asyncio.run(collect(Path(args[0]), args[1], int(args[2])))
