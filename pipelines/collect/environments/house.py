"""A tiny text house: find the key, open the chest, bring the treasure to the room that the task names.

It plays 100,000 steps a second and still needs memory. The task appears only in the first observation, and the player
must remember the map and the positions of things. The only reward is 1.0 at the end. An observation names the room, the
visible things, the chest, the hands and, last, the exits. A malformed or ineffective action costs a step. Its answer
puts "That does not work." before the view: alone, the sentence would make different situations look equal.

A seed alone draws a world. A hash of the world decides its split, so held-out and training worlds are disjoint for all
seeds.

`HouseScript` is a scripted player with its own map and adjustable noise. Like a model, it reads only observations. It
walks to the nearest unexplored exit while something is missing. With probability `noise` it takes a uniformly random
admissible action instead. Its traces warm up a policy and leave room to learn.
"""

import json
import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, Field

from lake import ids
from pipelines.collect.environments.games import Answer, Info
from pipelines.collect.policies import Decision, PolicyCard, Session, Turn

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
    """An initial house. Every room is reachable from every other room."""

    exits: dict[str, dict[str, str]]
    """Room -> direction -> room."""
    start: str
    key: str
    """Room of the key."""
    chest: str
    """Room of the locked chest, which holds the treasure."""
    goal: str
    """Target room of the treasure; never the chest's room."""

    def hash(self) -> int:
        """Return a 63-bit hash of the complete world, hidden parts included."""
        world = {"exits": self.exits, "start": self.start, "key": self.key, "chest": self.chest, "goal": self.goal}
        return ids.text_hash(json.dumps(world, sort_keys=True, separators=(",", ":")))

    def path(self, source: str, target: str) -> list[str]:
        """Return the directions of a shortest path between two rooms; empty if they are equal."""
        return shortest_path(self.exits, source, {target}) or []


def shortest_path(exits: dict[str, dict[str, str]], source: str, targets: set[str]) -> list[str] | None:
    """Return the directions to the nearest target, ties broken by direction name; None if unreachable."""
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


def get_split(world: World) -> Split:
    """Return the split of a world, which depends on the world alone."""
    return Split.HELD_OUT if world.hash() % HELD_OUT_EVERY == 0 else Split.TRAIN


def draw_world(seed: int, rooms: int, split: Split) -> World:
    """Return the world of a seed: the first in the seed's sequence that belongs to the split."""
    rng = random.Random(ids.key_hash("house", seed, rooms))
    while True:
        world = _any_world(rng, rooms)
        if get_split(world) is split:
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


REFUSAL = "That does not work."
THINGS = ("key", "treasure")
HANDS = "hands"
"""Position of a thing that the player holds."""
VERBS: dict[str, tuple[str, ...]] = {
    "drop": THINGS,
    "go": tuple(OFFSETS),
    "look": (),
    "open": ("chest",),
    "take": THINGS,
}
"""The grammar: a verb and one of its objects; `look` has none."""
SENTENCES = frozenset(f"{verb} {thing}".strip() for verb, things in VERBS.items() for thing in things or ("",))
"""All well-formed actions."""


class HouseConfig(BaseModel, frozen=True, extra="forbid"):
    """Size, horizon and split of a house."""

    rooms: int = Field(default=3, ge=2, le=len(ROOM_NAMES))
    """Number of rooms."""
    horizon: int = Field(default=20, ge=1)
    """Maximum actions of an episode."""
    split: Split = Split.TRAIN
    """Split to draw worlds from."""


class House:
    """One playable house; the module docstring has the rules."""

    def __init__(self, config: HouseConfig | None = None) -> None:
        self.config = config or HouseConfig()
        self.name = f"house-{self.config.rooms}"
        self.split = self.config.split.value
        self._game: _Game | None = None

    def reset(self, seed: int) -> Answer:
        """Draw the world of the seed. The observation starts with the task."""
        world = draw_world(seed, self.config.rooms, self.config.split)
        self._game = _Game(world)
        return self._answer(self._game, f"Bring the treasure to the {world.goal}. {self._game.view()}")

    def step(self, action: str) -> Answer:
        """Take an action. Raises RuntimeError: no episode is running."""
        game = self._game
        if game is None or self._is_over(game):
            msg = "the house has no running episode; call reset(seed) first"
            raise RuntimeError(msg)
        sentence = action.strip()
        is_admissible = sentence in game.admissible()
        game.step_count += 1
        if is_admissible:
            game.apply(*sentence.partition(" ")[::2])
        observation = game.view() if is_admissible else f"{REFUSAL} {game.view()}"
        return self._answer(game, observation, sentence in SENTENCES, is_admissible)

    def _is_over(self, game: "_Game") -> bool:
        return game.is_won() or game.step_count >= self.config.horizon

    def _answer(
        self, game: "_Game", observation: str, is_well_formed: bool = True, is_admissible: bool = True
    ) -> Answer:
        done = self._is_over(game)
        info = Info(
            admissible=() if done else game.admissible(),
            is_well_formed=is_well_formed,
            is_admissible=is_admissible,
            terminated=game.is_won(),
            initial_world_hash=game.world_hash,
        )
        return Answer(observation, float(game.is_won()), done, info)


