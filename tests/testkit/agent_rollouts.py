"""Rollouts of agents through `AgentPlayer`, before the small engine, as a manager plays them."""

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.agents import Agent, play_agent
from pipelines.collect.agents.play_agent import AgentPlayer
from pipelines.collect.environments import Task
from pipelines.collect.players import Ending, Rollout
from testkit.commands import Command


def fork_proxies(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Have proxies of a test forked instead of started by an interpreter, and without a guard; gives those started.

    `test_collect_agents_kill.py` and the tests of the command have real ones, which end with their parent.
    """
    started: list[Command] = []

    class Forked:
        PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

        @staticmethod
        def Popen(words: Sequence[str], **options: Any) -> Command:
            started.append(Command(words[words.index("record") :], **options))
            return started[-1]

    monkeypatch.setattr(play_agent, "subprocess", Forked)
    return started


class NoLog:
    """The log of a player that records alone."""

    steps: Sequence[StepRecord] = ()

    def begin(self, record: EpisodeRecord) -> None:
        raise AssertionError(record)

    async def step(self, record: StepRecord) -> None:
        raise AssertionError(record)

    def takes(self, status: str) -> bool:
        return True


def rollout(name: str | None, index: int = 0, **options: Any) -> Rollout:
    """One of the run `r`, of a task that says its name."""
    task = options.pop("task", None) or Task(
        name=name, seed=options.pop("task_seed", 0), messages=[{"role": "user", "content": f"Find the key of {name}."}]
    )
    return Rollout(run_id="r", task=task, rollout_index=index, **options)


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
            return await asyncio.gather(*(with_proxies.play(rollout, NoLog()) for rollout in rollouts))
        finally:
            await with_proxies.close()

    return asyncio.run(run())
