"""The world of the house: rooms on a grid, and where the key, the chest and the goal are.

A world is drawn from a seed alone. Which split it belongs to is decided by a hash of the world itself, so that the
held-out worlds are disjoint from the training worlds whatever seeds are used: seeds only say where drawing starts.
"""

import json
import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from lake import ids

ROOM_NAMES = ("attic", "cellar", "garden", "hall", "kitchen", "study")
OFFSETS = {"east": (1, 0), "north": (0, 1), "south": (0, -1), "west": (-1, 0)}
OPPOSITE = {"east": "west", "north": "south", "south": "north", "west": "east"}
HELD_OUT_EVERY = 5
"""One world in five is held out."""


class Split(StrEnum):
    """Which worlds a house draws from."""

    TRAIN = "train"
    """Four worlds in five."""
    HELD_OUT = "held_out"
    """The fifth, never seen in training."""


@dataclass(frozen=True, slots=True)
class World:
    """An initial house. Every room is reachable from every other one."""

    exits: dict[str, dict[str, str]]
    """Room -> direction -> room."""
    start: str
    key: str
    """Room in which the key lies."""
    chest: str
    """Room of the locked chest, which holds the treasure."""
    goal: str
    """Room the treasure has to be brought to; never the chest's room."""

    def hash(self) -> int:
        """63-bit hash of the whole world, hidden parts included."""
        world = {"exits": self.exits, "start": self.start, "key": self.key, "chest": self.chest, "goal": self.goal}
        return ids.text_hash(json.dumps(world, sort_keys=True, separators=(",", ":")))

    def path(self, source: str, target: str) -> list[str]:
        """Directions of a shortest way between two rooms; empty if they are the same."""
        return shortest_path(self.exits, source, {target}) or []


def shortest_path(exits: dict[str, dict[str, str]], source: str, targets: set[str]) -> list[str] | None:
    """Directions of a shortest way to the nearest target, ties broken by direction name; None if there is no way."""
    ways: dict[str, list[str]] = {source: []}
    queue = deque([source])
    while queue:
        room = queue.popleft()
        if room in targets:
            return ways[room]
        for direction, neighbour in sorted(exits.get(room, {}).items()):
            if neighbour not in ways:
                ways[neighbour] = [*ways[room], direction]
                queue.append(neighbour)
    return None


def split_of(world: World) -> Split:
    """The split a world belongs to: a function of the world alone."""
    return Split.HELD_OUT if world.hash() % HELD_OUT_EVERY == 0 else Split.TRAIN


def draw_world(seed: int, rooms: int, split: Split) -> World:
    """The world of a seed: the first of the seed's sequence of worlds that belongs to the split."""
    rng = random.Random(ids.key_hash("house", seed, rooms))
    while True:
        world = _any_world(rng, rooms)
        if split_of(world) is split:
            return world


def _any_world(rng: random.Random, rooms: int) -> World:
    names = rng.sample(ROOM_NAMES, rooms)
    cells = {(0, 0): names[0]}
    exits: dict[str, dict[str, str]] = {names[0]: {}}
    for name in names[1:]:
        free = sorted(
            (cell, direction)
            for cell in cells
            for direction, (dx, dy) in OFFSETS.items()
            if (cell[0] + dx, cell[1] + dy) not in cells
        )
        cell, direction = rng.choice(free)
        neighbour = cells[cell]
        cells[cell[0] + OFFSETS[direction][0], cell[1] + OFFSETS[direction][1]] = name
        exits[neighbour][direction] = name
        exits[name] = {OPPOSITE[direction]: neighbour}
    chest = rng.choice(names)
    goal = rng.choice([name for name in names if name != chest])
    return World(exits=exits, start=names[0], key=rng.choice(names), chest=chest, goal=goal)
