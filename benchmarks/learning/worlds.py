"""Well-known small environments as text games: FrozenLake, Taxi, MiniGrid's DoorKey and KeyCorridor, Sokoban.

A seed draws a world, and a hash of the world decides its split, so no split shares a world with another. An observation
shows the state, in words that the tiny tokenizer knows. The only reward is 1.0 at the end. FrozenLake's maps and
MiniGrid's levels come from the packages themselves; their rules are written here once more as transitions of hashable
states, because the scripted player searches them. A test plays both against the packages.

`trajlake collect --env benchmarks.learning.worlds:frozen_lake` plays one.
"""

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from lake import ids
from pipelines.collect.environments.games import Answer, Info

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "train", "train", "dev", "test")
"""Split of a world by its hash modulo the length: three in five are for training."""
DISCOUNT = 0.95
"""By which the scripted player prefers short ways."""
Cell = tuple[int, int]
"""Row and column."""
State = TypeVar("State", bound=Hashable)
Outcomes = tuple[tuple[float, State], ...]
"""Probability and next state of each outcome of an action."""


class Puzzle(ABC, Generic[State]):
    """The rules of an environment: states, actions and their outcomes."""

    name: ClassVar[str]
    actions: ClassVar[tuple[str, ...]]
    task: ClassVar[str]
    """First words of an episode."""
    words: ClassVar[str] = ""
    """Words that few states have."""
    horizon: ClassVar[int]
    """Maximum actions of an episode."""
    optimum: ClassVar[tuple[int, int]] = (1, 10_000)
    """Fewest and most actions of a world's best solution; other worlds are not drawn."""

    @abstractmethod
    def draw(self, rng: random.Random) -> State:
        """Draw an initial state."""

    @abstractmethod
    def view(self, state: State) -> str:
        """Return the observation of a state."""

    @abstractmethod
    def outcomes(self, state: State, action: str) -> "Outcomes[State]":
        """Return the outcomes of an action; their probabilities add up to 1."""

    @abstractmethod
    def is_won(self, state: State) -> bool:
        """Return whether the goal is reached."""

    def is_lost(self, state: State) -> bool:
        """Return whether the episode has failed and ends."""
        return False


_MOVES: dict[str, Cell] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}


def _shift(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


LakeState = tuple[tuple[str, ...], Cell]
"""Rows of the map, and the player's cell."""


class FrozenLake(Puzzle[LakeState]):
    """Gymnasium's FrozenLake on its random maps of 8 x 8, seen as position and the four cells around it."""

    name = "frozen-lake"
    actions = tuple(_MOVES)
    task = "Reach the goal."
    horizon = 32
    size: ClassVar[int] = 8
    slip: ClassVar[float] = 0.0
    """Probability of a move to each side instead; the package's slippery ice has 1/3."""
    _words: ClassVar[Mapping[str, str]] = {"F": "ice", "S": "ice", "H": "hole", "G": "goal", "": "edge"}

    def draw(self, rng: random.Random) -> LakeState:
        """Draw a map; the start is its upper left cell."""
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        return tuple(generate_random_map(size=self.size, seed=rng.randrange(2**31))), (0, 0)

    def view(self, state: LakeState) -> str:
        """Return the position and what lies around it."""
        rows, cell = state
        around = [f"{name} {self._words[self._letter(rows, _shift(cell, move))]}" for name, move in _MOVES.items()]
        return f"row {cell[0]} column {cell[1]} {' '.join(around)}"

    def outcomes(self, state: LakeState, action: str) -> "Outcomes[LakeState]":
        """Return the cells that a move may lead to; the edge stops it."""
        rows, cell = state
        names = list(_MOVES)
        at = names.index(action)
        ways = [(1 - 2 * self.slip, at), (self.slip, at - 1), (self.slip, (at + 1) % 4)]
        targets = [(weight, _shift(cell, _MOVES[names[way]])) for weight, way in ways if weight > 0]
        return tuple((weight, (rows, target if self._letter(rows, target) else cell)) for weight, target in targets)

    def is_won(self, state: LakeState) -> bool:
        """Return whether the player stands on the goal."""
        return self._letter(*state) == "G"

    def is_lost(self, state: LakeState) -> bool:
        """Return whether the player fell into a hole."""
        return self._letter(*state) == "H"

    @staticmethod
    def _letter(rows: tuple[str, ...], cell: Cell) -> str:
        return rows[cell[0]][cell[1]] if 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows) else ""


class SlipperyLake(FrozenLake):
    """The same with slippery ice on maps of 5 x 5: a move goes to either side in a tenth of the cases each."""

    name = "slippery-lake"
    horizon = 24
    size = 5
    slip = 0.1


