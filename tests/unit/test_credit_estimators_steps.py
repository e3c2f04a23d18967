"""Estimators of steps, on trajectories small enough to work out by hand."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.credit.estimators import ESTIMATORS
from testkit.estimator_strategies import wide_frame

Row = dict[str, Any]


def trajectory(number: int, rewards: list[float | None], *, group: int = 1, **columns: Any) -> list[Row]:
    """One trajectory. Lists among the columns have one value per step."""
    rows = []
    for i, reward in enumerate(rewards):
        row = {name: value[i] if isinstance(value, list) else value for name, value in columns.items()}
        rows.append({"episode_id": number, "group_id": group, "step_index": i, "reward": reward, **row})
    return rows


def column(name: str, estimator: str, rows: list[Row], **options: Any) -> list[Any]:
    steps = wide_frame(rows).drop("state_hash").lazy()
    return ESTIMATORS[estimator](**options).advantages(steps).collect()[name].to_list()


def advantage(estimator: str, rows: list[Row], **options: Any) -> list[Any]:
    return column("advantage", estimator, rows, **options)


# ---------------------------------------------------------------- discounted grpo


TWO = trajectory(0, [0.0, 1.0, 4.0]) + trajectory(1, [0.0, 3.0])


def test_discounted_grpo_compares_steps_at_the_same_position() -> None:
    options = {"gamma": 0.5, "norm": "mean_norm"}
    assert column("return_to_go", "discounted_grpo", TWO, **options) == [1.5, 3.0, 4.0, 1.5, 3.0]
    assert advantage("discounted_grpo", TWO, **options) == [0.0] * 5
    assert column("flags", "discounted_grpo", TWO, **options) == [
        "constant_step,dead_group",
        "constant_step,dead_group",
        "dead_group,singleton_step",
        "constant_step,dead_group",
        "constant_step,dead_group",
    ]
    assert advantage("discounted_grpo", TWO, gamma=1.0, norm="mean_norm") == [1.0, 1.0, 0.0, -1.0, -1.0]


def test_discounted_grpo_over_all_steps_of_the_group() -> None:
    actual = advantage("discounted_grpo", TWO, gamma=0.5, norm="mean_norm", compare="all_steps")
    assert actual == pytest.approx([-1.1, 0.4, 1.4, -1.1, 0.4])
    assert column("group_size", "discounted_grpo", TWO) == [2] * 5
    assert column("anchor_size", "discounted_grpo", TWO) == [0] * 5


def test_discounted_grpo_position_counts_active_steps() -> None:
    rows = trajectory(0, [9.0, 1.0], is_active=[False, True]) + trajectory(1, [0.0])
    assert advantage("discounted_grpo", rows, norm="mean_norm") == [0.5, -0.5]


def test_a_return_that_is_unknown_is_compared_with_nothing() -> None:
    rows = trajectory(0, [None, 1.0]) + trajectory(1, [0.0, 0.0])
    assert advantage("discounted_grpo", rows, norm="mean_norm") == [None, 0.5, 0.0, -0.5]
    flags = column("flags", "discounted_grpo", rows, norm="mean_norm")
    assert flags[0] == "singleton_group,unknown_return"
    assert column("group_size", "discounted_grpo", rows) == [1] * 4


# ---------------------------------------------------------------- reinforce++


def test_reinforce_pp_normalises_returns_over_the_batch() -> None:
    rows = trajectory(0, [1.0, 1.0]) + trajectory(1, [3.0], group=2)
    # Returns 2, 1, 3: mean 2, sample deviation 1.
    assert advantage("reinforce_pp", rows, batch_key="all") == pytest.approx([0.0, -1.0, 1.0], abs=1e-5)
    assert column("flags", "reinforce_pp", rows, batch_key="all") == ["", "", ""]
    assert column("group_size", "reinforce_pp", rows, batch_key="all") == [1, 1, 1]


def test_reinforce_pp_by_policy_version() -> None:
    rows = trajectory(0, [1.0], policy_version=1) + trajectory(1, [5.0], policy_version=2)
    rows += trajectory(2, [3.0], policy_version=1, group=2) + trajectory(3, [0.0])
    actual = advantage("reinforce_pp", rows, batch_key="policy_version")
    assert actual == pytest.approx([-(0.5**0.5), 0.0, None, 0.5**0.5], abs=1e-5)
    flags = column("flags", "reinforce_pp", rows, batch_key="policy_version")
    assert flags == ["", "singleton_batch", "unknown_batch", ""]


def test_reinforce_pp_where_all_returns_are_equal() -> None:
    rows = trajectory(0, [1.0]) + trajectory(1, [1.0])
    assert advantage("reinforce_pp", rows, batch_key="all") == [0.0, 0.0]
    assert column("flags", "reinforce_pp", rows, batch_key="all") == ["constant_batch"] * 2


# ---------------------------------------------------------------- gae


def valued(status: str, final: float | None = None, values: list[float | None] | None = None) -> list[Row]:
    columns = {"value_estimate": values or [0.5, 1.0, 2.0], "final_value_estimate": final, "status": status}
    return trajectory(0, [0.0, 0.0, 1.0], **columns)


def test_gae_of_an_episode_that_ended_by_itself() -> None:
    # delta: 0 + 0.5 * 1 - 0.5, 0 + 0.5 * 2 - 1, 1 + 0 - 2
    assert advantage("gae", valued("completed"), gamma=0.5, lam=0.5) == [-0.0625, -0.25, -1.0]
    assert advantage("gae", valued("completed", final=9.0), gamma=0.5, lam=0.5) == [-0.0625, -0.25, -1.0]
    assert advantage("gae", valued("completed"), gamma=0.5, lam=0.0) == [0.0, 0.0, -1.0]
    assert advantage("gae", valued("completed")) == [0.5, 0.0, -1.0]
    assert column("return_to_go", "gae", valued("completed"), gamma=0.5) == [0.25, 0.5, 1.0]


def test_gae_of_an_episode_that_was_cut_off_bootstraps() -> None:
    assert advantage("gae", valued("truncated", final=4.0), gamma=0.5, lam=0.5) == [0.0625, 0.25, 1.0]
    assert advantage("gae", valued("truncated", final=4.0)) == [4.5, 4.0, 3.0]
    assert advantage("gae", valued("truncated", final=4.0), truncated="mask") == [None] * 3
    assert advantage("gae", valued("truncated", final=4.0), truncated="exclude") == [None] * 3


def test_gae_without_bootstrap_takes_a_limit_for_an_end() -> None:
    expected = advantage("gae", valued("completed"), gamma=0.5, lam=0.5)
    assert advantage("gae", valued("truncated", final=4.0), gamma=0.5, lam=0.5, bootstrap=False) == expected
    assert advantage("gae", valued("truncated"), gamma=0.5, lam=0.5, bootstrap=False) == expected


def test_gae_whitens_advantages_over_a_batch_and_keeps_them_in_a_step() -> None:
    plain = advantage("gae", valued("completed"))
    assert column("a_step", "gae", valued("completed"), batch_key="all") == plain
    mean, deviation = np.mean(plain), np.std(plain, ddof=1)
    whitened = [(number - mean) / (deviation + 1e-6) for number in plain]
    assert advantage("gae", valued("completed"), batch_key="all") == pytest.approx(whitened)


def test_gae_of_values_that_are_unknown() -> None:
    assert advantage("gae", valued("truncated")) == [None] * 3
    assert column("flags", "gae", valued("truncated")) == ["truncated,unknown_value"] * 3
    rows = valued("completed", values=[0.5, None, 2.0])
    assert advantage("gae", rows) == [None, None, -1.0]
    assert column("flags", "gae", rows) == ["unknown_value", "unknown_value", ""]
    rows = valued("completed")
    rows[0]["reward"] = None
    assert advantage("gae", rows) == [None, 0.0, -1.0]
    assert column("flags", "gae", rows)[0] == "unknown_return"


def test_gae_of_a_broken_episode() -> None:
    assert advantage("gae", valued("aborted")) == [None] * 3
    assert column("flags", "gae", valued("failed")) == ["excluded"] * 3
    scored = [{**row, "episode_score": 1.0} for row in valued("aborted")]
    assert advantage("gae", scored) == [0.5, 0.0, -1.0]


# ---------------------------------------------------------------- leave-one-out gigpo


def test_gigpo_loo_leaves_itself_out_at_both_levels() -> None:
    rows = trajectory(0, [3.0], state="s", episode_score=3.0) + trajectory(1, [1.0], state="s", episode_score=1.0)
    rows += trajectory(2, [0.0], state="t", episode_score=0.0)
    assert column("a_episode", "gigpo_loo", rows) == pytest.approx([2.5, -0.5, -2.0])
    assert column("a_step", "gigpo_loo", rows) == [2.0, -2.0, 0.0]
    assert advantage("gigpo_loo", rows) == pytest.approx([4.5, -2.5, -2.0])
    assert advantage("gigpo_loo", rows, combination="convex", omega=0.5) == pytest.approx([2.25, -1.25, -1.0])
    rows[0]["is_action_valid"] = False
    assert column("a_episode", "gigpo_loo", rows)[0] == pytest.approx(2.4)
    assert column("a_step", "gigpo_loo", rows) == pytest.approx([1.9, -1.9, 0.0])
    with pytest.raises(ValidationError, match="convex"):
        ESTIMATORS["gigpo_loo"](combination="convex", omega=2.0)


# ---------------------------------------------------------------- hgpo


PATHS = [
    *trajectory(0, [0.0, 6.0], state=["a", "z"]),
    *trajectory(1, [0.0, 2.0], state=["a", "z"]),
    *trajectory(2, [0.0, 1.0], state=["b", "z"]),
]


def test_hgpo_weighs_the_longer_shared_past_more() -> None:
    options = {"gamma": 1.0, "norm": "mean_norm", "history": 1}
    # At z: against all three (mean 3), and against the one that came from a, too (mean 4). Weights 2 and 3.
    expected = [(2 * 3 + 3 * 2) / 5, (2 * -1 + 3 * -2) / 5, -2.0]
    assert column("a_step", "hgpo", PATHS, **options)[1::2] == pytest.approx(expected)
    assert column("a_step", "hgpo", PATHS, **options)[0::2] == [2.0, -2.0, 0.0]
    assert advantage("hgpo", PATHS, **options) == column("a_step", "hgpo", PATHS, **options)
    flat = [(3 + 2) / 2, (-1 - 2) / 2, -2.0]
    assert advantage("hgpo", PATHS, **options, alpha=0.0)[1::2] == pytest.approx(flat)
    assert advantage("hgpo", PATHS, **{**options, "history": 0})[1::2] == pytest.approx([3.0, -1.0, -2.0])


def test_hgpo_takes_the_population_deviation() -> None:
    actual = advantage("hgpo", PATHS, gamma=1.0, history=0)
    assert actual[0] == pytest.approx(1.0, abs=1e-5)  # two values: (6 - 4) / 2


def test_hgpo_may_take_the_episode_as_one_more_level() -> None:
    scores = [6.0, 2.0, 1.0]
    rows = [{**row, "episode_score": scores[row["episode_id"]]} for row in PATHS]
    options = {"gamma": 1.0, "norm": "mean_norm", "history": 0, "episode_level": True}
    # Weight 1 for the episode (+3, -1, -2 from the mean 3), weight 2 for the state.
    assert advantage("hgpo", rows, **options) == pytest.approx([7 / 3, 3.0, -5 / 3, -1.0, -2.0, -2.0])
    rows[0]["episode_score"] = rows[1]["episode_score"] = None
    assert advantage("hgpo", rows, **options)[:2] == [None, None]
    assert column("a_step", "hgpo", rows, **options)[1] == 3.0


def test_hgpo_levels_that_are_exactly_zero() -> None:
    """At z the whole group is mixed; the two that came from a are tied."""
    rows = trajectory(0, [0.0, 2.0], state=["a", "z"]) + trajectory(1, [0.0, 2.0], state=["a", "z"])
    rows += trajectory(2, [0.0, 8.0], state=["b", "z"])
    options = {"gamma": 1.0, "norm": "mean_norm", "history": 1}
    assert advantage("hgpo", rows, **options)[1::2] == pytest.approx([-2.0, -2.0, 4.0])
    counted = advantage("hgpo", rows, **options, zeros="count")[1::2]
    assert counted == pytest.approx([-2.0 * 2 / 5, -2.0 * 2 / 5, 4.0])


def test_hgpo_under_first_visits_counts_a_later_visit_where_its_past_is_new() -> None:
    rows = trajectory(0, [0.0, 0.0, 0.0, 4.0], state=["a", "z", "b", "z"])
    rows += trajectory(1, [0.0, 0.0], state=["b", "z"])
    options = {"gamma": 1.0, "norm": "mean_norm", "history": 1, "zeros": "count", "revisits": "first"}
    # The second z of trajectory 0 is no member at z, and a first visit at (b, z), where the other trajectory is too.
    assert advantage("hgpo", rows, **options) == [0.0, 2.0, 2.0, 2.0, -2.0, -2.0]
    assert column("flags", "hgpo", rows, **options)[3] == "revisit,unscored"


def test_hgpo_does_not_look_past_an_unknown_state() -> None:
    rows = [dict(row) for row in PATHS]
    rows[0]["state"] = None
    options = {"gamma": 1.0, "norm": "mean_norm", "history": 1}
    assert advantage("hgpo", rows, **options) == [0.0, 3.0, 0.0, -1.0, 0.0, -2.0]
    assert column("flags", "hgpo", rows, **options)[0] == "unknown_state,unscored"
