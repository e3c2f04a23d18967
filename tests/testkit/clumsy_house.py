"""A lake of the tiny house, played by someone who tries things that do not work, and is refused."""

import random
from collections.abc import Sequence
from pathlib import Path

import lake
from lake import Lake
from pipelines.collect.environments.games import GroupConfig, collect_groups, distinct_seeds
from pipelines.collect.environments.house import SENTENCES, House, HouseConfig, HouseScript
from pipelines.collect.policies import Decision, Session, Turn

WORLDS, SIBLINGS = 40, 8
TRIES = 0.2
"""How often any sentence of the grammar is tried, whether it works or not."""


class ClumsyScript(HouseScript):
    """The scripted player, who says any well-formed sentence at all one time in five."""

    def start(self, seeds_E: Sequence[int]) -> Session:
        return _ClumsySession(super().start(seeds_E), seeds_E)


class _ClumsySession:
    def __init__(self, sensible: Session, seeds_E: Sequence[int]) -> None:
        self._sensible = sensible
        self._rng_E = [random.Random(seed) for seed in seeds_E]

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        decisions = self._sensible.act(turns)
        return [self._tries(turn, decision) for turn, decision in zip(turns, decisions, strict=True)]

    def _tries(self, turn: Turn, decision: Decision) -> Decision:
        rng = self._rng_E[turn.rollout]
        return Decision(rng.choice(sorted(SENTENCES))) if rng.random() < TRIES else decision


def clumsy_lake(folder: Path) -> Lake:
    """40 worlds of three rooms, 8 rollouts each."""
    lk = lake.open(folder, create=True)
    config = HouseConfig(rooms=3)

    def house() -> House:
        return House(config)

    seeds_P = distinct_seeds(house, 0, WORLDS)
    groups = collect_groups(
        house, ClumsyScript(0.1), seeds_P, config=GroupConfig(group_size=SIBLINGS), run_seed=1, collection_round=0
    )
    with lk.job(kind="collect", run_id="house") as job:
        for group in groups:
            job.record(group)
    return lk
