"""GiGPO on trajectories small enough to work out by hand: each option, each deviation from the reference."""

import math
from typing import Any

import polars as pl
import pytest
from pydantic import ValidationError

from pipelines.credit import GiGPO
from testkit.credit_strategies import frame

CENTRED = {"episode_norm": "mean_norm", "step_norm": "mean_norm"}


def trajectories(*episodes: dict[str, Any], group: int = 1) -> pl.DataFrame:
    """Steps of sibling trajectories. `rewards` and `states` are per step, `invalid` a set of steps, the rest as is."""
    rows = []
    for number, episode in enumerate(episodes):
        rewards = episode["rewards"]
        states = episode.get("states", [f"{number}/{i}" for i in range(len(rewards))])
        for i, (reward, state) in enumerate(zip(rewards, states, strict=True)):
            rows.append(
                {
                    "episode_id": 10 * group + number,
                    "group_id": group,
                    "step_index": i,
                    "state": state,
                    "reward": reward,
                    "is_action_valid": i not in episode.get("invalid", ()),
                    "episode_score": episode.get("score"),
                    "status": episode.get("status", "completed"),
                }
            )
    return frame(rows).drop("state_hash")


def column(name: str, steps: pl.DataFrame, **options: Any) -> list[Any]:
    return GiGPO(**options).advantages(steps.lazy()).collect()[name].to_list()


def total(*episodes: dict[str, Any], **options: Any) -> dict[str, list[Any]]:
    """All columns under the sum-of-rewards source."""
    actual = GiGPO(episode_source="sum_rewards", **options).advantages(trajectories(*episodes).lazy()).collect()
    return actual.to_dict(as_series=False)


WIN, LOSS = {"rewards": [0.0, 0.0, 0.0, 10.0]}, {"rewards": [0.0]}


def test_defaults_are_the_documented_ones() -> None:
    assert GiGPO().model_dump(mode="json") == {
        "gamma": 0.95,
        "omega": 1.0,
        "combination": "sum",
        "episode_norm": "mean_std_norm",
        "step_norm": "mean_std_norm",
        "baseline": "trajectories",
        "singleton": "zero",
        "invalid_action_penalty": 0.1,
        "episode_source": "score",
        "step_source": "rewards",
        "default_step_reward": None,
        "truncated": "keep",
        "revisits": "keep",
        "anchors": {"kind": "exact"},
    }


def test_json_round_trip() -> None:
    config = GiGPO(gamma=0.5, combination="convex", omega=0.2, anchors={"kind": "similarity", "threshold": 0.8})
    assert GiGPO.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 1.1},
        {"gamma": -0.1},
        {"gamma": math.nan},
        {"omega": math.inf},
        {"omega": -1.0},
        {"combination": "convex", "omega": 1.5},
        {"invalid_action_penalty": -0.1},
        {"default_step_reward": math.nan},
        {"baseline": "steps"},
        {"gama": 0.9},
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GiGPO(**options)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        GiGPO().gamma = 0.5


# --- the episode side


def test_baseline_trajectories_counts_each_trajectory_once() -> None:
    assert total(WIN, LOSS, **CENTRED)["a_episode"] == [5.0] * 4 + [-5.0]


def test_baseline_rows_counts_each_step_once() -> None:
    assert total(WIN, LOSS, **CENTRED, baseline="rows")["a_episode"] == [2.0] * 4 + [-8.0]


def test_mean_std_norm_of_two_siblings() -> None:
    advantages = total(WIN, LOSS)["a_episode"]
    assert advantages == pytest.approx([0.5**0.5] * 4 + [-(0.5**0.5)], abs=1e-6)


@pytest.mark.parametrize("baseline", ["trajectories", "rows"])
def test_penalty_centred(baseline: str) -> None:
    """In rows, the penalty enters the mean for everybody: (10 + 9.9 + 0 + 0) / 4."""
    actual = total({"rewards": [0.0, 10.0], "invalid": {1}}, {"rewards": [0.0, 0.0]}, **CENTRED, baseline=baseline)
    expected = {"trajectories": [5.0, 4.9, -5.0, -5.0], "rows": [5.025, 4.925, -4.975, -4.975]}
    assert actual["a_episode"] == pytest.approx(expected[baseline], abs=1e-12)


