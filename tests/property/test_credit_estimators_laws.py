"""Laws of the estimators for any trajectories. test_credit_estimators_gigpo_laws.py has those of GiGPO alone."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.estimators.protocol import Estimator, Flag
from testkit.estimator_strategies import (
    IN_BATCHES,
    INCREMENTAL,
    NAMES,
    OF_EPISODES,
    estimators,
    wide_frame,
    wide_rows,
)
from testkit.examples import mostly_slow

Rows = list[dict[str, Any]]
KEYS = ["group_id", "episode_id", "step_index"]
PLAIN = {"batch_key": "all"}
COMPONENTS = {"components": {"a": 1.0, "b": 0.5}}
OF_EACH_KIND = ("gae", "gdpo", "gigpo_loo", "grpo", "hgpo")
"""Of steps, of batches, with anchors, of episodes, with anchors of several steps."""
law = settings(deadline=None, max_examples=3)


def make_estimator(name: str, **options: Any) -> Estimator:
    """An estimator with the given options, and those it cannot do without."""
    needed = (PLAIN if name in IN_BATCHES else {}) | (COMPONENTS if name == "gdpo" else {})
    return ESTIMATORS[name](**{**needed, **options})


def advantages(rows: Rows, estimator: Estimator) -> pl.DataFrame:
    return estimator.advantages(wide_frame(rows).lazy()).collect()


def has(flag: Flag) -> pl.Expr:
    return pl.col("flags").str.split(",").list.contains(flag.value)


def changed(rows: Rows, **changes: Any) -> Rows:
    return [{**row, **{name: change(row) for name, change in changes.items()}} for row in rows]


def by_episode(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.group_by("group_id", "episode_id", maintain_order=True).first()


def drawn(data: st.DataObject, name: str, **fixed: Any) -> tuple[Rows, Estimator]:
    return data.draw(wide_rows(positive=name == "maxrl")), data.draw(estimators(name, **fixed))


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "batch_std"])
@law
@given(rows=wide_rows(positive=True))
def test_advantages_of_siblings_sum_to_zero(name: str, rows: Rows) -> None:
    sums = by_episode(advantages(rows, make_estimator(name))).group_by("group_id").agg(pl.col("advantage").sum())
    assert (sums["advantage"].abs() < 1e-9).all()


@law
@given(rows=wide_rows())
def test_opo_sums_to_zero_when_weighed_by_length(rows: Rows) -> None:
    actual = advantages(rows, make_estimator("opo", length="steps"))
    sums = actual.group_by("group_id").agg(pl.col("advantage").sum())  # a row per step: the weight is the length
    assert (sums["advantage"].abs() < 1e-9).all()


@pytest.mark.parametrize("name", ["gdpo", "reinforce_pp_baseline", "reinforce_pp"])
@law
@given(rows=wide_rows())
def test_a_batch_sums_to_zero_and_has_deviation_one(name: str, rows: Rows) -> None:
    actual = advantages(rows, make_estimator(name))
    units = actual if name == "reinforce_pp" else by_episode(actual)
    values = units["advantage"].drop_nulls()
    assert abs(values.sum()) < 1e-8
    if (values != 0.0).any():
        assert values.std() == pytest.approx(1.0, abs=1e-4)


# ---------------------------------------------------------------- shift and scale


def moved(rows: Rows, change: Any) -> Rows:
    """Rows whose scores and components are changed alike."""
    names = ("episode_score", "score_a", "score_b")
    return changed(
        rows, **{name: lambda row, name=name: None if row[name] is None else change(row[name]) for name in names}
    )


@pytest.mark.parametrize("name", sorted({*OF_EPISODES} - {"maxrl"}))
@law
@given(data=st.data(), shift=st.sampled_from([-8.0, 3.0]))
def test_adding_a_constant_to_all_scores_changes_nothing(name: str, data: st.DataObject, shift: float) -> None:
    rows, estimator = drawn(data, name, **({} if name == "gdpo" else {"episode_source": "score"}))
    if "singleton" in type(estimator).model_fields:
        estimator = estimator.model_copy(update={"singleton": "zero"})
    before, after = advantages(rows, estimator), advantages(moved(rows, lambda x: x + shift), estimator)
    assert_frame_equal(after, before, abs_tol=1e-9)


@pytest.mark.parametrize("name", OF_EPISODES)
@law
@given(rows=wide_rows(positive=True), factor=st.sampled_from([2.0, 16.0]))
def test_scaling_scores_scales_or_keeps_advantages(name: str, rows: Rows, factor: float) -> None:
    before, after = (advantages(frame, make_estimator(name)) for frame in (rows, moved(rows, lambda x: factor * x)))
    scales = name in {"dr_grpo", "rloo", "opo"}
    # The eps of 1e-6 next to what is divided by keeps scale invariance from being exact.
    expected = before.select(pl.col("advantage") * (factor if scales else 1.0))
    assert_frame_equal(after.select("advantage"), expected, abs_tol=1e-9, rel_tol=1e-4)


# ---------------------------------------------------------------- order, layout, other groups


@pytest.mark.parametrize("name", NAMES)
@law
@given(data=st.data(), layout=st.integers(1, 4))
def test_row_order_files_and_engine_do_not_change_a_bit(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, layout: int
) -> None:
    rows, estimator = drawn(data, name)
    folder: Path = tmp_path_factory.mktemp("steps")
    shuffled = wide_frame(data.draw(st.permutations(rows)))
    for part in range(layout):
        shuffled[part::layout].write_parquet(folder / f"{part}.parquet")
    lazy = estimator.advantages(pl.scan_parquet(folder / "*.parquet"))
    expected = advantages(rows, estimator)
    assert_frame_equal(lazy.collect(), expected, check_exact=True)
    assert_frame_equal(lazy.collect(engine="streaming"), expected, check_exact=True)


@pytest.mark.parametrize("name", INCREMENTAL)
@law
@given(data=st.data())
def test_other_groups_do_not_change_a_bit(name: str, data: st.DataObject) -> None:
    rows, estimator = drawn(data, name)
    groups = sorted({row["group_id"] for row in rows})
    apart = [advantages([row for row in rows if row["group_id"] == group], estimator) for group in groups]
    assert_frame_equal(pl.concat(apart), advantages(rows, estimator), check_exact=True)


@pytest.mark.parametrize("name", IN_BATCHES)
@law
@given(data=st.data())
def test_batches_are_worlds_of_their_own(name: str, data: st.DataObject) -> None:
    """A batch key that gathers whole groups is the same as a job per batch."""
    rows, estimator = drawn(data, name, batch_key="policy_version")
    rows = changed(rows, policy_version=lambda row: row["group_id"] % 2)
    alone = estimator.model_copy(update={"batch_key": "all"})
    frames = [advantages([row for row in rows if row["policy_version"] == key], alone) for key in (0, 1)]
    assert_frame_equal(pl.concat(frames).sort(KEYS), advantages(rows, estimator), abs_tol=1e-12)


@pytest.mark.parametrize("name", IN_BATCHES)
def test_other_groups_of_the_batch_do_matter(name: str) -> None:
    def group(number: int, low: float, high: float) -> Rows:
        return [
            {"group_id": number, "episode_id": 10 * number + i, "step_index": 0, "reward": value}
            | {"episode_score": value, "score_a": value, "score_b": -2 * value * i}
            for i, value in enumerate([low, high, high])
        ]

    alone, wider = group(1, 0.0, 1.0), [*group(1, 0.0, 1.0), *group(2, -5.0, 30.0)]
    before = advantages(alone, make_estimator(name))["advantage"]
    after = advantages(wider, make_estimator(name)).filter(pl.col("group_id") == 1)["advantage"]
    assert (before - after).abs().min() > 1e-3


# ---------------------------------------------------------------- nothing is divided by a spread of zero

SCALES = {"gdpo", "grpo", "gigpo", "hgpo", "discounted_grpo", "reinforce_pp", "reinforce_pp_baseline"}
"""Estimators that subtract a mean and divide by the deviation of the same values, at one or two levels."""


def largest(rows: Rows, estimator: Estimator) -> float:
    """What the formula allows an advantage to be, from sizes of sets and numbers of the input alone."""
    options, count = estimator.model_dump(), len(rows)
    names = ("reward", "default_step_reward", "episode_score", "value_estimate", "final_value_estimate")
    values = [abs(row.get(name) or 0.0) for row in rows for name in names]
    values.append(abs(options.get("default_step_reward") or 0.0))
    total = 2 * count * max(values) + options.get("invalid_action_penalty", 0.0)  # a return, or a difference of two
    levels = 1.0 + options.get("omega", 0.0)
    if estimator.name == "batch_std":
        return total * (2 * count) ** 0.5 / 0.25  # unequal scores lie on a grid of 1/4
    scaled = estimator.name in SCALES and options.get("norm", "mean_std_norm") == "mean_std_norm"
    centred = "mean_norm" in {options.get(name) for name in ("norm", "episode_norm", "step_norm")}
    raw = options.get("singleton") == "raw"
    # Of n values none is more than (n - 1) / sqrt(n) sample deviations from their mean, or sqrt(n - 1) others.
    bound = (count**0.5 + 1.0) * levels if scaled else count * total * levels
    return max(bound, total * levels if raw or centred else 0.0)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_no_advantage_is_larger_than_its_formula_allows(name: str, data: st.DataObject) -> None:
    """A batch may hold a part of a group: its spread may be zero where the group's is not."""
    rows, estimator = drawn(data, name)
    if name in IN_BATCHES:
        estimator = estimator.model_copy(update={"batch_key": "policy_version"})
    actual = advantages(rows, estimator)["advantage"].drop_nulls()
    assert actual.abs().max() is None or actual.abs().max() <= largest(rows, estimator)


