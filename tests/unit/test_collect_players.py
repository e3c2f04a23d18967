"""Rollouts and groups: records that are complete, repeatable, and taken by a lake exactly once."""

import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import polars as pl
import pytest

from lake import ids
from lake.records import check, identify
from pipelines.collect.environments import Task
from pipelines.collect.environments.games import GroupConfig, collect_groups, distinct_seeds, play
from pipelines.collect.environments.house import REFUSAL, House, HouseConfig, HouseScript, Split, list_vocabulary
from pipelines.collect.players import Rollout, derive_rollout_seed
from pipelines.collect.policies.transformers_policy import SamplingConfig, TransformersPolicy
from testkit.copies import empty_lake
from testkit.houses import Recited, solution, world_of
from trainer.online.demo import TinyPolicyConfig, build_model, build_tokenizer


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(list_vocabulary())
    model = build_model(tokenizer, TinyPolicyConfig(), seed=1).eval()
    return TransformersPolicy(model, tokenizer, name="tiny", version=4, sampling=SamplingConfig(max_action_tokens=3))


def small_house():
    return House(HouseConfig(horizon=4))


def collect(policy, seeds, *, size=3, parallel=256, run_seed=0, collection_round=2):
    config = GroupConfig(group_size=size, parallel=parallel)
    return list(
        collect_groups(small_house, policy, seeds, config=config, run_seed=run_seed, collection_round=collection_round)
    )


def encoded(groups) -> bytes:
    return msgspec.json.encode(groups)


def actions(groups) -> list[list[str]]:
    return [[step.action for step in episode.steps] for group in groups for episode in group]


def test_a_group_is_the_siblings_of_one_start(tiny):
    groups = collect(tiny, [30, 10, 20])
    assert [[episode.seed for episode in group] for group in groups] == [[30] * 3, [10] * 3, [20] * 3]
    for group in groups:
        assert [episode.rollout_index for episode in group] == [0, 1, 2]
        assert {episode.expected_group_size for episode in group} == {3}
        assert {episode.collection_round for episode in group} == {2}
        assert len({episode.steps[0].state for episode in group}) == 1
        assert len({identify(episode, "run").group_id for episode in group}) == 1
    identities = [identify(episode, "run") for group in groups for episode in group]
    assert len({identity.group_id for identity in identities}) == 3
    assert len({identity.episode_id for identity in identities}) == 9


def test_siblings_differ_because_each_has_its_own_randomness(tiny):
    assert len({tuple(line) for line in actions(collect(tiny, [1], size=4))}) > 1


def test_the_same_seeds_give_the_same_episodes_bit_for_bit(tiny):
    assert encoded(collect(tiny, range(5))) == encoded(collect(tiny, range(5)))
    assert encoded(collect(HouseScript(0.7), range(5))) == encoded(collect(HouseScript(0.7), range(5)))


@pytest.mark.parametrize("changes", [{"run_seed": 1}, {"collection_round": 3}])
def test_another_run_or_round_samples_anew(tiny, changes):
    assert actions(collect(tiny, range(3))) != actions(collect(tiny, range(3), **changes))


def test_what_is_played_side_by_side_does_not_matter(tiny):
    together = collect(tiny, range(6))
    assert actions(collect(tiny, range(6), parallel=4)) == actions(together)
    assert actions(collect(tiny, [4])) == actions(together)[12:15]
    assert actions(collect(tiny, range(6), parallel=1)) == actions(together)


def test_one_world_twice_would_be_one_group_and_is_refused(tiny):
    with pytest.raises(ValueError, match="start seeds 1 and 1 draw the same world"):
        collect(tiny, [1, 2, 1])
    with pytest.raises(ValueError, match="start seeds 1 and 1 draw"):
        collect(HouseScript(), [1, 2, 1], parallel=1)


def test_distinct_seeds_skip_worlds_that_were_drawn_before():
    def two_rooms():
        return House(HouseConfig(rooms=2))

    seeds = distinct_seeds(two_rooms, 5, 150)
    worlds = [two_rooms().reset(seed).info.initial_world_hash for seed in seeds]
    assert len(set(worlds)) == len(seeds) == 150
    assert seeds == sorted(seeds)
    assert seeds[0] == 5
    skipped = sorted(set(range(5, seeds[-1])) - set(seeds))
    assert skipped, "150 of a few hundred worlds without one repetition: the test shows nothing"
    for seed in skipped:
        earlier = [w for w, s in zip(worlds, seeds, strict=True) if s < seed]
        assert two_rooms().reset(seed).info.initial_world_hash in earlier


def test_every_record_passes_the_checks_of_the_lake(tiny):
    for policy in (tiny, HouseScript(0.5)):
        assert [check(episode) for group in collect(policy, range(4)) for episode in group] == [None] * 12


def test_a_won_episode_is_completed_and_holds_every_observation():
    lines = solution(world_of(3))
    episode = play([House()], [Rollout(task=Task(seed=3), rollout_index=5)], Recited(lines))[0]
    assert (episode.status, episode.terminated, episode.stop_reason) == ("completed", True, "environment")
    assert episode.env_return == 1.0
    assert [step.reward for step in episode.steps] == [0.0] * (len(lines) - 1) + [1.0]
    assert [step.action for step in episode.steps] == lines
    assert (episode.seed, episode.rollout_index, episode.split, episode.environment) == (3, 5, "train", "house-3")
    assert episode.task_id == f"house-3/{ids.to_text(world_of(3).hash())}"
    assert episode.policy == "recited"
    assert episode.policy_version is None
    assert episode.completion_tokens is None
    assert episode.sampling == {"lines": len(lines)}
    assert episode.final_observation[0]["content"].startswith(f"Room {world_of(3).goal}.")