def test_penalty_is_bounded_where_judge_scores_are_close() -> None:
    """Scores .9 .91 .9 .9: dividing the penalty by their deviation alone would give -20."""
    episodes = [{"rewards": [score], "invalid": {0} if n == 0 else ()} for n, score in enumerate([0.9, 0.91, 0.9, 0.9])]
    with_penalty, without = (total(*episodes, invalid_action_penalty=penalty)["a_episode"] for penalty in (0.1, 0.0))
    assert with_penalty[0] == pytest.approx(without[0] - 1.0, abs=1e-12)
    assert with_penalty[1:] == without[1:]


def test_penalty_in_a_tied_group() -> None:
    episodes = [{"rewards": [1.0], "invalid": {0}}, {"rewards": [1.0]}]
    assert total(*episodes)["a_episode"] == [-1.0, 0.0]
    assert total(*episodes, **CENTRED)["a_episode"] == [-0.1, 0.0]
    assert total(*episodes, invalid_action_penalty=0.0)["a_episode"] == [0.0, 0.0]


def test_penalty_beside_a_wide_deviation_is_divided_by_it() -> None:
    deviation = 10 * 0.5**0.5
    advantages = total({"rewards": [0.0, 10.0], "invalid": {0}}, {"rewards": [0.0]})["a_episode"]
    assert advantages[0] == pytest.approx(advantages[1] - 0.1 / deviation, abs=1e-12)


def test_a_lone_trajectory() -> None:
    first = {"rewards": [3.0, 0.5], "invalid": {0}}
    assert total(first)["a_episode"] == [0.0, 0.0]
    assert total(first, **CENTRED, singleton="raw")["a_episode"] == [3.4, 3.5]
    assert total(first, singleton="raw")["a_episode"] == pytest.approx([3.4, 3.5], abs=1e-5)
    # In rows it is two units, not one: centred over its own steps, as in the reference.
    assert total(first, **CENTRED, baseline="rows", singleton="raw")["a_episode"] == pytest.approx([-0.05, 0.05])
    assert total({"rewards": [3.5]}, **CENTRED, baseline="rows", singleton="raw")["a_episode"] == [3.5]
    assert total({"rewards": [3.5]}, **CENTRED, baseline="rows")["a_episode"] == [0.0]


def test_unscored_siblings_do_not_count() -> None:
    steps = trajectories(
        {"rewards": [0.0], "score": 1.0}, {"rewards": [0.0], "score": None}, {"rewards": [0.0], "score": 0.0}
    )
    assert column("a_episode", steps, **CENTRED) == [0.5, None, -0.5]
    assert column("group_size", steps) == [2, 2, 2]
    assert column("advantage", steps, **CENTRED) == [0.5, None, -0.5]
    assert column("flags", steps) == ["singleton_anchor", "singleton_anchor,unscored", "singleton_anchor"]


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_broken_episodes_count_only_if_scored(status: str) -> None:
    first, second = {"rewards": [0.0], "score": 1.0}, {"rewards": [0.0], "score": 0.0, "status": status}
    assert column("a_episode", trajectories(first, second), **CENTRED) == [0.5, -0.5]
    unscored = trajectories(first, {**second, "score": None})
    assert column("a_episode", unscored) == [0.0, None]
    assert column("group_size", unscored) == [1, 1]
    # The sum of what an aborted episode got so far is not a score.
    assert column("a_episode", unscored, episode_source="sum_rewards") == [0.0, None]
    assert column("flags", unscored, episode_source="sum_rewards")[1] == "excluded,singleton_group"


# --- the step side


SHARED = [
    {"rewards": [0.0, 10.0], "states": ["start", "end"], "score": 10.0},
    {"rewards": [0.0, 0.0, 0.0], "states": ["start", "start", "end"], "score": 0.0},
]


def test_step_advantages_inside_anchor_groups() -> None:
    actual = GiGPO(gamma=0.5, **CENTRED).advantages(trajectories(*SHARED).lazy()).collect()
    assert actual["return_to_go"].to_list() == [5.0, 10.0, 0.0, 0.0, 0.0]
    assert actual["a_step"].to_list() == pytest.approx([10 / 3, 5.0, -5 / 3, -5 / 3, -5.0])
    assert actual["anchor_size"].to_list() == [3, 2, 3, 3, 2]
    assert actual["anchor_episodes"].to_list() == [2, 2, 2, 2, 2]