@pytest.mark.parametrize("name", sorted({*IN_BATCHES} - {"reinforce_pp"}))
@law
@given(rows=wide_rows(nulls=False, statuses=False))
def test_a_batch_of_one_episode_is_exactly_zero_and_flagged(name: str, rows: Rows) -> None:
    rows = changed(rows, policy_version=lambda row: row["episode_id"])
    actual = advantages(rows, make_estimator(name, batch_key="policy_version"))
    assert (actual["advantage"] == 0.0).all()
    assert actual.filter(~has(Flag.SINGLETON_BATCH)).is_empty()


@law
@given(rows=wide_rows(nulls=False, statuses=False))
def test_a_batch_of_equal_scores_is_exactly_zero_and_flagged(rows: Rows) -> None:
    """No matter what the group holds besides."""
    rows = changed(rows, policy_version=lambda row: int(2 * row["episode_score"]))
    actual = advantages(rows, make_estimator("batch_std", batch_key="policy_version"))
    assert (actual["advantage"] == 0.0).all()
    assert actual.filter(~has(Flag.CONSTANT_BATCH) & ~has(Flag.SINGLETON_BATCH)).is_empty()


# ---------------------------------------------------------------- relatives


@law
@given(data=st.data())
def test_omega_zero_gigpo_is_grpo_to_the_bit(data: st.DataObject) -> None:
    rows, estimator = drawn(data, "grpo")
    for name, norm in (("grpo", "mean_std_norm"), ("dr_grpo", "mean_norm")):
        gigpo = make_estimator("gigpo", **estimator.model_dump(), omega=0.0, episode_norm=norm)
        relative = make_estimator(name, **estimator.model_dump())
        columns = [*KEYS, "a_episode", "advantage", "group_size"]
        assert_frame_equal(advantages(rows, relative)[columns], advantages(rows, gigpo)[columns], check_exact=True)


