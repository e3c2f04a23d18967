"""A tiny text house: find the key, open the chest, bring the treasure to the room the task names.

Small enough to play 100,000 steps a second, rich enough to need memory: the task is told once, the map and the places
of things must be remembered, and the only reward is 1.0 at the end. An observation names the room, what is seen, the
chest, the hands and, last, the exits. An action that is malformed or has no effect costs a step and is answered "That
does not work." in front of the view: alone, the sentence would make unlike situations look alike.

A world is drawn from a seed alone. A hash of the world decides its split, so that the held-out worlds are disjoint from
the training worlds whatever seeds are used.

`HouseScript` is a scripted player, reactive, with its own map, and as imperfect as asked for. It reads nothing but the
observations, like a model would: it walks to the nearest unexplored exit while something is missing, and with
probability `noise` takes a uniformly random admissible action instead. Its traces warm a policy up, and leave something
to learn.
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


REFUSAL = "That does not work."
THINGS = ("key", "treasure")
HANDS = "hands"
"""Where a thing is that the player holds."""
VERBS: dict[str, tuple[str, ...]] = {
    "drop": THINGS,
    "go": tuple(OFFSETS),
    "look": (),
    "open": ("chest",),
    "take": THINGS,
}
"""The grammar: a verb and one of its objects; `look` stands alone."""
SENTENCES = frozenset(f"{verb} {thing}".strip() for verb, things in VERBS.items() for thing in things or ("",))
"""Every well-formed action."""


class HouseConfig(BaseModel, frozen=True, extra="forbid"):
    """What a house is like."""

    rooms: int = Field(default=3, ge=2, le=len(ROOM_NAMES))
    """Number of rooms."""
    horizon: int = Field(default=20, ge=1)
    """Actions after which the episode is cut off."""
    split: Split = Split.TRAIN
    """Which worlds are drawn."""


class House:
    """One playable house. See the module docstring for the rules."""

    def __init__(self, config: HouseConfig | None = None) -> None:
        self.config = config or HouseConfig()
        self.name = f"house-{self.config.rooms}"
        self.split = self.config.split.value
        self._game: _Game | None = None

    def reset(self, seed: int) -> Answer:
        """Draw the world of the seed. The observation opens with the task."""
        world = draw_world(seed, self.config.rooms, self.config.split)
        self._game = _Game(world)
        return self._answer(self._game, f"Bring the treasure to the {world.goal}. {self._game.view()}")

    def step(self, action: str) -> Answer:
        """Take an action; RuntimeError if no episode is running."""
        game = self._game
        if game is None or self._is_over(game):
            msg = "the house has no running episode; call reset(seed) first"
            raise RuntimeError(msg)
        sentence = action.strip()
        is_admissible = sentence in game.admissible()
        game.taken += 1
        if is_admissible:
            game.apply(*sentence.partition(" ")[::2])
        observation = game.view() if is_admissible else f"{REFUSAL} {game.view()}"
        return self._answer(game, observation, sentence in SENTENCES, is_admissible)

    def _is_over(self, game: "_Game") -> bool:
        return game.is_won() or game.taken >= self.config.horizon

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
    """A world being played: where the player and the things are now."""

    def __init__(self, world: World) -> None:
        self.world_hash = world.hash()
        self.taken = 0
        self._world = world
        self._room = world.start
        self._places = {"key": world.key, "treasure": ""}
        self._is_locked = True

    def is_won(self) -> bool:
        """The treasure is held in the goal room."""
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
        """Actions that have an effect now, sorted; looking always shows something."""
        actions = [f"go {direction}" for direction in self._world.exits[self._room]]
        actions += [f"take {thing}" for thing in self._things(self._room)]
        actions += [f"drop {thing}" for thing in self._things(HANDS)]
        if self._is_locked and self._room == self._world.chest and self._places["key"] == HANDS:
            actions.append("open chest")
        return tuple(sorted([*actions, "look"]))

    def view(self) -> str:
        """What the player sees."""
        seen, held = (" ".join(self._things(place)) or "nothing" for place in (self._room, HANDS))
        lock = "locked" if self._is_locked else "open"
        chest = f"Chest {lock}" if self._room == self._world.chest else "No chest"
        exits = " ".join(sorted(self._world.exits[self._room]))
        return f"Room {self._room}. You see {seen}. {chest}. You hold {held}. Exits {exits}"

    def _things(self, place: str) -> list[str]:
        return [thing for thing in THINGS if self._places[thing] == place]


def vocabulary() -> list[str]:
    """Every word and punctuation mark that houses say or understand, sorted; nothing else."""
    frame = "Bring the treasure to the Room You see nothing. Chest locked open No chest. You hold Exits"
    texts = [frame, REFUSAL, *SENTENCES, *ROOM_NAMES]
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})


_TASK = re.compile(r"Bring the treasure to the (\w+)\.")
_VIEW = re.compile(
    r"Room (\w+)\. You see ([\w ]+)\. (Chest locked|Chest open|No chest)\. You hold ([\w ]+)\. Exits ([\w ]+)$"
)
_FRONTIER = "?"


class HouseScript:
    """The policy: `noise` is the probability of a random admissible action."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    @property
    def card(self) -> PolicyCard:
        """Name and noise; a script has no weights."""
        return PolicyCard(name="house-script", sampling={"noise": self.noise})

    def start(self, seeds_E: Sequence[int]) -> Session:
        """One player per seed."""
        return _ScriptSession([_Player(self.noise, seed) for seed in seeds_E])


