"""The ladder's starts: solved by search, long enough for the horizon, and in three parts that share no world."""

from collections import deque
from copy import deepcopy
from itertools import islice

import pytest
from pydantic import ValidationError

from benchmarks.ladder.play import houses
from benchmarks.ladder.settings import SMALL, LadderSettings
from benchmarks.ladder.starts import Part, Starts, optimum, part_of
from pipelines.collect.environments.house import House, HouseConfig, Split, draw_world

SETTINGS = LadderSettings()


def searched(seed: int, rooms: int, split: Split) -> int:
    """Fewest actions by breadth-first search over the game itself; states differ by what can be done next."""
    house = House(HouseConfig(rooms=rooms, horizon=50, split=split))
    first = house.reset(seed)
    queue = deque([(house, first.info.admissible, 0)])
    states = set()
    while queue:
        game, actions, depth = queue.popleft()
        for action in actions:
            after = deepcopy(game)
            outcome = after.step(action)
            if outcome.info.terminated:
                return depth + 1
            inside = after._game
            assert inside is not None
            state = (inside._room, *inside._places.values(), inside._is_locked)
            if state not in states:
                states.add(state)
                queue.append((after, outcome.info.admissible, depth + 1))
    raise AssertionError("no solution")


@pytest.mark.parametrize("rooms", [2, 3, 4])
def test_the_optimum_is_what_a_search_finds(rooms: int) -> None:
    for seed in range(12):
        for split in Split:
            assert optimum(draw_world(seed, rooms, split)) == searched(seed, rooms, split)


def test_every_start_fits_the_horizon() -> None:
    starts = Starts(SETTINGS, Part.HELD_OUT)
    seeds = starts.take(SETTINGS.held_out)
    assert len(set(seeds)) == SETTINGS.held_out == len(starts.optima)
    assert SETTINGS.horizon <= 2 * min(starts.optima)
    assert max(starts.optima) <= SETTINGS.horizon
    worlds = [draw_world(seed, SETTINGS.rooms, Split.HELD_OUT) for seed in seeds]
    assert [optimum(world) for world in worlds] == starts.optima
    assert len({world.hash() for world in worlds}) == len(worlds)


def test_parts_share_no_world() -> None:
    hashes = {}
    for part in Part:
        starts = Starts(SETTINGS, part)
        worlds = [draw_world(seed, SETTINGS.rooms, starts.split) for seed in starts.take(300)]
        assert {part_of(world) for world in worlds} == {part}
        hashes[part] = {world.hash() for world in worlds}
    assert not hashes[Part.TRAIN] & hashes[Part.VALIDATION]
    assert not (hashes[Part.TRAIN] | hashes[Part.VALIDATION]) & hashes[Part.HELD_OUT]


def test_a_start_seed_gives_the_house_that_was_judged() -> None:
    for part in Part:
        starts = Starts(SETTINGS, part)
        for seed in starts.take(20):
            world = draw_world(seed, SETTINGS.rooms, starts.split)
            assert houses(SETTINGS, starts.split)().reset(seed).info.initial_world_hash == world.hash()


def test_starts_go_on_where_they_were() -> None:
    first, second = Starts(SETTINGS, Part.TRAIN), Starts(SETTINGS, Part.TRAIN)
    assert first.take(5) + first.take(7) == second.take(12)


def test_taking_more_worlds_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there are only \d+ such worlds of 2 rooms"):
        Starts(SMALL, Part.VALIDATION).take(10_000)


def test_a_horizon_above_twice_the_optimum_is_refused() -> None:
    with pytest.raises(ValidationError, match="horizon 13 is more than twice the least optimum 6"):
        LadderSettings(horizon=13)


def test_seeds_that_choose_are_none_that_are_compared() -> None:
    most = LadderSettings(seeds=20)
    assert not set(islice(most.choosing_seeds(), 50)) & set(most.compared_seeds())