TaxiState = tuple[Cell, int, int]
"""The taxi's cell, the passenger's stand (4: aboard, 5: delivered), and the stand of the destination."""


class Taxi(Puzzle[TaxiState]):
    """Gymnasium's Taxi: its streets and stands, and any of its 300 starts; a wrong pickup or dropoff does nothing."""

    name = "taxi"
    actions = ("up", "right", "down", "left", "pickup", "dropoff")
    task = "Bring the passenger to the destination."
    horizon = 36
    optimum = (6, 18)
    stands: ClassVar[tuple[Cell, ...]] = ((0, 0), (0, 4), (4, 0), (4, 3))
    names: ClassVar[tuple[str, ...]] = ("red", "green", "yellow", "blue", "aboard")
    walls: ClassVar[frozenset[tuple[Cell, Cell]]] = frozenset(
        ((row, column), (row, column + 1)) for row, column in ((0, 1), (1, 1), (3, 0), (4, 0), (3, 2), (4, 2))
    )
    """Neighbouring cells with a wall between them."""

    def draw(self, rng: random.Random) -> TaxiState:
        """Draw a cell, a passenger and another stand as destination."""
        passenger, destination = rng.sample(range(4), 2)
        return (rng.randrange(5), rng.randrange(5)), passenger, destination

    def view(self, state: TaxiState) -> str:
        """Return where taxi, passenger and destination are."""
        (row, column), passenger, destination = state
        where = self.names[passenger] if passenger < 5 else self.names[destination]
        return f"row {row} column {column} passenger {where} destination {self.names[destination]}"

    def outcomes(self, state: TaxiState, action: str) -> "Outcomes[TaxiState]":
        """Return the next state; walls stop a move."""
        cell, passenger, destination = state
        if action in _MOVES:
            target = _shift(cell, _MOVES[action])
            is_inside = 0 <= target[0] < 5 and 0 <= target[1] < 5
            is_free = is_inside and not {(cell, target), (target, cell)} & self.walls
            cell = target if is_free else cell
        elif action == "pickup" and passenger < 4 and cell == self.stands[passenger]:
            passenger = 4
        elif action == "dropoff" and passenger == 4 and cell == self.stands[destination]:
            passenger = 5
        return ((1.0, (cell, passenger, destination)),)

    def is_won(self, state: TaxiState) -> bool:
        """Return whether the passenger was delivered."""
        return state[1] == 5


@dataclass(frozen=True, slots=True)
class RoomsState:
    """A level of MiniGrid: cells are (x, y) as the package counts them."""

    walls: frozenset[Cell]
    cell: Cell
    facing: int
    """Index into `_FACINGS`."""
    things: tuple[tuple[Cell, str], ...]
    """Cells of key, ball, goal and doors (`locked`, `closed`, `open`), in order."""
    hand: str = "nothing"


_FACINGS: tuple[tuple[str, Cell], ...] = (("east", (1, 0)), ("south", (0, 1)), ("west", (-1, 0)), ("north", (0, -1)))
_PASSABLE = ("", "open", "goal")


