"""The worlds of the learning study: their rules against the packages they come from, their splits, and their script."""

import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.learning.worlds import (
    PUZZLES,
    NoisyScript,
    PuzzleGame,
    Rooms,
    SlipperyLake,
    draw_start,
    hash_start,
)
from pipelines.collect.environments.loading import load_environment

NAMES = sorted(PUZZLES)
PAGE = Path(__file__).parents[2] / "docs" / "learning.md"


def test_taxi_follows_the_package_in_every_state() -> None:
    import gymnasium

    taxi: Any = gymnasium.make("Taxi-v4").unwrapped
    order = {"down": 0, "up": 1, "right": 2, "left": 3, "pickup": 4, "dropoff": 5}
    puzzle = PUZZLES["taxi"]
    for code in range(500):
        row, column, passenger, destination = taxi.decode(code)
        if passenger == destination:
            continue
        for action in puzzle.actions:
            ((_, after, _, is_over),) = taxi.P[code][order[action]]
            ((_, (cell, carried, _)),) = puzzle.outcomes(((row, column), passenger, destination), action)
            expected_row, expected_column, expected_passenger, _ = taxi.decode(after)
            assert cell == (expected_row, expected_column)
            assert (carried == 5) == is_over
            # The package may leave a passenger at another stand; here only the destination takes one.
            if action != "dropoff":
                assert carried == expected_passenger


@pytest.mark.parametrize("is_slippery", [False, True])
def test_the_lake_follows_the_package_on_its_maps(is_slippery: bool) -> None:
    import gymnasium

    puzzle = SlipperyLake() if is_slippery else PUZZLES["frozen-lake"]
    rows, _ = draw_start(puzzle.name, 3, "train")
    rate = {"success_rate": 0.8} if is_slippery else {}
    lake: Any = gymnasium.make("FrozenLake-v1", desc=list(rows), is_slippery=is_slippery, **rate).unwrapped
    size = len(rows)
    for code in range(size * size):
        cell = divmod(code, size)
        if rows[cell[0]][cell[1]] in "GH":
            continue
        for number, action in enumerate(("left", "down", "right", "up")):
            theirs: dict[tuple[int, int], float] = {}
            for share, after, *_ in lake.P[code][number]:
                at = (int(after) // size, int(after) % size)
                theirs[at] = theirs.get(at, 0.0) + share
            ours: dict[tuple[int, int], float] = {}
            for share, (_, at) in puzzle.outcomes((rows, cell), action):
                ours[at] = ours.get(at, 0.0) + share
            assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("name", ["door-key", "key-corridor"])
def test_rooms_follow_the_package_on_a_random_walk(name: str) -> None:
    import gymnasium
    import minigrid  # noqa: F401 - registers its levels

    puzzle = PUZZLES[name]
    assert isinstance(puzzle, Rooms)
    level: Any = gymnasium.make(puzzle.level).unwrapped
    numbers = {"left": 0, "right": 1, "forward": 2, "pickup": 3, "drop": 4, "toggle": 5}
    for seed in range(6):
        state = puzzle.draw(random.Random(seed))
        level.reset(seed=random.Random(seed).randrange(2**31))
        rng = random.Random(seed)
        for _ in range(400):
            action = rng.choice([*puzzle.actions, "forward", "toggle", "pickup"])
            ((_, state),) = puzzle.outcomes(state, action)
            *_, is_over, _, _ = level.step(numbers[action])
            assert state.cell == tuple(int(place) for place in level.agent_pos)
            assert state.facing == level.agent_dir
            assert state.hand == ("nothing" if level.carrying is None else level.carrying.type)
            assert puzzle.is_won(state) == is_over
            for cell, thing in state.things:
                there = level.grid.get(*cell)
                kinds = {"locked": "is_locked", "open": "is_open"}
                assert getattr(there, kinds[thing]) if thing in kinds else there.type in (thing, "door")
            if is_over:
                break


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_world_and_a_seed_is_a_world_in_every_process(name: str) -> None:
    hashes = {
        split: {hash_start(draw_start(name, seed, split)) for seed in range(12)} for split in ("train", "dev", "test")
    }
    assert not hashes["train"] & (hashes["dev"] | hashes["test"])
    assert not hashes["dev"] & hashes["test"]
    code = f"from benchmarks.learning.worlds import *; print(hash_start(draw_start({name!r}, 5, ''.join('test'))))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == hash_start(draw_start(name, 5, "test"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "slippery-lake"])
def test_the_script_without_noise_reaches_the_goal_in_half_the_horizon(name: str) -> None:
    game = PuzzleGame(name)
    for seed in range(4):
        answer = game.reset(seed)
        script = NoisyScript(game, 0.0, seed)
        count = 0
        while not answer.done:
            answer, count = game.step(script.act()), count + 1
        assert answer.reward == 1.0
        assert game.puzzle.optimum[0] <= count <= min(game.puzzle.optimum[1], game.puzzle.horizon // 2 + 2)


def test_who_knows_the_map_of_slippery_ice_wins_as_often_as_the_page_says() -> None:
    puzzle = PUZZLES["slippery-lake"]

    @cache
    def best_chance(state: Any, left: int) -> float:
        if puzzle.is_won(state) or puzzle.is_lost(state) or not left:
            return float(puzzle.is_won(state))
        outcomes = [puzzle.outcomes(state, action) for action in puzzle.actions]
        return max(sum(share * best_chance(after, left - 1) for share, after in each) for each in outcomes)

    chances = [best_chance(draw_start(puzzle.name, seed, "test"), puzzle.horizon) for seed in range(200)]
    assert f"the best player solves {100 * fmean(chances):.1f} % of `test`" in " ".join(PAGE.read_text().split())


def test_what_is_no_action_costs_a_step_and_changes_nothing() -> None:
    game = PuzzleGame("taxi")
    before = game.reset(0).observation
    answer = game.step("fly")
    assert not answer.info.is_well_formed
    assert before.endswith(answer.observation)
    for _ in range(game.puzzle.horizon - 1):
        answer = game.step("fly")
    assert answer.done
    assert not answer.info.terminated


def test_the_command_line_loads_them() -> None:
    assert load_environment("benchmarks.learning.worlds:sokoban_1", {"split": "dev"})().split == "dev"
