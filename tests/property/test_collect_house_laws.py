"""Laws of the house: for every seed, size and sequence of actions."""

from hypothesis import given
from hypothesis import strategies as st

from pipelines.collect.environments.house import (
    OPPOSITE,
    REFUSAL,
    ROOM_NAMES,
    SENTENCES,
    House,
    HouseConfig,
    HouseScript,
    Split,
    draw_world,
    get_split,
)
from pipelines.collect.policies import Turn
from testkit.houses import solution, walk, world_of

seeds = st.integers(min_value=0, max_value=2**40)
sizes = st.integers(min_value=2, max_value=len(ROOM_NAMES))
splits = st.sampled_from(Split)
sentences = st.sampled_from(sorted(SENTENCES))
speech = st.lists(sentences | st.text(max_size=12), max_size=30)


@given(seeds, sizes, splits, speech)
def test_equal_seeds_and_actions_give_equal_answers(seed, rooms, split, actions):
    config = HouseConfig(rooms=rooms, split=split)
    assert walk(House(config), seed, actions) == walk(House(config), seed, actions)


@given(seeds, speech, st.integers(min_value=1, max_value=25))
def test_rewards_are_zero_but_for_a_single_one_at_a_terminated_end(seed, actions, horizon):
    outcomes = walk(House(HouseConfig(horizon=horizon)), seed, actions)
    assert all(outcome.reward == float(outcome.info.terminated) for outcome in outcomes)
    assert sum(outcome.reward for outcome in outcomes) in (0.0, 1.0)
    assert all(not outcome.done for outcome in outcomes[:-1])


@given(seeds, speech, st.integers(min_value=1, max_value=25))
def test_an_episode_never_outlives_its_horizon_and_ends_at_it(seed, actions, horizon):
    outcomes = walk(House(HouseConfig(horizon=horizon)), seed, actions)
    n_steps = len(outcomes) - 1
    assert n_steps <= horizon
    assert outcomes[-1].done == (n_steps == horizon or outcomes[-1].info.terminated)


@given(seeds, sizes, splits)
def test_every_drawn_house_can_be_won_within_the_default_horizon(seed, rooms, split):
    config = HouseConfig(rooms=rooms, split=split)
    world = world_of(seed, config)
    assert {world.start, world.key, world.chest, world.goal} <= set(world.exits)
    outcomes = walk(House(config), seed, solution(world))
    assert outcomes[-1].info.terminated
    assert len(outcomes) - 1 == len(solution(world)) <= config.horizon


@given(seeds, sizes, splits)
def test_exits_lead_back_and_no_room_is_left_out(seed, rooms, split):
    world = draw_world(seed, rooms, split)
    assert len(world.exits) == rooms
    for room, ways in world.exits.items():
        assert all(world.exits[neighbour][OPPOSITE[direction]] == room for direction, neighbour in ways.items())
        assert len(world.path(world.start, room)) < rooms
    assert sum(map(len, world.exits.values())) == 2 * (rooms - 1)
    assert world.goal != world.chest


@given(st.sets(seeds, min_size=1, max_size=20), sizes)
def test_splits_are_disjoint_by_the_hash_of_the_initial_world(drawn, rooms):
    worlds = {split: [draw_world(seed, rooms, split) for seed in drawn] for split in Split}
    hashes = {split: {world.hash() for world in worlds[split]} for split in Split}
    assert not hashes[Split.TRAIN] & hashes[Split.HELD_OUT]
    assert all(get_split(world) is split for split in Split for world in worlds[split])


@given(seeds, st.lists(sentences, max_size=12))
def test_exactly_the_admissible_sentences_are_not_refused(seed, actions):
    for sentence in sorted(SENTENCES):
        outcomes = walk(House(HouseConfig(horizon=40)), seed, actions)
        if outcomes[-1].done:
            return
        after = walk(House(HouseConfig(horizon=40)), seed, [*actions, sentence])[-1]
        assert after.info.is_well_formed
        assert after.info.is_admissible == (sentence in outcomes[-1].info.admissible)
        assert after.observation.startswith(REFUSAL) == (not after.info.is_admissible)


@given(seeds, splits, seeds)
def test_the_flawless_script_wins_every_house_of_three_rooms(seed, split, own_seed):
    house = House(HouseConfig(split=split))
    outcome = house.reset(seed)
    session = HouseScript(noise=0.0).start([own_seed])
    while not outcome.done:
        turn = Turn(0, [{"role": "user", "content": outcome.observation}], admissible=outcome.info.admissible)
        outcome = house.step(session.act([turn])[0].action)
        assert outcome.info.is_admissible
    assert outcome.info.terminated
