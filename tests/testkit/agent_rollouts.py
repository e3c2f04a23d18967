"""Rollouts of agents through `AgentPlayer`, before the small engine, as a manager plays them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.agents import Agent
from pipelines.collect.agents.play_agent import AgentPlayer
from pipelines.collect.environments import Task
from pipelines.collect.players import Ending, Rollout


class NoLog:
    """The log of a player that records by itself."""

    steps: Sequence[StepRecord] = ()

    def begin(self, record: EpisodeRecord) -> None:
        raise AssertionError(record)

    async def step(self, record: StepRecord) -> None:
        raise AssertionError(record)

    def takes(self, status: str) -> bool:
        return True


def rollout(name: str | None, index: int = 0, **more: Any) -> Rollout:
    """One of the run `r`, of a task that says its name."""
    task = more.pop("task", None) or Task(
        name=name, seed=more.pop("task_seed", 0), messages=[{"role": "user", "content": f"Find the key of {name}."}]
    )
    return Rollout(run_id="r", task=task, rollout_index=index, **more)


def player(agent: Agent, engines: Sequence[str], folder: Path, **options: Any) -> AgentPlayer:
    """A player whose lake and spool are below a folder."""
    return AgentPlayer(agent, engines, lake_uri=str(folder / "lake"), spool=folder / "spool", **options)


def played(
    agent: Agent, engines: Sequence[str], folder: Path, rollouts: Sequence[Rollout], **options: Any
) -> list[Ending]:
    """How rollouts ended that were played at once."""

    async def run() -> list[Ending]:
        with_proxies = player(agent, engines, folder, **options)
        try:
            await with_proxies.settle()
            return await asyncio.gather(*(with_proxies.play(one, NoLog()) for one in rollouts))
        finally:
            await with_proxies.close()

    return asyncio.run(run())