def test_first_visits_only() -> None:
    actual = GiGPO(gamma=0.5, revisits="first", **CENTRED).advantages(trajectories(*SHARED).lazy()).collect()
    assert actual["a_step"].to_list() == [2.5, 5.0, -2.5, 0.0, -5.0]
    assert actual["anchor_size"].to_list() == [2] * 5
    assert actual["flags"].to_list() == ["", "", "", "revisit", ""]


def test_a_loop_of_one_trajectory() -> None:
    loop = trajectories({"rewards": [0.0, 1.0], "states": ["p", "p"], "score": 1.0})
    assert column("a_step", loop, gamma=0.5, **CENTRED) == [-0.25, 0.25]
    assert column("anchor_episodes", loop) == [1, 1]
    assert column("a_step", loop, gamma=0.5, revisits="first") == [0.0, 0.0]
    assert column("flags", loop, revisits="first") == ["singleton_anchor,singleton_group", "revisit,singleton_group"]


def test_a_trajectory_counts_in_an_anchor_group_if_any_of_its_visits_does() -> None:
    """The return of the first visit is unknown, that of the second is not."""
    actual = total({"rewards": [None, 1.0], "states": ["s", "s"]}, {"rewards": [0.0], "states": ["s"]})
    assert actual["anchor_size"] == [2, 2, 2]
    assert actual["anchor_episodes"] == [2, 2, 2]


def test_equal_states_of_other_task_groups_are_no_anchor() -> None:
    steps = pl.concat([trajectories(SHARED[0], group=1), trajectories(SHARED[1], group=2)])
    assert column("anchor_size", steps) == [1, 1, 2, 2, 1]


def test_the_penalty_of_a_step_is_its_own() -> None:
    """Not propagated to earlier steps, not discounted, and in the mean of its anchor."""
    first = {"rewards": [0.0, 0.0], "states": ["a", "b"], "invalid": {1}}
    actual = total(first, {"rewards": [0.0, 0.0], "states": ["a", "b"]}, **CENTRED)
    assert actual["return_to_go"] == [0.0] * 4
    assert actual["a_step"] == pytest.approx([0.0, -0.05, 0.0, 0.05])
    assert total({**first, "states": ["a", "c"]}, LOSS, **CENTRED)["a_step"] == [0.0] * 3


def test_unknown_rewards() -> None:
    steps = trajectories(
        {"rewards": [0.0, None, 2.0], "states": ["a", "b", "c"], "score": 1.0},
        {"rewards": [0.0, 1.0, 0.0], "states": ["a", "b", "c"], "score": 0.0},
    )
    assert column("return_to_go", steps, gamma=0.5) == [None, None, 2.0, 0.5, 1.0, 0.0]
    assert column("a_step", steps, gamma=0.5, **CENTRED) == [None, None, 1.0, 0.0, 0.0, -1.0]
    assert column("advantage", steps, gamma=0.5, **CENTRED) == [None, None, 1.5, -0.5, -0.5, -1.5]
    assert column("anchor_size", steps) == [1, 1, 2, 1, 1, 2]
    assert column("flags", steps)[:3] == ["unknown_return", "unknown_return", ""]
    assert column("return_to_go", steps, gamma=0.5, default_step_reward=4.0)[:3] == [2.5, 5.0, 2.0]
    assert column("a_episode", steps, episode_source="sum_rewards")[:3] == [None] * 3
    assert column("a_episode", steps, episode_source="sum_rewards", default_step_reward=-1.0, **CENTRED) == [0.0] * 6


def test_a_term_of_weight_zero_does_not_make_the_advantage_unknown() -> None:
    steps = trajectories({"rewards": [None], "score": 1.0}, {"rewards": [None], "score": 0.0})
    assert column("advantage", steps) == [None, None]
    assert column("advantage", steps, omega=0.0, **CENTRED) == [0.5, -0.5]
    assert column("advantage", steps, combination="convex", omega=1.0, **CENTRED) == [0.5, -0.5]
    unscored = trajectories({"rewards": [1.0], "states": ["s"]}, {"rewards": [0.0], "states": ["s"]})
    assert column("advantage", unscored, combination="convex", omega=0.0, **CENTRED) == [0.5, -0.5]