class Rooms(Puzzle[RoomsState]):
    """A level of MiniGrid (arXiv 2306.13831), completely seen and without colours; the package draws it."""

    actions = ("left", "right", "forward", "pickup", "drop", "toggle")
    words = "wall free key ball goal locked closed open nothing east south west north"
    level: ClassVar[str]
    """Id of the level in the package."""

    def draw(self, rng: random.Random) -> RoomsState:
        """Draw a level."""
        from minigrid.core.world_object import Door

        environment = _make_level(self.level)
        environment.reset(seed=rng.randrange(2**31))
        walls, things = set(), []
        for x in range(environment.width):
            for y in range(environment.height):
                thing = environment.grid.get(x, y)
                if thing is None:
                    continue
                if thing.type == "wall":
                    walls.add((x, y))
                elif isinstance(thing, Door):
                    state = "locked" if thing.is_locked else "open" if thing.is_open else "closed"
                    things.append(((x, y), state))
                else:
                    things.append(((x, y), thing.type))
        x, y = environment.agent_pos
        return RoomsState(frozenset(walls), (int(x), int(y)), int(environment.agent_dir), tuple(sorted(things)))

    def view(self, state: RoomsState) -> str:
        """Return where the player stands, what it faces and holds, and where the things are."""
        name = _FACINGS[state.facing][0]
        sides = {"front": 0, "left": -1, "right": 1}
        around = {
            side: self._at(state, _shift(state.cell, _FACINGS[(state.facing + turn) % 4][1])) or "free"
            for side, turn in sides.items()
        }
        things = " ".join(f"{thing} {x} {y}" for (x, y), thing in state.things)
        sight = " ".join(f"{side} {thing}" for side, thing in around.items())
        return f"at {state.cell[0]} {state.cell[1]} {name} {sight} hold {state.hand} {things}"

    def outcomes(self, state: RoomsState, action: str) -> "Outcomes[RoomsState]":
        """Return the next state, by the rules of MiniGridEnv.step."""
        if action in ("left", "right"):
            turned = (state.facing + (1 if action == "right" else -1)) % 4
            return ((1.0, replace(state, facing=turned)),)
        front = _shift(state.cell, _FACINGS[state.facing][1])
        thing = self._at(state, front)
        if action == "forward" and thing in _PASSABLE:
            state = replace(state, cell=front)
        elif action == "pickup" and thing in ("key", "ball") and state.hand == "nothing":
            state = replace(state, hand=thing, things=self._put(state, front, None))
        elif action == "drop" and not thing and state.hand != "nothing":
            state = replace(state, hand="nothing", things=self._put(state, front, state.hand))
        elif action == "toggle" and (thing in ("closed", "open") or (thing == "locked" and state.hand == "key")):
            state = replace(state, things=self._put(state, front, "closed" if thing == "open" else "open"))
        return ((1.0, state),)

    def _at(self, state: RoomsState, cell: Cell) -> str:
        return "wall" if cell in state.walls else dict(state.things).get(cell, "")

    @staticmethod
    def _put(state: RoomsState, cell: Cell, thing: str | None) -> tuple[tuple[Cell, str], ...]:
        things = [entry for entry in state.things if entry[0] != cell]
        return tuple(sorted([*things, *([(cell, thing)] if thing else [])]))


@lru_cache(maxsize=8)
def _make_level(level: str) -> Any:
    """Make the environment that draws a level."""
    import gymnasium
    import minigrid  # noqa: F401 - registers its levels

    return gymnasium.make(level).unwrapped


class DoorKey(Rooms):
    """Take the key, open the locked door, reach the goal."""

    name = "door-key"
    task = "Use the key to open the door and reach the goal."
    level = "MiniGrid-DoorKey-6x6-v0"
    horizon = 36
    optimum = (8, 18)

    def is_won(self, state: RoomsState) -> bool:
        """Return whether the player stands on the goal."""
        return self._at(state, state.cell) == "goal"


class KeyCorridor(Rooms):
    """Fetch a key, open the locked room, drop the key, pick up the ball."""

    name = "key-corridor"
    task = "Pick up the ball."
    level = "MiniGrid-KeyCorridorS3R2-v0"
    horizon = 48
    optimum = (10, 24)

    def is_won(self, state: RoomsState) -> bool:
        """Return whether the player holds the ball."""
        return state.hand == "ball"


SokobanState = tuple[tuple[str, ...], Cell, frozenset[Cell]]
"""Rows of the room (`#` wall, `O` target, `_` floor), the player's cell and those of the boxes."""


class Sokoban(Puzzle[SokobanState]):
    """Sokoban in a room of 6 x 6 with its border, drawn as verl-agent draws it: # wall, _ floor, O target, X box,
    √ box on target, P player, S player on target.
    """

    name = "sokoban-1"
    actions = tuple(_MOVES)
    task = "Push every box X onto a target O."
    horizon = 24
    optimum = (4, 12)
    boxes: ClassVar[int] = 1
    _inner: ClassVar[int] = 4
    _walls: ClassVar[int] = 3

    def draw(self, rng: random.Random) -> SokobanState:
        """Draw a room uniformly; the game keeps those whose best solution has the right length."""
        cells = [(row, column) for row in range(self._inner) for column in range(self._inner)]
        picked = rng.sample(cells, self._walls + 2 * self.boxes + 1)
        walls, targets = set(picked[: self._walls]), set(picked[self._walls : self._walls + self.boxes])
        letters = {cell: "#" if cell in walls else "O" if cell in targets else "_" for cell in cells}
        rows = tuple("".join(letters[row, column] for column in range(self._inner)) for row in range(self._inner))
        return rows, picked[-1], frozenset(picked[self._walls + self.boxes : -1])

    def view(self, state: SokobanState) -> str:
        """Return the room row by row."""
        rows, player, boxes = state
        drawn = []
        for row, letters in enumerate(rows):
            for column, letter in enumerate(letters):
                is_target = letter == "O"
                if (row, column) == player:
                    drawn.append("S" if is_target else "P")
                elif (row, column) in boxes:
                    drawn.append("√" if is_target else "X")
                else:
                    drawn.append(letter)
            drawn.append("|")
        return " ".join(drawn[:-1])

    def outcomes(self, state: SokobanState, action: str) -> "Outcomes[SokobanState]":
        """Return the room after a move or a push."""
        rows, player, boxes = state
        target = _shift(player, _MOVES[action])
        if not self._is_floor(rows, target):
            return ((1.0, state),)
        if target in boxes:
            beyond = _shift(target, _MOVES[action])
            if beyond in boxes or not self._is_floor(rows, beyond):
                return ((1.0, state),)
            boxes = boxes - {target} | {beyond}
        return ((1.0, (rows, target, boxes)),)

    def is_won(self, state: SokobanState) -> bool:
        """Return whether every box stands on a target."""
        rows, _, boxes = state
        return all(rows[row][column] == "O" for row, column in boxes)

    def _is_floor(self, rows: tuple[str, ...], cell: Cell) -> bool:
        return 0 <= cell[0] < self._inner and 0 <= cell[1] < self._inner and rows[cell[0]][cell[1]] != "#"