class _ScriptSession:
    def __init__(self, players_E: list["_Player"]) -> None:
        self._players_E = players_E

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        return [Decision(self._players_E[turn.rollout].decide(turn), finish_reason="stop") for turn in turns]


class _Player:
    """One rollout's memory: the map, where things were last seen, and what is to be done."""

    def __init__(self, noise: float, seed: int) -> None:
        self._noise = noise
        self._rng = random.Random(ids.key_hash("house-script", seed))
        self._exits: dict[str, dict[str, str]] = {}
        self._seen_in: dict[str, str] = {}
        self._goal = ""
        self._came_from: tuple[str, str] | None = None

    def decide(self, turn: Turn) -> str:
        """The next action, given the new messages."""
        wanted = self._wanted(str(turn.messages[-1]["content"]))
        action = wanted
        if self._rng.random() < self._noise:
            action = self._rng.choice(turn.admissible)
        verb, _, direction = action.partition(" ")
        self._came_from = (self._room, direction) if verb == "go" else None
        return action

    def _wanted(self, observation: str) -> str:
        if task := _TASK.search(observation):
            self._goal = task.group(1)
        view = _VIEW.search(observation)
        if view is None:
            return "look"
        room, seen, chest, held, exits = view.groups()
        self._note(room, set(seen.split()), chest, exits.split())
        return self._plan(room, set(seen.split()), chest, set(held.split()))

    def _note(self, room: str, seen: set[str], chest: str, exits: list[str]) -> None:
        self._room = room
        known = self._exits.setdefault(room, {})
        for direction in exits:
            known.setdefault(direction, f"{_FRONTIER}{room}.{direction}")
        if self._came_from is not None and self._came_from[0] != room:
            before, direction = self._came_from
            self._exits[before][direction] = room
            known[OPPOSITE[direction]] = before
        things = seen | ({"chest"} if chest != "No chest" else set())
        self._seen_in = {thing: place for thing, place in self._seen_in.items() if place != room}
        self._seen_in |= dict.fromkeys(things - {"nothing"}, room)

    def _plan(self, room: str, seen: set[str], chest: str, held: set[str]) -> str:
        if "treasure" in held:
            return self._walk(room, self._goal)
        if "treasure" in seen:
            return "take treasure"
        if "treasure" in self._seen_in:
            return self._walk(room, self._seen_in["treasure"])
        if "key" in held:
            return "open chest" if chest == "Chest locked" else self._walk(room, self._seen_in.get("chest"))
        return "take key" if "key" in seen else self._walk(room, self._seen_in.get("key"))

    def _walk(self, room: str, target: str | None) -> str:
        """One step towards a room; towards the nearest unexplored exit if the room or the way is not known."""
        way = shortest_path(self._exits, room, {target}) if target else None
        if way is None:
            frontier = {place for exits in self._exits.values() for place in exits.values() if place[0] == _FRONTIER}
            way = shortest_path(self._exits, room, frontier)
        return f"go {way[0]}" if way else "look"
