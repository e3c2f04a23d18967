"""A tiny text house: find the key, open the chest, bring the treasure to the room the task names.

Small enough to play 100,000 steps a second, rich enough to need memory: the task is told once, the map and the places
of things must be remembered, and the only reward is 1.0 at the end. An observation names the room, what is seen, the
chest, the hands and, last, the exits (the words that matter for the next action stand next to it). An action that is
malformed or has no effect costs a step and is answered "That does not work." in front of the view: alone, the sentence
would make unlike situations look alike.
"""

import re

from pydantic import BaseModel, ConfigDict, Field

from pipelines.collect.environments.house_world import OFFSETS, ROOM_NAMES, Split, World, draw_world
from pipelines.collect.environments.protocol import Info, Outcome

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
        self._game: _Game | None = None

    def reset(self, seed: int) -> Outcome:
        """Draw the world of the seed. The observation opens with the task."""
        world = draw_world(seed, self.config.rooms, self.config.split)
        self._game = _Game(world)
        return self._answer(self._game, f"Bring the treasure to the {world.goal}. {self._game.view()}")

    def step(self, action: str) -> Outcome:
        """Take an action.

        Raises:
            RuntimeError: no running episode.
        """
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
    ) -> Outcome:
        done = self._is_over(game)
        info = Info(
            admissible=() if done else game.admissible(),
            is_well_formed=is_well_formed,
            is_admissible=is_admissible,
            terminated=game.is_won(),
            initial_world_hash=game.world_hash,
        )
        return Outcome(observation, float(game.is_won()), done, info)


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