def test_an_episode_that_meets_its_horizon_is_truncated():
    episode = play([small_house()], [Rollout(task=Task())], Recited(["look"]))[0]
    assert (episode.status, episode.terminated, episode.stop_reason) == ("truncated", False, "horizon")
    assert (len(episode.steps), episode.env_return) == (4, 0.0)


def test_states_are_raw_observations_and_context_is_what_was_added():
    episode = play([small_house()], [Rollout(task=Task())], Recited(["look", "fly", "open chest", "look"]))[0]
    house = small_house()
    outcomes = [house.reset(0), *map(house.step, ["look", "fly", "open chest", "look"])]
    assert [step.state for step in episode.steps] == [outcome.observation for outcome in outcomes[:-1]]
    assert episode.initial_messages == [{"role": "user", "content": outcomes[0].observation}]
    assert [step.context for step in episode.steps] == [
        [],
        *([{"role": "user", "content": outcome.observation}] for outcome in outcomes[1:-1]),
    ]
    assert episode.final_observation == [{"role": "user", "content": outcomes[-1].observation}]


def test_only_malformed_actions_are_invalid_and_only_refusals_are_error_states():
    episode = play([small_house()], [Rollout(task=Task())], Recited(["look", "fly", "open chest", "look"]))[0]
    assert [step.is_action_valid for step in episode.steps] == [True, False, True, True]
    assert [step.state_is_error for step in episode.steps] == [False, False, True, True]
    assert [step.state.startswith(REFUSAL) for step in episode.steps] == [False, False, True, True]


def test_rollouts_of_unequal_length_leave_the_batch_when_they_end():
    houses = [House(HouseConfig(horizon=horizon)) for horizon in (2, 5, 3)]
    recited = Recited(["look"])
    session = recited.start([0, 0, 0])
    recited.start = lambda seeds_E: session
    episodes = play(houses, [Rollout(task=Task(seed=7), rollout_index=index) for index in range(3)], recited)
    assert [len(episode.steps) for episode in episodes] == [2, 5, 3]
    assert [[turn.rollout for turn in turns] for turns in session.turns] == [[0, 1, 2]] * 2 + [[1, 2], [1], [1]]
    assert [turn.is_first for turns in session.turns for turn in turns] == [True] * 3 + [False] * 7


def test_a_model_adds_its_tokens_and_their_number(tiny):
    for episode in collect(tiny, [2])[0]:
        assert episode.completion_tokens == sum(len(step.tokens.action_ids) for step in episode.steps)
        assert {step.policy_version for step in episode.steps} == {4}
        assert {step.model for step in episode.steps} == {"tiny"}
        assert episode.sampling["temperature"] == 1.0


def test_a_lake_takes_the_same_round_once_and_holds_each_episode_as_one_sequence(tiny, tmp_path):
    target = empty_lake(tmp_path / "lake")
    outcomes = []
    for _ in range(2):
        with target.job(kind="collect", run_id="demo") as job:
            records = [episode for group in collect(tiny, range(3)) for episode in group]
            outcomes.append(job.record(records))
    assert [(o.new, o.present, o.rejected) for o in outcomes] == [(9, 0, 0), (0, 9, 0)]
    tokens = target.scan("tokens").sort("episode_id", "step_index").collect()
    assert tokens["prefix_step_index"].to_list() == [None, 0, 1, 2] * 9
    ends = tokens.select(
        end=pl.col("prefix_length") + pl.col("n_context") + pl.col("n_action"), next=pl.col("prefix_length").shift(-1)
    )
    assert ends.filter(pl.int_range(pl.len()) % 4 != 3).select((pl.col("end") == pl.col("next")).all()).item()
    assert tokens["has_logprobs"].all()
    assert target.scan("episodes").select("group_id").collect()["group_id"].n_unique() == 3


def test_held_out_episodes_share_no_task_with_training_episodes():
    def played(split):
        config = HouseConfig(split=split, horizon=1)
        seeds = distinct_seeds(lambda: House(config), 0, 200)
        groups = collect_groups(
            lambda: House(config),
            Recited(["look"]),
            seeds,
            config=GroupConfig(group_size=1),
            run_seed=0,
            collection_round=0,
        )
        return {(episode.split, episode.task_id) for group in groups for episode in group}

    train, held_out = played(Split.TRAIN), played(Split.HELD_OUT)
    assert {split for split, _ in train | held_out} == {"train", "held_out"}
    assert not {task for _, task in train} & {task for _, task in held_out}


def test_importing_the_collector_loads_no_model_library():
    code = "import sys, pipelines.collect, pipelines.collect.policies.transformers_policy; print(*sys.modules)"
    root = Path(__file__).resolve().parents[2]
    loaded = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert "pipelines.collect.policies.transformers_policy" in loaded.split()
    assert not {"torch", "transformers", "tokenizers", "streamlit"} & set(loaded.split())


def test_every_run_round_start_sibling_and_attempt_samples_with_a_seed_of_its_own() -> None:
    seeds = {derive_rollout_seed(*each) for each in itertools.product(range(2), repeat=5)}
    assert len(seeds) == 2**5