@law
@given(rows=wide_rows())
def test_rloo_is_the_centred_score_times_n_by_n_minus_one(rows: Rows) -> None:
    loo, centred = advantages(rows, make_estimator("rloo")), advantages(rows, make_estimator("dr_grpo"))
    size = centred["group_size"].cast(pl.Float64)
    factor = pl.select(pl.when(size > 1).then(size / (size - 1)).otherwise(1.0)).to_series()
    assert_frame_equal(
        loo.select("advantage"), (centred["advantage"] * factor).alias("advantage").to_frame(), abs_tol=1e-12
    )


@law
@given(rows=wide_rows(nulls=False, statuses=False))
def test_rloo_normalised_over_its_group_is_grpo(rows: Rows) -> None:
    """The factor n / (n - 1) is in the deviation, too."""
    loo, grpo = advantages(rows, make_estimator("rloo")), advantages(rows, make_estimator("grpo"))
    one_of_each = loo.unique("episode_id", maintain_order=True)
    spread = one_of_each.group_by("group_id").agg(spread=pl.col("advantage").std())
    scaled = loo.join(spread, on="group_id", how="left", maintain_order="left")
    has_spread = scaled.select(pl.col("spread").fill_null(0.0) > 1e-3).to_series()
    normalised = (scaled["advantage"] / scaled["spread"]).filter(has_spread)
    apart = (normalised - grpo["advantage"].filter(has_spread)).abs().to_list()
    assert max(apart, default=0.0) < 2e-3


