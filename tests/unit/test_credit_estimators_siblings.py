"""Estimators that compare scores of siblings, on groups small enough to work out by hand."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from lake.errors import ContractError
from pipelines.credit.estimators import ESTIMATORS
from testkit.estimator_strategies import wide_frame

Row = dict[str, Any]


def episode(number: int, score: float | None, *, group: int = 1, length: int = 1, **columns: Any) -> list[Row]:
    """One trajectory of `length` steps."""
    row = {"episode_id": number, "group_id": group, "episode_score": score, **columns}
    return [{**row, "step_index": i} for i in range(length)]


def scored(*scores: float | None) -> list[Row]:
    """A group of one-step trajectories."""
    return [row for number, score in enumerate(scores) for row in episode(number, score)]


def column(name: str, estimator: str, rows: list[Row], **options: Any) -> list[Any]:
    return ESTIMATORS[estimator](**options).advantages(wide_frame(rows).lazy()).collect()[name].to_list()


def advantage(estimator: str, rows: list[Row], **options: Any) -> list[Any]:
    return column("advantage", estimator, rows, **options)


# ---------------------------------------------------------------- one group: grpo, dr_grpo, rloo, maxrl, opo


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # the sample deviation is 1
        ("dr_grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [2.0, -2 / 3, -2 / 3, -2 / 3]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
    ],
)
def test_a_group_of_four(estimator: str, expected: list[float]) -> None:
    assert advantage(estimator, scored(2.0, 0.0, 0.0, 0.0)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", ["dr_grpo", "grpo", "maxrl", "opo", "rloo"])
def test_what_is_alone_or_tied_or_unscored(estimator: str) -> None:
    options = {"length": "steps"} if estimator == "opo" else {}
    assert advantage(estimator, scored(3.0), **options) == [0.0]
    assert column("flags", estimator, scored(3.0), **options) == ["singleton_group"]
    tied = scored(0.1 + 0.2, 0.3, 0.3)  # equal but for the last bit
    assert advantage(estimator, tied, **options) == [0.0] * 3
    assert column("flags", estimator, tied, **options) == ["dead_group"] * 3
    unscored = scored(1.0, None, 0.0)
    assert column("flags", estimator, unscored, **options) == ["", "unscored", ""]
    assert column("group_size", estimator, unscored, **options) == [2, 2, 2]
    assert advantage(estimator, unscored, **options)[1] is None


def test_what_is_not_computed_is_null() -> None:
    rows = episode(0, 1.0, length=2) + episode(1, 0.0)
    for name in ("a_step", "return_to_go", "anchor_key"):
        assert column(name, "grpo", rows) == [None] * 3
    for name in ("anchor_size", "anchor_episodes"):
        assert column(name, "grpo", rows) == [0] * 3
    assert column("a_episode", "grpo", rows) == advantage("grpo", rows)


def test_every_step_of_a_trajectory_has_its_advantage_and_length_has_no_weight() -> None:
    rows = episode(0, 1.0, length=4) + episode(1, 0.0)
    assert advantage("dr_grpo", rows) == [0.5] * 4 + [-0.5]
    assert advantage("dr_grpo", rows, baseline="rows") == pytest.approx([0.2] * 4 + [-0.8])
    assert advantage("rloo", rows) == [1.0] * 4 + [-1.0]


def test_sum_of_rewards_as_the_score() -> None:
    rows = [{**row, "reward": 1.0} for row in episode(0, None, length=3) + episode(1, None)]
    assert advantage("rloo", rows, episode_source="sum_rewards") == [2.0] * 3 + [-2.0]
    rows[0]["reward"] = None
    assert advantage("rloo", rows, episode_source="sum_rewards") == [None] * 3 + [0.0]
    assert advantage("rloo", rows, episode_source="sum_rewards", default_step_reward=-1.0) == [0.0] * 4


def test_penalty_of_a_malformed_action() -> None:
    rows = scored(1.0, 0.0)
    rows[0]["is_action_valid"] = False
    assert advantage("dr_grpo", rows) == [0.5, -0.5]
    assert advantage("dr_grpo", rows, invalid_action_penalty=0.25) == [0.25, -0.5]
    assert advantage("dr_grpo", rows, invalid_action_penalty=0.25, baseline="rows") == [0.375, -0.375]


def test_a_raw_score_for_a_lone_trajectory() -> None:
    assert advantage("dr_grpo", scored(3.0), singleton="raw") == [3.0]


def test_maxrl_weighs_a_success_by_how_rare_it_is() -> None:
    rare, common = scored(1.0, 0.0, 0.0, 0.0), scored(1.0, 1.0, 1.0, 0.0)
    assert advantage("maxrl", rare)[0] == pytest.approx(3.0, abs=1e-4)
    assert advantage("maxrl", common)[0] == pytest.approx(1 / 3, abs=1e-5)
    assert advantage("maxrl", common)[3] == pytest.approx(-1.0, abs=1e-5)


def test_maxrl_refuses_negative_scores_and_names_the_episode() -> None:
    with pytest.raises(ContractError, match=r"episode 1 has the score -0.5.*rloo"):
        advantage("maxrl", scored(1.0, -0.5))
    # What takes no part may have any score.
    rows = scored(1.0, -0.5, 0.0)
    rows[1]["status"] = "truncated"
    assert advantage("maxrl", rows, truncated="exclude")[1] is None


def test_opo_weighs_scores_by_length() -> None:
    rows = episode(0, 1.0, completion_tokens=10) + episode(1, 0.0, completion_tokens=30)
    assert advantage("opo", rows) == [0.75, -0.25]
    rows = episode(0, 1.0, length=3) + episode(1, 0.0)
    assert advantage("opo", rows, length="steps") == [0.25] * 3 + [-0.75]


def test_opo_without_lengths() -> None:
    rows = episode(0, 1.0, completion_tokens=10) + episode(1, 0.0) + episode(2, 0.0, completion_tokens=10)
    assert advantage("opo", rows) == [0.5, None, -0.5]
    assert column("flags", "opo", rows) == ["", "unknown_length", ""]
    assert column("group_size", "opo", rows) == [2, 2, 2]
    empty = [{**row, "completion_tokens": 0} for row in rows]
    assert advantage("opo", empty) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


# ---------------------------------------------------------------- batches: batch_std, reinforce_pp_baseline, gdpo


WIDE_AND_NARROW = [
    *episode(0, 10.0, group=1),
    *episode(1, 0.0, group=1),
    *episode(2, 1.0, group=2),
    *episode(3, 0.0, group=2),
]


def test_batch_std_divides_by_the_deviation_of_all_scores() -> None:
    deviation = 4.8562675  # of 10, 0, 1, 0
    expected = [5 / deviation, -5 / deviation, 0.5 / deviation, -0.5 / deviation]
    assert advantage("batch_std", WIDE_AND_NARROW, batch_key="all") == pytest.approx(expected, abs=1e-6)


def test_reinforce_pp_baseline_divides_by_the_deviation_of_centred_scores() -> None:
    deviation = math.sqrt((25 + 25 + 0.25 + 0.25) / 3)
    expected = [5 / deviation, -5 / deviation, 0.5 / deviation, -0.5 / deviation]
    assert advantage("reinforce_pp_baseline", WIDE_AND_NARROW, batch_key="all") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["batch_std", "reinforce_pp_baseline"])
def test_silent_groups_stay_silent_in_a_batch(estimator: str) -> None:
    rows = [*WIDE_AND_NARROW, *episode(4, 7.0, group=3), *episode(5, 0.1, group=4), *episode(6, 0.1, group=4)]
    assert advantage(estimator, rows, batch_key="all")[4:] == [0.0] * 3
    assert column("flags", estimator, rows, batch_key="all")[4:] == ["singleton_group", "dead_group", "dead_group"]


def test_an_episode_of_no_batch_is_a_sibling_without_advantage() -> None:
    rows = scored(1.0, 0.0, 2.0)
    for row, version in zip(rows, [3, 3, None], strict=True):
        row["policy_version"] = version
    actual = advantage("batch_std", rows, batch_key="policy_version")
    assert actual == pytest.approx([0.0, -1 / 0.5**0.5, None], abs=1e-5)
    assert column("flags", "batch_std", rows, batch_key="policy_version") == ["", "", "unknown_batch"]
    assert column("group_size", "batch_std", rows, batch_key="policy_version") == [3, 3, 3]


def test_batch_std_gives_nothing_where_a_batch_has_no_spread() -> None:
    """A group of four over two batches: of one episode, and of three with the same score."""
    rows = scored(1.0, 0.0, 0.0, 0.0)
    for row, version in zip(rows, [2, 1, 1, 1], strict=True):
        row["policy_version"] = version
    assert advantage("batch_std", rows, batch_key="policy_version") == [0.0] * 4
    flags = column("flags", "batch_std", rows, batch_key="policy_version")
    assert flags == ["singleton_batch", *["constant_batch"] * 3]


def components(*pairs: tuple[float | None, float | None], group: int = 1) -> list[Row]:
    """One-step trajectories by their two rewards."""
    return [episode(10 * group + i, None, group=group, score_a=a, score_b=b)[0] for i, (a, b) in enumerate(pairs)]


def test_gdpo_tells_combinations_apart_that_a_sum_does_not() -> None:
    """Two binary rewards: (1, 0) and (0, 1) have one sum; the rarer reward counts more."""
    rows = components((1, 0), (0, 1), (0, 1), (0, 1))
    actual = advantage("gdpo", rows, batch_key="all", components={"a": 1.0, "b": 1.0})
    assert actual == [0.0] * 4  # here b = 1 - a: what one gives, the other takes
    rows = components((1, 0), (0, 1), (0, 1), (0, 0))
    rare, common, _, nothing = advantage("gdpo", rows, batch_key="all", components={"a": 1.0, "b": 1.0})
    assert rare > common > nothing


def test_gdpo_by_hand() -> None:
    rows = components((1, 0), (0, 4), (0, 0))
    # a: mean 1/3, deviation 0.57735; b: mean 4/3, deviation 2.3094: both give +1.1547 to the one that has it.
    z = [1.1547 - 0.5 * 0.57735, -0.57735 + 0.5 * 1.1547, -1.5 * 0.57735]
    deviation = math.sqrt(sum(value**2 for value in z) / 2)
    actual = advantage("gdpo", rows, batch_key="all", components={"a": 1.0, "b": 0.5})
    assert actual == pytest.approx([value / deviation for value in z], abs=1e-4)


def test_gdpo_needs_every_reward_of_an_episode() -> None:
    rows = components((1, 0), (0, None), (0, 1))
    assert advantage("gdpo", rows, batch_key="all", components={"a": 1.0, "b": 1.0})[1] is None
    assert column("flags", "gdpo", rows, batch_key="all", components={"a": 1.0, "b": 1.0})[1] == "unscored"
    rows[1]["status"] = "aborted"
    flags = column("flags", "gdpo", rows, batch_key="all", components={"a": 1.0, "b": 1.0})
    assert flags[1] == "excluded,unscored"


def test_gdpo_is_dead_where_every_reward_is_constant() -> None:
    rows = components((1, 0), (1, 0)) + components((1, 0), (1, 2), group=2)
    flags = column("flags", "gdpo", rows, batch_key="all", components={"a": 1.0, "b": 1.0})
    assert flags == ["dead_group", "dead_group", "", ""]


def test_the_order_of_the_rewards_does_not_matter() -> None:
    first, second = ({"a": 0.1, "b": 0.7}, {"b": 0.7, "a": 0.1})
    configs = [ESTIMATORS["gdpo"](batch_key="all", components=weights) for weights in (first, second)]
    assert configs[0].model_dump_json() == configs[1].model_dump_json()
    assert configs[1].input_needs().components == ("a", "b")


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 0.0}, {"a": math.inf}])
def test_gdpo_refuses_rewards_without_a_say(weights: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"gdpo adds several rewards|finite"):
        ESTIMATORS["gdpo"](batch_key="all", components=weights)