def test_an_unknown_state_is_nobodys_anchor() -> None:
    steps = trajectories(*({"rewards": [float(i)], "states": [None], "score": float(i)} for i in range(2)))
    assert column("a_step", steps) == [0.0, 0.0]
    assert column("anchor_key", steps) == [None, None]
    assert column("anchor_size", steps) == [0, 0]
    assert column("flags", steps) == ["unknown_state"] * 2
    assert column("advantage", steps, **CENTRED) == [-0.5, 0.5], "what the episode's advantage says is learned"


# --- sources, combinations, truncation


@pytest.mark.parametrize(
    ("source", "returns"),
    [
        ("rewards", [0.25, 0.5, 1.0]),
        ("terminal_score", [2.0, 4.0, 8.0]),
        ("rewards_plus_terminal", [2.25, 4.5, 9.0]),
    ],
)
def test_step_sources(source: str, returns: list[float]) -> None:
    steps = trajectories({"rewards": [0.0, 0.0, 1.0], "score": 8.0})
    assert column("return_to_go", steps, gamma=0.5, step_source=source) == returns


def test_the_terminal_score_lands_on_the_last_active_step() -> None:
    steps = trajectories({"rewards": [0.0] * 3, "score": 8.0}).with_columns(is_active=pl.col("step_index") < 2)
    assert column("return_to_go", steps, gamma=0.5, step_source="terminal_score") == [4.0, 8.0]


def test_a_terminal_score_that_is_unknown_makes_all_returns_unknown() -> None:
    steps = trajectories({"rewards": [1.0, 1.0], "score": None})
    assert column("return_to_go", steps, step_source="rewards_plus_terminal") == [None, None]


@pytest.mark.parametrize(
    ("options", "episode_weight", "step_weight"),
    [
        ({"omega": 0.5}, 1.0, 0.5),
        ({"omega": 2.0}, 1.0, 2.0),
        ({"combination": "convex", "omega": 0.25}, 0.25, 0.75),
    ],
)
def test_combinations(options: dict[str, Any], episode_weight: float, step_weight: float) -> None:
    actual = GiGPO(**options).advantages(trajectories(*SHARED).lazy()).collect()
    expected = episode_weight * actual["a_episode"] + step_weight * actual["a_step"]
    assert actual["advantage"].to_list() == pytest.approx(expected.to_list(), abs=1e-15)


def test_truncated() -> None:
    steps = trajectories(
        {"rewards": [1.0], "states": ["s"], "score": 1.0},
        {"rewards": [0.0], "states": ["s"], "score": 0.0, "status": "truncated"},
    )
    assert column("advantage", steps, **CENTRED) == [1.0, -1.0]
    assert column("flags", steps) == ["", "truncated"]
    assert column("advantage", steps, **CENTRED, truncated="mask") == [1.0, None]
    assert column("a_episode", steps, **CENTRED, truncated="mask") == [0.5, -0.5]
    assert column("flags", steps, truncated="mask") == ["", "masked,truncated"]
    for name, expected in {
        "advantage": [0.0, None],
        "a_episode": [0.0, None],
        "a_step": [0.0, None],
        "return_to_go": [1.0, 0.0],
        "group_size": [1, 1],
        "anchor_size": [1, 1],
        "flags": ["singleton_anchor,singleton_group", "excluded,singleton_group,truncated"],
    }.items():
        assert column(name, steps, **CENTRED, truncated="exclude") == expected, name


def test_dead_group() -> None:
    steps = trajectories(*({"rewards": [1.0], "states": ["s"], "score": 1.0} for _ in range(3)))
    actual = GiGPO().advantages(steps.lazy()).collect()
    assert actual["advantage"].to_list() == [0.0] * 3
    assert actual["flags"].to_list() == ["constant_anchor,dead_group"] * 3


def test_output_columns_and_types() -> None:
    lazy = GiGPO().advantages(trajectories(*SHARED).lazy())
    assert (
        lazy.collect_schema()
        == lazy.collect().schema
        == pl.Schema(
            {
                "episode_id": pl.Int64,
                "step_index": pl.Int32,
                "group_id": pl.Int64,
                "anchor_key": pl.Int64,
                "return_to_go": pl.Float64,
                "a_episode": pl.Float64,
                "a_step": pl.Float64,
                "advantage": pl.Float64,
                "group_size": pl.Int32,
                "anchor_size": pl.Int32,
                "anchor_episodes": pl.Int32,
                "flags": pl.String,
            }
        )
    )