@law
@given(data=st.data())
def test_gigpo_loo_is_gigpo_centred_times_n_by_n_minus_one_at_both_levels(data: st.DataObject) -> None:
    rows, estimator = drawn(data, "gigpo_loo", invalid_action_penalty=0.0)
    loo = advantages(rows, estimator)
    centred = advantages(
        rows, make_estimator("gigpo", **estimator.model_dump(), episode_norm="mean_norm", step_norm="mean_norm")
    )
    for name, size in (("a_episode", "group_size"), ("a_step", "anchor_size")):
        n = pl.col(size).cast(pl.Float64)
        factor = pl.when(n > 1).then(n / (n - 1)).otherwise(1.0)
        assert_frame_equal(loo.select(name), centred.select(pl.col(name) * factor), abs_tol=1e-12)


@law
@given(rows=wide_rows())
def test_batch_std_over_batches_of_one_group_is_grpo(rows: Rows) -> None:
    actual, expected = (
        advantages(rows, make_estimator("batch_std", batch_key="group_id")),
        advantages(rows, make_estimator("grpo")),
    )
    assert_frame_equal(actual.drop("flags"), expected.drop("flags"), abs_tol=1e-12)


@law
@given(rows=wide_rows())
def test_opo_with_equal_lengths_is_dr_grpo(rows: Rows) -> None:
    rows = changed(rows, completion_tokens=lambda _: 17)
    assert_frame_equal(
        advantages(rows, make_estimator("opo")), advantages(rows, make_estimator("dr_grpo")), abs_tol=1e-12
    )


@law
@given(rows=wide_rows(), source=st.sampled_from(["rewards", "rewards_plus_terminal"]))
def test_gae_with_gamma_and_lambda_one_is_return_minus_value(rows: Rows, source: str) -> None:
    actual = advantages(rows, make_estimator("gae", step_source=source)).drop_nulls("advantage")
    estimates = wide_frame(rows).select(*KEYS, "value_estimate", "final_value_estimate", "status")
    joined = actual.join(estimates, on=KEYS, maintain_order="left")
    bootstrap = pl.when(pl.col("status") == "truncated").then("final_value_estimate").otherwise(0.0)
    expected = joined.select(advantage=pl.col("return_to_go") + bootstrap - pl.col("value_estimate"))
    assert_frame_equal(actual.select("advantage"), expected, abs_tol=1e-12)


@law
@given(rows=wide_rows(), gamma=st.sampled_from([0.9, 1.0]), norm=st.sampled_from(["mean_norm", "mean_std_norm"]))
def test_one_anchor_per_step_index_is_discounted_grpo(rows: Rows, gamma: float, norm: str) -> None:
    """And with gamma = 1 and `mean_norm`, per-step centring of the rewards still to come."""
    rows = changed(rows, is_active=lambda _: True, state_hash=lambda row: row["step_index"])
    gigpo = make_estimator("gigpo", gamma=gamma, step_norm=norm, invalid_action_penalty=0.0)
    actual = advantages(rows, make_estimator("discounted_grpo", gamma=gamma, norm=norm))
    columns = ["a_step", "return_to_go"]
    assert_frame_equal(actual[columns], advantages(rows, gigpo)[columns], check_exact=True)
    assert_frame_equal(actual.select("advantage"), actual.select(advantage="a_step"))


