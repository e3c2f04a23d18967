"""Starts: worlds whose shortest solution is long enough for the horizon, in three parts by a hash of the world."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import count

from benchmarks.ladder.settings import LadderSettings
from pipelines.collect.environments.house import HELD_OUT_EVERY, Split, World, draw_world

VALIDATION_EVERY = 5
"""Of the worlds that are not held out, one in five is for validation."""
_PATIENCE = 20_000
"""Seeds in a row that give no new world before it is said that there are no more."""


class Part(StrEnum):
    """What a world is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


def part_of(world: World) -> Part:
    """The part a world belongs to: a function of its hash alone."""
    number = world.hash()
    if number % HELD_OUT_EVERY == 0:
        return Part.HELD_OUT
    return Part.VALIDATION if number // HELD_OUT_EVERY % VALIDATION_EVERY == 0 else Part.TRAIN


def optimum(world: World) -> int:
    """Actions of the shortest solution: to the key, take it, to the chest, open it, take the treasure, to the goal."""
    ways = ((world.start, world.key), (world.key, world.chest), (world.chest, world.goal))
    return 3 + sum(len(world.path(source, target)) for source, target in ways)


class Starts:
    """Gives out start seeds; no world twice.

    Raises:
        ValueError: when taking more than there are worlds.
    """

    def __init__(self, settings: LadderSettings, part: Part, first_seed: int = 0) -> None:
        self.split = Split.HELD_OUT if part is Part.HELD_OUT else Split.TRAIN
        self.optima: list[int] = []
        """Of all starts given out so far."""
        self._drawn = self._draw(settings, part, first_seed)

    def take(self, number: int) -> list[int]:
        """The next start seeds."""
        return [next(self._drawn) for _ in range(number)]

    def _draw(self, settings: LadderSettings, part: Part, first_seed: int) -> Iterator[int]:
        world_ids: set[int] = set()
        newest = first_seed
        for seed in count(first_seed):
            world = draw_world(seed, settings.rooms, self.split)
            if part_of(world) is not part or optimum(world) < settings.least_optimum or world.hash() in world_ids:
                if seed - newest > _PATIENCE:
                    msg = f"there are only {len(world_ids)} such worlds of {settings.rooms} rooms"
                    raise ValueError(msg)
                continue
            newest = seed
            world_ids.add(world.hash())
            self.optima.append(optimum(world))
            yield seed