class SokobanTwo(Sokoban):
    """The same with two boxes."""

    name = "sokoban-2"
    horizon = 30
    optimum = (6, 15)
    boxes = 2
    _walls = 1


PUZZLES: dict[str, Puzzle[Any]] = {
    puzzle.name: puzzle
    for puzzle in (FrozenLake(), SlipperyLake(), Taxi(), DoorKey(), KeyCorridor(), Sokoban(), SokobanTwo())
}
"""By name."""


class Solution:
    """The best action of the states of a world, searched when it is asked for."""

    def __init__(self, puzzle: Puzzle[Any]) -> None:
        self._puzzle = puzzle
        self._best: dict[Any, str] = {}

    def act(self, state: Any) -> str:
        """Return the best action of a state; where the goal is out of reach, the first."""
        if state not in self._best:
            if isinstance(self._puzzle, SlipperyLake):
                self._best |= self._iterate(state)
            else:
                self._best |= dict(self.search(state) or [(state, self._puzzle.actions[0])])
        return self._best[state]

    def search(self, start: Any) -> list[tuple[Any, str]] | None:
        """Return the states and actions of a shortest way to the goal; None without one. Outcomes must be certain."""
        puzzle = self._puzzle
        came: dict[Any, tuple[Any, str] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            if puzzle.is_won(state):
                way, link = [], came[state]
                while link is not None:
                    way.append(link)
                    link = came[link[0]]
                return way[::-1]
            if puzzle.is_lost(state):
                continue
            for action in puzzle.actions:
                ((_, after),) = puzzle.outcomes(state, action)
                if after not in came:
                    came[after] = (state, action)
                    queue.append(after)
        return None

    def _iterate(self, start: Any) -> dict[Any, str]:
        """Return the actions of the highest discounted chance to win, by value iteration over the reachable states."""
        puzzle, values, queue = self._puzzle, {}, [start]
        while queue:
            state = queue.pop()
            if state in values:
                continue
            values[state] = float(puzzle.is_won(state))
            if not puzzle.is_won(state) and not puzzle.is_lost(state):
                queue += [after for action in puzzle.actions for _, after in puzzle.outcomes(state, action)]
        open_states = [state for state in values if not puzzle.is_won(state) and not puzzle.is_lost(state)]

        def estimate(state: Any, action: str) -> float:
            return DISCOUNT * sum(share * values[after] for share, after in puzzle.outcomes(state, action))

        change = 1.0
        while change > 1e-6:
            change = 0.0
            for state in open_states:
                best = max(estimate(state, action) for action in puzzle.actions)
                change, values[state] = max(change, abs(best - values[state])), best
        return {state: max(puzzle.actions, key=partial(estimate, state)) for state in open_states}


@lru_cache(maxsize=4096)
def draw_start(name: str, seed: int, split: Split) -> Any:
    """Return the start of a seed: the first in its sequence of the right split whose solution has the right length."""
    puzzle = PUZZLES[name]
    rng = random.Random(ids.key_hash("learning", name, seed))
    while True:
        start = puzzle.draw(rng)
        if SPLITS[hash_start(start) % len(SPLITS)] == split and _is_playable(puzzle, start):
            return start


def _is_playable(puzzle: Puzzle[Any], start: Any) -> bool:
    if puzzle.is_won(start):
        return False
    if isinstance(puzzle, SlipperyLake):
        return True
    way = Solution(puzzle).search(start)
    return way is not None and puzzle.optimum[0] <= len(way) <= puzzle.optimum[1]


def hash_start(start: Any) -> int:
    """Return a 63-bit hash of an initial state."""
    return ids.text_hash(_spell(start))


def _spell(part: Any) -> str:
    """Spell a state; sets in order."""
    if isinstance(part, RoomsState):
        return _spell((part.walls, part.cell, part.facing, part.things, part.hand))
    if isinstance(part, frozenset):
        return f"{{{','.join(sorted(_spell(entry) for entry in part))}}}"
    return f"({','.join(_spell(entry) for entry in part)})" if isinstance(part, tuple) else str(part)


class PuzzleGame:
    """A puzzle in play, as a text game of `pipelines.collect.environments.games`.

    A slip is drawn from the world and the actions so far: siblings that did the same slip alike.
    """

    def __init__(self, name: str, split: Split = "train") -> None:
        self.puzzle = PUZZLES[name]
        self.name = name
        self.split: str = split
        self._split = split
        self.state: Any = None
        self._past: list[str] = []
        self._hash = 0

    def reset(self, seed: int) -> Answer:
        """Draw the start of the seed."""
        self.state = draw_start(self.name, seed, self._split)
        self._hash = hash_start(self.state)
        self._past = []
        return self._answer(f"{self.puzzle.task} {self.puzzle.view(self.state)}")

    def step(self, action: str) -> Answer:
        """Take an action; a text that is none costs a step and changes nothing."""
        action = action.strip()
        self._past.append(action)
        before = self.state
        is_well_formed = action in self.puzzle.actions
        if is_well_formed:
            self.state = self._draw_outcome(action)
        return self._answer(self.puzzle.view(self.state), is_well_formed, self.state != before)

    def _draw_outcome(self, action: str) -> Any:
        outcomes = self.puzzle.outcomes(self.state, action)
        if len(outcomes) == 1:
            return outcomes[0][1]
        draw = random.Random(ids.key_hash("slip", self._hash, *self._past)).random()
        for probability, state in outcomes:
            draw -= probability
            if draw < 0:
                return state
        return outcomes[-1][1]

    def _answer(self, observation: str, is_well_formed: bool = True, is_admissible: bool = True) -> Answer:
        is_won, is_lost = self.puzzle.is_won(self.state), self.puzzle.is_lost(self.state)
        done = is_won or is_lost or len(self._past) >= self.puzzle.horizon
        info = Info(
            admissible=() if done else self.puzzle.actions,
            is_well_formed=is_well_formed,
            is_admissible=is_admissible,
            terminated=is_won or is_lost,
            initial_world_hash=self._hash,
        )
        return Answer(observation, float(is_won), done, info)


class NoisyScript:
    """A scripted player: the best action, or with probability `noise` any action."""

    def __init__(self, game: PuzzleGame, noise: float, seed: int) -> None:
        self._game = game
        self._noise = noise
        self._rng = random.Random(ids.key_hash("learning-script", seed))
        self._solution = Solution(game.puzzle)

    def act(self) -> str:
        """Return the next action."""
        if self._rng.random() < self._noise:
            return self._rng.choice(self._game.puzzle.actions)
        return self._solution.act(self._game.state)


def list_words(name: str) -> list[str]:
    """Return all words of a puzzle's texts: those of states on random walks, its actions and its task."""
    puzzle = PUZZLES[name]
    words = {*puzzle.actions, *puzzle.words.split(), *puzzle.task.replace(".", " .").split(), *map(str, range(10))}
    for state in _sample_states(puzzle):
        words.update(puzzle.view(state).split())
    return sorted(words)


def _sample_states(puzzle: Puzzle[Any]) -> Iterator[Any]:
    rng = random.Random(0)
    for seed in range(50):
        state = draw_start(puzzle.name, seed, "train")
        for _ in range(puzzle.horizon):
            yield state
            if puzzle.is_won(state) or puzzle.is_lost(state):
                break
            state = rng.choice(puzzle.outcomes(state, rng.choice(puzzle.actions)))[1]
        yield state


def _make(name: str, split: Split = "train") -> PuzzleGame:
    return PuzzleGame(name, split)


frozen_lake = partial(_make, "frozen-lake")
slippery_lake = partial(_make, "slippery-lake")
taxi = partial(_make, "taxi")
door_key = partial(_make, "door-key")
key_corridor = partial(_make, "key-corridor")
sokoban_1 = partial(_make, "sokoban-1")
sokoban_2 = partial(_make, "sokoban-2")
