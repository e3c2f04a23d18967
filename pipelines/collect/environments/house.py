"""A tiny text house: find the key, open the chest, bring the treasure to the room the task names.

Small enough to play 100,000 steps a second, rich enough to need memory: the task is told once, the map and the places
of things must be remembered, and the reward is a single 1.0 at the end. An observation names the room, what is seen,
the chest, the hands and, last, the exits (the words that matter for the next action stand next to it). An action that
is malformed or has no effect costs a step and is answered "That does not work." in front of the view, so that it does
not make unlike situations look alike.
"""

import re

from pydantic import BaseModel, ConfigDict, Field

from pipelines.collect.environments.house_world import OFFSETS, ROOM_NAMES, Split, World, draw_world
from pipelines.collect.environments.protocol import Info, Outcome

REFUSAL = "That does not work."
THINGS = ("key", "treasure")
_GRAMMAR = re.compile(
    rf"(?P<go>go (?:{'|'.join(OFFSETS)}))|(?P<take>take (?:{'|'.join(THINGS)}))"
    rf"|(?P<drop>drop (?:{'|'.join(THINGS)}))|(?P<open>open chest)|(?P<look>look)"
)


class HouseConfig(BaseModel):
    """What a house is like."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        self._world: World | None = None

    def reset(self, seed: int) -> Outcome:
        """Draw the world of the seed; the observation opens with the task."""
        world = draw_world(seed, self.config.rooms, self.config.split)
        self._world = world
        self._world_hash = world.hash()
        self._room = world.start
        self._places: dict[str, str | None] = {"key": world.key, "treasure": None}
        self._locked = True
        self._taken = 0
        self._won = False
        task = f"Bring the treasure to the {world.goal}."
        return self._answer(f"{task} {self._view(world)}", 0.0)

    def step(self, action: str) -> Outcome:
        """Take an action.

        Raises:
            RuntimeError: no running episode.
        """
        world = self._world
        if world is None or self._won or self._taken >= self.config.horizon:
            msg = "the house has no running episode; call reset(seed) first"
            raise RuntimeError(msg)
        self._taken += 1
        match = _GRAMMAR.fullmatch(action.strip())
        admissible = match is not None and action.strip() in self._admissible(world)
        if match is not None and admissible:
            self._apply(world, match)
        self._won = self._places["treasure"] == HANDS and self._room == world.goal
        view = self._view(world)
        return self._answer(
            view if admissible else f"{REFUSAL} {view}", float(self._won), match is not None, admissible
        )

    def _apply(self, world: World, match: re.Match[str]) -> None:
        verb, _, thing = match.group().partition(" ")
        if verb == "go":
            self._room = world.exits[self._room][thing]
        elif verb == "take":
            self._places[thing] = HANDS
        elif verb == "drop":
            self._places[thing] = self._room
        elif verb == "open":
            self._locked = False
            self._places["treasure"] = self._room

    def _admissible(self, world: World) -> list[str]:
        actions = [f"go {direction}" for direction in world.exits[self._room]]
        actions += [f"take {thing}" for thing in THINGS if self._places[thing] == self._room]
        actions += [f"drop {thing}" for thing in THINGS if self._places[thing] == HANDS]
        if self._locked and self._room == world.chest and self._places["key"] == HANDS:
            actions.append("open chest")
        return sorted([*actions, "look"])

    def _view(self, world: World) -> str:
        seen = " ".join(thing for thing in THINGS if self._places[thing] == self._room) or "nothing"
        held = " ".join(thing for thing in THINGS if self._places[thing] == HANDS) or "nothing"
        chest = ("Chest locked" if self._locked else "Chest open") if self._room == world.chest else "No chest"
        exits = " ".join(sorted(world.exits[self._room]))
        return f"Room {self._room}. You see {seen}. {chest}. You hold {held}. Exits {exits}"

    def _answer(
        self, observation: str, reward: float, well_formed: bool = True, admissible: bool = True
    ) -> Outcome:
        world = self._world
        done = self._won or self._taken >= self.config.horizon
        info = Info(
            admissible=() if done or world is None else tuple(self._admissible(world)),
            is_well_formed=well_formed,
            is_admissible=admissible,
            terminated=self._won,
            initial_world_hash=self._world_hash,
        )
        return Outcome(observation, reward, done, info)


HANDS = "hands"


def vocabulary() -> list[str]:
    """Every word and punctuation mark that a house or a sentence of its grammar can contain, sorted."""
    texts = [
        REFUSAL, "Bring the treasure to the room. Room You see nothing. Chest locked open No chest. You hold Exits",
        "go take drop open look chest", *ROOM_NAMES, *OFFSETS, *THINGS,
    ]
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})
