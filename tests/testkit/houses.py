"""Helpers for tests of the house: an oracle that knows the world, and policies small enough to read."""

from collections.abc import Iterator, Sequence

from pipelines.collect.environments.games import Answer
from pipelines.collect.environments.house import House, HouseConfig, Split, World, draw_world
from pipelines.collect.policies import Decision, PolicyCard, Session, Turn


def world_of(seed: int, config: HouseConfig | None = None) -> World:
    """The world a house of this seed plays in."""
    config = config or HouseConfig()
    return draw_world(seed, config.rooms, config.split)


def solution(world: World) -> list[str]:
    """A shortest winning sequence of actions, for a player who knows everything."""
    legs = [(world.start, world.key, ["take key"]), (world.key, world.chest, ["open chest", "take treasure"])]
    legs.append((world.chest, world.goal, []))
    return [
        action for source, target, then in legs for action in [f"go {way}" for way in world.path(source, target)] + then
    ]


def walk(house: House, seed: int, actions: Sequence[str]) -> list[Answer]:
    """The outcomes of a start and of actions, up to the end of the episode."""
    outcomes = [house.reset(seed)]
    for action in actions:
        if outcomes[-1].done:
            break
        outcomes.append(house.step(action))
    return outcomes


def seeds_where(test: object, *, split: Split = Split.TRAIN) -> Iterator[int]:
    """Seeds whose three-room world satisfies a predicate."""
    assert callable(test)
    return (seed for seed in range(10_000) if test(draw_world(seed, 3, split)))


class Recited:
    """A policy that says the same lines in every rollout, and starts over when it runs out of them."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    @property
    def card(self) -> PolicyCard:
        return PolicyCard(name="recited", sampling={"lines": len(self._lines)})

    def start(self, seeds_E: Sequence[int]) -> Session:
        return _Recital(self._lines, len(seeds_E))


class _Recital:
    def __init__(self, lines: list[str], rollouts: int) -> None:
        self._lines = lines
        self.spoken_E = [0] * rollouts
        self.turns: list[list[Turn]] = []

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        self.turns.append(list(turns))
        decisions = [Decision(self._lines[self.spoken_E[turn.rollout] % len(self._lines)]) for turn in turns]
        for turn in turns:
            self.spoken_E[turn.rollout] += 1
        return decisions
