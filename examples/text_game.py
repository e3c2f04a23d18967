"""A text game whose states are known, written as trajectories: `python examples/text_game.py > game.jsonl`.

Each world is a house of six rooms: take the lamp and bring it to the room that the task names. The view is a full
description of the state, except that two things are as in games that were made for people: a line on top counts the
moves, and a command that makes no sense is answered with a sentence that says nothing of where the player is. Both can
be left out. docs/guides/which-anchor.md shows what the first does to GiGPO's anchors, and how `trajlake anchors` finds
both.
"""

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ROOMS = ("Attic", "Bathroom", "Bedroom", "Cellar", "Corridor", "Garden", "Kitchen", "Library", "Pantry", "Study")
OFFSETS = {"east": (1, 0), "north": (0, -1), "south": (0, 1), "west": (-1, 0)}
NOUNS = ("apple", "book", "carpet", "door", "knife", "mirror", "rope", "spoon", "table", "window")
VERBS = ("dance", "hum", "juggle", "ponder", "sing", "sleep", "swim", "whistle")
NO_SUCH_THING = "You can't see any such thing."
NO_SUCH_VERB = "That's not a verb I recognise."
NO_WAY = "You can't go that way."
ERRORS = (NO_SUCH_THING, NO_SUCH_VERB, NO_WAY)
WIDTH, HEIGHT = 3, 2
Place = tuple[int, int]


@dataclass(frozen=True)
class World:
    """Where things are when the game starts."""

    names: dict[Place, str]
    exits: dict[Place, dict[str, Place]]
    start: Place
    lamp: Place
    goal: Place

    @classmethod
    def drawn(cls, rng: random.Random) -> "World":
        """A house in which every room can be reached."""
        places = [(x, y) for x in range(WIDTH) for y in range(HEIGHT)]
        names = dict(zip(places, rng.sample(ROOMS, len(places)), strict=True))
        while True:
            exits: dict[Place, dict[str, Place]] = {place: {} for place in places}
            for x, y in places:
                for way, back in (("east", "west"), ("south", "north")):
                    there = (x + OFFSETS[way][0], y + OFFSETS[way][1])
                    if there in exits and rng.random() < 0.7:
                        exits[x, y][way], exits[there][back] = there, (x, y)
            if len(_distances(exits, places[0])) == len(places):
                start, lamp, goal = rng.sample(places, 3)
                return cls(names, exits, start, lamp, goal)


def _distances(exits: dict[Place, dict[str, Place]], origin: Place) -> dict[Place, int]:
    found, queue = {origin: 0}, deque([origin])
    while queue:
        here = queue.popleft()
        for there in exits[here].values():
            if there not in found:
                found[there] = found[here] + 1
                queue.append(there)
    return found


class Game:
    """One rollout: where the player and the lamp are."""

    def __init__(self, world: World, *, counts_moves: bool) -> None:
        self._world = world
        self._counts_moves = counts_moves
        self._here = world.start
        self._carries = False
        self.moves = 0

    @property
    def is_won(self) -> bool:
        """The lamp is where it belongs."""
        return self._carries and self._here == self._world.goal

    @property
    def truth(self) -> str:
        """The state, whatever the text says of it."""
        return f"{self._here} {self._carries}"

    def view(self) -> str:
        """What the player sees."""
        world, score = self._world, int(self._carries)
        counter = f" Moves: {self.moves}" if self._counts_moves else ""
        sees = "a lamp" if self._here == world.lamp and not self._carries else "nothing"
        return (
            f"-= {world.names[self._here]} =-    Score: {score}{counter}\n"
            f"You see {sees}. You carry {'a lamp' if self._carries else 'nothing'}. "
            f"Exits: {', '.join(sorted(world.exits[self._here]))}."
        )

    def command(self, text: str) -> str:
        """Do what the player says, and say what comes of it."""
        self.moves += 1
        verb, _, thing = text.partition(" ")
        if verb == "go":
            there = self._world.exits[self._here].get(thing)
            if there is None:
                return NO_WAY
            self._here = there
        elif text == "take lamp" and self._here == self._world.lamp and not self._carries:
            self._carries = True
        elif verb == "take":
            return NO_SUCH_THING
        elif text != "look":
            return NO_SUCH_VERB
        return self.view()

    def sensible(self) -> str:
        """A command that brings the end nearer."""
        target = self._world.goal if self._carries else self._world.lamp
        if self._here == target:
            return "take lamp"
        distance = _distances(self._world.exits, target)
        ways = self._world.exits[self._here]
        return "go " + min(ways, key=lambda way: (distance[ways[way]], way))

    def possible(self, rng: random.Random) -> str:
        """Any command that has an answer with a view."""
        return rng.choice(["look", *(f"go {way}" for way in sorted(self._world.exits[self._here]))])


def nonsense(rng: random.Random) -> str:
    """A command as people type them."""
    return rng.choice([f"go {rng.choice(list(OFFSETS))}", f"take {rng.choice(NOUNS)}", rng.choice(VERBS)])


def play(world: World, rng: random.Random, *, counter: bool, errors: bool, horizon: int) -> Iterator[dict[str, Any]]:
    """The steps of one rollout; `extra` holds the true state."""
    game = Game(world, counts_moves=counter)
    state = game.view()
    while not game.is_won and game.moves < horizon:
        lot, truth = rng.random(), game.truth
        action = game.sensible() if lot < 0.3 else nonsense(rng) if lot > 0.75 and errors else game.possible(rng)
        answer = game.command(action)
        yield {"state": state, "action": action, "reward": float(game.is_won), "extra": {"truth": truth}}
        state = answer


def episodes(
    *, worlds: int = 20, siblings: int = 8, horizon: int = 20, seed: int = 0, counter: bool = True, errors: bool = True
) -> Iterator[dict[str, Any]]:
    """Trajectories as `trajlake ingest` reads them: the same for the same arguments, on every machine."""
    for number in range(worlds):
        world = World.drawn(random.Random(f"{seed} {number}"))
        for sibling in range(siblings):
            rng = random.Random(f"{seed} {number} {sibling}")
            steps = list(play(world, rng, counter=counter, errors=errors, horizon=horizon))
            won = steps[-1]["reward"]
            yield {
                "task_id": f"house-{number}",
                "rollout_index": sibling,
                "status": "completed" if won else "truncated",
                "env_return": won,
                "steps": steps,
            }


def main() -> None:
    """Write trajectories to standard output."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--worlds", type=int, default=20, help="number of tasks")
    parser.add_argument("--siblings", type=int, default=8, help="rollouts of each")
    parser.add_argument("--horizon", type=int, default=20, help="moves after which a rollout is cut off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-counter", dest="counter", action="store_false", help="leave the move counter out")
    parser.add_argument("--no-errors", dest="errors", action="store_false", help="let the player say nothing senseless")
    for episode in episodes(**vars(parser.parse_args())):
        sys.stdout.write(json.dumps(episode) + "\n")


if __name__ == "__main__":
    main()
