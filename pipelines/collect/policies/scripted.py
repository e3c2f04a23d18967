"""A scripted player of the house: reactive, with its own map, and as imperfect as asked for.

It reads nothing but the observations, like a model would: it walks to the nearest unexplored exit while something is
missing, and with probability `noise` takes a uniformly random admissible action instead. Its traces warm a policy up,
and leave something to learn.
"""

import random
import re
from collections.abc import Sequence

from lake import ids
from pipelines.collect.environments.house import OFFSETS, shortest_path
from pipelines.collect.policies.protocol import Decision, PolicyCard, Session, Turn

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
            known[_back(direction)] = before
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


def _back(direction: str) -> str:
    dx, dy = OFFSETS[direction]
    return next(name for name, offset in OFFSETS.items() if offset == (-dx, -dy))