class _Game:
    """A world in play, with the current positions of the player and the things."""

    def __init__(self, world: World) -> None:
        self.world_hash = world.hash()
        self.step_count = 0
        self._world = world
        self._room = world.start
        self._places = {"key": world.key, "treasure": ""}
        self._is_locked = True

    def is_won(self) -> bool:
        """Return whether the player holds the treasure in the goal room."""
        return self._places["treasure"] == HANDS and self._room == self._world.goal

    def apply(self, verb: str, thing: str) -> None:
        """Carry out an admissible action."""
        if verb == "go":
            self._room = self._world.exits[self._room][thing]
        elif verb == "take":
            self._places[thing] = HANDS
        elif verb == "drop":
            self._places[thing] = self._room
        elif verb == "open":
            self._is_locked = False
            self._places["treasure"] = self._room

    def admissible(self) -> tuple[str, ...]:
        """Return the actions that have an effect now, sorted; looking always has one."""
        actions = [f"go {direction}" for direction in self._world.exits[self._room]]
        actions += [f"take {thing}" for thing in self._things(self._room)]
        actions += [f"drop {thing}" for thing in self._things(HANDS)]
        if self._is_locked and self._room == self._world.chest and self._places["key"] == HANDS:
            actions.append("open chest")
        return tuple(sorted([*actions, "look"]))

    def view(self) -> str:
        """Return the player's view."""
        room_things, hand_things = (" ".join(self._things(room)) or "nothing" for room in (self._room, HANDS))
        lock = "locked" if self._is_locked else "open"
        chest = f"Chest {lock}" if self._room == self._world.chest else "No chest"
        exits = " ".join(sorted(self._world.exits[self._room]))
        return f"Room {self._room}. You see {room_things}. {chest}. You hold {hand_things}. Exits {exits}"

    def _things(self, room: str) -> list[str]:
        return [thing for thing in THINGS if self._places[thing] == room]


def list_vocabulary() -> list[str]:
    """Return all words and punctuation marks of houses, sorted."""
    frame = "Bring the treasure to the Room You see nothing. Chest locked open No chest. You hold Exits"
    texts = [frame, REFUSAL, *SENTENCES, *ROOM_NAMES]
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})


_TASK = re.compile(r"Bring the treasure to the (\w+)\.")
_VIEW = re.compile(
    r"Room (\w+)\. You see ([\w ]+)\. (Chest locked|Chest open|No chest)\. You hold ([\w ]+)\. Exits ([\w ]+)$"
)
_FRONTIER = "?"


class HouseScript:
    """The scripted policy: `noise` is the probability of a random admissible action."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    @property
    def card(self) -> PolicyCard:
        """Name and noise; a script has no weights."""
        return PolicyCard(name="house-script", sampling={"noise": self.noise})

    def start(self, seeds_E: Sequence[int]) -> Session:
        """Create one player per seed."""
        return _ScriptSession([_Player(self.noise, seed) for seed in seeds_E])


class _ScriptSession:
    def __init__(self, players_E: list["_Player"]) -> None:
        self._players_E = players_E

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        return [Decision(self._players_E[turn.rollout].decide(turn), finish_reason="stop") for turn in turns]


class _Player:
    """One rollout's memory: map, last known positions of things, and goal."""

    def __init__(self, noise: float, seed: int) -> None:
        self._noise = noise
        self._rng = random.Random(ids.key_hash("house-script", seed))
        self._exits: dict[str, dict[str, str]] = {}
        self._seen_in: dict[str, str] = {}
        self._goal = ""
        self._came_from: tuple[str, str] | None = None

    def decide(self, turn: Turn) -> str:
        """Return the next action for the new messages."""
        best = self._best_action(str(turn.messages[-1]["content"]))
        action = best
        if self._rng.random() < self._noise:
            action = self._rng.choice(turn.admissible)
        verb, _, direction = action.partition(" ")
        self._came_from = (self._room, direction) if verb == "go" else None
        return action

    def _best_action(self, observation: str) -> str:
        if task := _TASK.search(observation):
            self._goal = task.group(1)
        view = _VIEW.search(observation)
        if view is None:
            return "look"
        room, room_things, chest, hand_things, exits = view.groups()
        self._note(room, set(room_things.split()), chest, exits.split())
        return self._plan(room, set(room_things.split()), chest, set(hand_things.split()))

    def _note(self, room: str, room_things: set[str], chest: str, exits: list[str]) -> None:
        self._room = room
        exits_of_room = self._exits.setdefault(room, {})
        for direction in exits:
            exits_of_room.setdefault(direction, f"{_FRONTIER}{room}.{direction}")
        if self._came_from is not None and self._came_from[0] != room:
            before, direction = self._came_from
            self._exits[before][direction] = room
            exits_of_room[OPPOSITE[direction]] = before
        things = room_things | ({"chest"} if chest != "No chest" else set())
        self._seen_in = {thing: last_room for thing, last_room in self._seen_in.items() if last_room != room}
        self._seen_in |= dict.fromkeys(things - {"nothing"}, room)

    def _plan(self, room: str, room_things: set[str], chest: str, hand_things: set[str]) -> str:
        if "treasure" in hand_things:
            return self._walk(room, self._goal)
        if "treasure" in room_things:
            return "take treasure"
        if "treasure" in self._seen_in:
            return self._walk(room, self._seen_in["treasure"])
        if "key" in hand_things:
            return "open chest" if chest == "Chest locked" else self._walk(room, self._seen_in.get("chest"))
        return "take key" if "key" in room_things else self._walk(room, self._seen_in.get("key"))

    def _walk(self, room: str, target: str | None) -> str:
        """Return one step towards a room, or towards the nearest unexplored exit if the path is unknown."""
        way = shortest_path(self._exits, room, {target}) if target else None
        if way is None:
            frontier = {
                neighbour for exits in self._exits.values() for neighbour in exits.values() if neighbour[0] == _FRONTIER
            }
            way = shortest_path(self._exits, room, frontier)
        return f"go {way[0]}" if way else "look"