@law
@given(data=st.data())
def test_hgpo_that_looks_back_on_nothing_is_gigpos_step_side(data: st.DataObject) -> None:
    rows, estimator = drawn(data, "hgpo", history=0, norm="mean_norm", episode_level=False)
    options = estimator.model_dump(exclude={"history", "alpha", "norm", "zeros", "episode_level"})
    gigpo = make_estimator("gigpo", **options, episode_norm="mean_norm", step_norm="mean_norm")
    ours, theirs = advantages(rows, estimator), advantages(rows, gigpo)
    assert_frame_equal(ours.drop("advantage"), theirs.drop("advantage"), check_exact=True)


# ---------------------------------------------------------------- NULL is unknown; truncated, aborted and excluded


@pytest.mark.parametrize("name", OF_EPISODES)
@law
@given(rows=wide_rows(positive=True))
def test_an_unscored_episode_has_no_advantage_and_is_no_sibling(name: str, rows: Rows) -> None:
    estimator = make_estimator(name, **({"length": "steps"} if name == "opo" else {}))
    actual = advantages(rows, estimator)
    unscored = actual.filter(has(Flag.UNSCORED))
    assert unscored["advantage"].is_null().all()
    rest = [row for row in rows if row["episode_id"] not in set(unscored["episode_id"])]
    if rest:
        scored_rows = actual.filter(~has(Flag.UNSCORED))
        assert_frame_equal(scored_rows, advantages(rest, estimator), abs_tol=1e-12)


@pytest.mark.parametrize("name", mostly_slow(NAMES, *OF_EACH_KIND))
@law
@given(data=st.data())
def test_masking_hides_and_excluding_removes_truncated_episodes(name: str, data: st.DataObject) -> None:
    rows, estimator = drawn(data, name)
    included, masked, excluded = (
        advantages(rows, estimator.model_copy(update={"truncated": policy})) for policy in ("keep", "mask", "exclude")
    )
    truncated = has(Flag.TRUNCATED)
    assert masked.filter(truncated)["advantage"].is_null().all()
    assert_frame_equal(masked.drop("advantage", "flags"), included.drop("advantage", "flags"), check_exact=True)
    assert_frame_equal(masked.filter(~truncated), included.filter(~truncated), check_exact=True)
    dropped = excluded.filter(has(Flag.EXCLUDED))
    assert dropped["advantage"].is_null().all()
    rest = [row for row in rows if row["episode_id"] not in set(dropped["episode_id"])]
    if rest:
        assert_frame_equal(excluded.filter(~has(Flag.EXCLUDED)), advantages(rest, estimator), abs_tol=1e-12)


@pytest.mark.parametrize("name", mostly_slow(NAMES, *OF_EACH_KIND))
@law
@given(data=st.data())
def test_every_active_step_gets_a_row_and_every_null_its_reason(name: str, data: st.DataObject) -> None:
    rows, estimator = drawn(data, name)
    actual = advantages(rows, estimator)
    active = [tuple(row[key] for key in KEYS) for row in rows if row["is_active"] is not False]
    assert actual.select(KEYS).rows() == sorted(active)
    for column in ("return_to_go", "a_episode", "a_step", "advantage"):
        assert actual[column].is_finite().all()
    unknown = [flag for flag in Flag if flag.name.startswith("UNKNOWN")]
    reasons = pl.any_horizontal(*(has(f) for f in (Flag.UNSCORED, Flag.EXCLUDED, Flag.MASKED, *unknown)))
    assert actual.filter(pl.col("advantage").is_null() & ~reasons).is_empty()


@pytest.mark.parametrize("name", OF_EPISODES)
@law
@given(rows=wide_rows(nulls=False, statuses=False, positive=True))
def test_dead_and_singleton_groups_are_exactly_zero_and_flagged(name: str, rows: Rows) -> None:
    actual = advantages(rows, make_estimator(name))
    assert actual["advantage"].null_count() == 0
    silent = actual.filter(has(Flag.DEAD_GROUP) | has(Flag.SINGLETON_GROUP))
    assert (silent["advantage"] == 0.0).all()
    assert actual.filter((pl.col("group_size") == 1) & ~has(Flag.SINGLETON_GROUP)).is_empty()
    tied = advantages(moved(rows, lambda _: 9.9), make_estimator(name))
    assert (tied["advantage"] == 0.0).all()
    assert tied.filter((pl.col("group_size") > 1) & ~has(Flag.DEAD_GROUP)).is_empty()
