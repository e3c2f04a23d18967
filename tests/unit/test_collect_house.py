"""The house: what it says, what it refuses, and when it ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.collect.environments.house import (
    REFUSAL,
    ROOM_NAMES,
    SENTENCES,
    House,
    HouseConfig,
    Split,
    World,
    get_split,
    list_vocabulary,
)
from testkit.houses import seeds_where, solution, walk, world_of

ROOT = Path(__file__).resolve().parents[2]
CORRIDOR = World(
    exits={"hall": {"east": "study"}, "study": {"west": "hall", "north": "attic"}, "attic": {"south": "study"}},
    start="hall",
    key="study",
    chest="attic",
    goal="hall",
)


def first(test):
    return next(seeds_where(test))


def test_the_first_observation_alone_tells_the_task_and_every_one_ends_with_the_exits():
    outcomes = walk(House(), 0, solution(world_of(0)))
    assert outcomes[0].observation.startswith("Bring the treasure")
    assert f"to the {world_of(0).goal}. Room " in outcomes[0].observation
    assert all("Bring" not in outcome.observation for outcome in outcomes[1:])
    assert all(re.search(r"\. Exits( (?:east|north|south|west))+$", o.observation) for o in outcomes)


def test_a_view_names_room_things_chest_hands_and_exits_in_this_order():
    seed = first(lambda world: world.start == world.key == world.chest)
    world = world_of(seed)
    exits = " ".join(sorted(world.exits[world.start]))
    view = walk(House(), seed, ["look"])[-1].observation
    assert view == f"Room {world.start}. You see key. Chest locked. You hold nothing. Exits {exits}"


def test_the_solution_earns_one_at_its_end_and_nothing_before():
    outcomes = walk(House(), 3, solution(world_of(3)))
    assert [outcome.reward for outcome in outcomes] == [0.0] * (len(outcomes) - 1) + [1.0]
    assert [outcome.done for outcome in outcomes] == [False] * (len(outcomes) - 1) + [True]
    assert outcomes[-1].info.terminated
    assert outcomes[-1].info.admissible == ()


def test_opening_the_chest_shows_the_treasure_and_both_things_can_be_held():
    seed = first(lambda world: world.start == world.key == world.chest)
    outcomes = walk(House(), seed, ["take key", "open chest", "take treasure"])
    expected = [("nothing", "locked", "key"), ("treasure", "open", "key"), ("nothing", "open", "key treasure")]
    for outcome, (thing, chest, inventory) in zip(outcomes[1:], expected, strict=True):
        assert f"You see {thing}. Chest {chest}. You hold {inventory}." in outcome.observation


def test_a_dropped_thing_stays_where_it_was_dropped():
    seed = first(lambda world: world.start == world.key and world.chest != world.start)
    way = world_of(seed).path(world_of(seed).start, world_of(seed).chest)[0]
    outcomes = walk(House(), seed, ["take key", f"go {way}", "drop key"])
    assert outcomes[-1].observation.split(". ")[1:2] == ["You see key"]
    assert "You hold nothing" in outcomes[-1].observation


def test_the_chest_does_not_open_without_the_key():
    seed = first(lambda world: world.start == world.chest)
    before, after = walk(House(), seed, ["open chest"])
    assert after.info.is_well_formed
    assert not after.info.is_admissible
    assert after.observation == f"{REFUSAL} {before.observation.partition('. ')[2]}"


@pytest.mark.parametrize(
    "action", ["", "go", "go up", "take chest", "fly east", "look look", "GO EAST", "go  east", "<|user|>"]
)
def test_a_malformed_action_is_answered_and_costs_a_step(action):
    house = House(HouseConfig(horizon=2))
    outcomes = walk(house, 1, [action, action, action])
    assert len(outcomes) == 3
    assert outcomes[-1].done
    assert not outcomes[-1].info.terminated
    assert not any(outcome.info.is_well_formed for outcome in outcomes[1:])
    assert all(outcome.observation.startswith(REFUSAL + " Room ") for outcome in outcomes[1:])


def test_surrounding_space_is_forgiven():
    _, after = walk(House(), 1, [" look\n"])
    assert after.info.is_well_formed
    assert after.info.is_admissible


def test_bringing_the_treasure_needs_it_in_hand():
    seed = first(lambda world: world.start == world.key == world.chest)
    goal = world_of(seed).goal
    way = [f"go {direction}" for direction in world_of(seed).path(world_of(seed).start, goal)]
    outcomes = walk(House(), seed, ["take key", "open chest", *way])
    assert f"Room {goal}." in outcomes[-1].observation
    assert outcomes[-1].reward == 0.0
    assert not outcomes[-1].done


def test_stepping_outside_an_episode_is_an_error_that_says_what_to_do():
    house = House(HouseConfig(horizon=1))
    with pytest.raises(RuntimeError, match="reset"):
        house.step("look")
    house.reset(0)
    house.step("look")
    with pytest.raises(RuntimeError, match="reset"):
        house.step("look")


def test_a_house_can_be_played_again_from_the_start():
    house = House()
    assert house.reset(5) == walk(house, 5, ["look", "go east", "go west"])[0] == house.reset(5)


def test_a_start_is_the_same_in_another_process():
    code = "from pipelines.collect.environments.house import House; print([House().reset(s) for s in range(20)])"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str([House().reset(seed) for seed in range(20)])


def test_the_vocabulary_is_what_houses_say_and_understand_and_nothing_else():
    vocabulary = set()
    for seed in range(300):
        for action in [*solution(world_of(seed)), "fly"]:
            house = House()
            outcomes = walk(house, seed, ["nonsense", *solution(world_of(seed)), action])
            vocabulary.update(word for o in outcomes for word in re.findall(r"\w+|[^\w\s]", o.observation))
    understood = {word for sentence in SENTENCES for word in sentence.split()}
    assert vocabulary | understood == set(list_vocabulary())
    assert list_vocabulary() == sorted(list_vocabulary())


def test_the_grammar_has_ten_sentences():
    assert len(SENTENCES) == 4 + 2 + 2 + 1 + 1
    assert {"look", "open chest", "go north", "take treasure", "drop key"} <= SENTENCES


@pytest.mark.parametrize(
    "fields", [{"rooms": 1}, {"rooms": len(ROOM_NAMES) + 1}, {"horizon": 0}, {"keys": 2}, {"split": "x"}]
)
def test_a_config_that_cannot_be_meant_is_refused(fields):
    with pytest.raises(ValidationError):
        HouseConfig(**fields)


def test_the_hash_of_a_world_sees_hidden_parts_and_not_the_order_of_its_spelling():
    spelled_backwards = World(
        exits={room: dict(reversed(ways.items())) for room, ways in reversed(CORRIDOR.exits.items())},
        start="hall",
        key="study",
        chest="attic",
        goal="hall",
    )
    assert spelled_backwards.hash() == CORRIDOR.hash()
    changes = [{"key": "attic"}, {"chest": "study"}, {"goal": "study"}, {"start": "attic"}]
    changed = [World(**{f: getattr(CORRIDOR, f) for f in World.__slots__} | change) for change in changes]
    assert len({CORRIDOR.hash(), *(world.hash() for world in changed)}) == 5


def test_the_hash_in_the_info_is_the_initial_worlds_throughout():
    hashes = {outcome.info.initial_world_hash for outcome in walk(House(), 9, solution(world_of(9)))}
    assert hashes == {world_of(9).hash()}


def test_one_world_hash_in_five_is_held_out():
    train, held_out = ([House(HouseConfig(split=split)).reset(s).info for s in range(100)] for split in Split)
    assert {info.initial_world_hash % 5 for info in train} == {1, 2, 3, 4}
    assert {info.initial_world_hash % 5 for info in held_out} == {0}
    assert get_split(CORRIDOR) is (Split.HELD_OUT if CORRIDOR.hash() % 5 == 0 else Split.TRAIN)


def test_paths_follow_the_exits():
    assert CORRIDOR.path("hall", "attic") == ["east", "north"]
    assert CORRIDOR.path("attic", "hall") == ["south", "west"]
    assert CORRIDOR.path("study", "study") == []
    assert solution(CORRIDOR) == [
        "go east",
        "take key",
        "go north",
        "open chest",
        "take treasure",
        "go south",
        "go west",
    ]
