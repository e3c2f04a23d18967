"""Laws that group-relative advantages obey, for any trajectories."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipelines.credit import GiGPO
from pipelines.credit.estimators.protocol import Flag
from testkit.credit_strategies import SCORES, configs, frame, step_rows
from testkit.examples import examples

Rows = list[dict[str, Any]]
KEYS = ["episode_id", "step_index"]
law = settings(deadline=None, max_examples=examples(30))


def advantages(rows: Rows, config: GiGPO) -> pl.DataFrame:
    return config.advantages(frame(rows).lazy()).collect()


def has(flag: Flag) -> pl.Expr:
    return pl.col("flags").str.split(",").list.contains(flag.value)


def changed(rows: Rows, **changes: Any) -> Rows:
    """Rows with some columns recomputed: each change is a function of the row."""
    return [{**row, **{name: change(row) for name, change in changes.items()}} for row in rows]


# --- centring


@law
@given(rows=step_rows(), config=configs(baseline="trajectories", singleton="zero", invalid_action_penalty=0.0))
def test_episode_advantages_of_siblings_sum_to_zero_over_trajectories(rows: Rows, config: GiGPO) -> None:
    per_episode = advantages(rows, config).group_by("group_id", "episode_id").agg(pl.col("a_episode").first())
    sums = per_episode.group_by("group_id").agg(pl.col("a_episode").sum())
    assert (sums["a_episode"].abs() < 1e-9).all()


@law
@given(rows=step_rows(), config=configs(baseline="rows", singleton="zero"))
def test_episode_advantages_of_siblings_sum_to_zero_over_rows(rows: Rows, config: GiGPO) -> None:
    sums = advantages(rows, config).group_by("group_id").agg(pl.col("a_episode").sum())
    assert (sums["a_episode"].abs() < 1e-9).all()


@law
@given(rows=step_rows(), config=configs())
def test_step_advantages_of_an_anchor_sum_to_zero(rows: Rows, config: GiGPO) -> None:
    sums = advantages(rows, config).group_by("group_id", "anchor_key").agg(pl.col("a_step").sum())
    assert (sums["a_step"].abs() < 1e-9).all()


@law
@given(rows=step_rows(), config=configs())
def test_scaled_advantages_are_bounded_by_the_group_size(rows: Rows, config: GiGPO) -> None:
    """|z| <= (n - 1) / sqrt(n); a malformed action costs at most 1 more."""
    actual = advantages(rows, GiGPO(**{**config.model_dump(), "episode_norm": "mean_std_norm", "singleton": "zero"}))
    if config.step_norm == "mean_std_norm":
        size = pl.max_horizontal(pl.col("anchor_size"), 1)  # a step without an anchor gets 0, as one that is alone
        assert actual.filter(pl.col("a_step").abs() > (size - 1) / size.sqrt() + 1e-9).is_empty()
    if config.baseline == "trajectories":
        size = pl.col("group_size")
        assert actual.filter(pl.col("a_episode").abs() > (size - 1) / size.sqrt() + 1 + 1e-9).is_empty()


# --- invariances


@law
@given(rows=step_rows(), config=configs(episode_source="score", singleton="zero"), shift=st.sampled_from([-8.0, 3.0]))
def test_adding_a_constant_to_all_scores_of_a_group_changes_no_episode_advantage(
    rows: Rows, config: GiGPO, shift: float
) -> None:
    group = rows[0]["group_id"]
    moved = changed(
        rows,
        episode_score=lambda row: (
            None if row["episode_score"] is None else row["episode_score"] + shift * (row["group_id"] == group)
        ),
    )
    before, after = (advantages(version, config).select(*KEYS, "a_episode") for version in (rows, moved))
    assert_frame_equal(after, before, abs_tol=1e-9)


@law
@given(rows=step_rows(), config=configs(default_step_reward=None), factor=st.sampled_from([2.0, 16.0]))
def test_scaling_rewards_and_penalty_scales_or_keeps_advantages(rows: Rows, config: GiGPO, factor: float) -> None:
    def scale(name: str) -> Any:
        return lambda row: None if row[name] is None else factor * row[name]

    config = GiGPO(**{**config.model_dump(), "singleton": "zero"})
    scaled_config = GiGPO(**{**config.model_dump(), "invalid_action_penalty": factor * config.invalid_action_penalty})
    before = advantages(rows, config)
    after = advantages(changed(rows, reward=scale("reward"), episode_score=scale("episode_score")), scaled_config)
    for name, norm in (("a_episode", config.episode_norm), ("a_step", config.step_norm)):
        # The eps of 1e-6 next to the deviation is what keeps scale invariance from being exact.
        expected = before.select(pl.col(name) * (factor if norm == "mean_norm" else 1.0))
        assert_frame_equal(after.select(name), expected, abs_tol=1e-9, rel_tol=1e-4)


@law
@given(rows=step_rows(), config=configs(), data=st.data())
def test_row_order_does_not_change_a_bit(rows: Rows, config: GiGPO, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(rows))
    assert_frame_equal(advantages(shuffled, config), advantages(rows, config), check_exact=True)


@law
@given(rows=step_rows(max_groups=4), config=configs())
def test_other_groups_do_not_change_a_bit(rows: Rows, config: GiGPO) -> None:
    """So a job may be cut into ranges of groups, on as many machines as you like."""
    together = advantages(rows, config)
    groups = sorted({row["group_id"] for row in rows})
    apart = [advantages([row for row in rows if row["group_id"] == group], config) for group in groups]
    assert_frame_equal(pl.concat(apart), together, check_exact=True)


@law
@given(rows=step_rows(), config=configs())
def test_written_and_read_back_is_the_same(tmp_path_factory: pytest.TempPathFactory, rows: Rows, config: GiGPO) -> None:
    path: Path = tmp_path_factory.mktemp("advantages") / "a.parquet"
    actual = advantages(rows, config)
    actual.write_parquet(path)
    assert_frame_equal(pl.read_parquet(path), actual, check_exact=True)


@law
@given(rows=step_rows(), config=configs())
def test_dropping_inactive_rows_before_or_inside_is_the_same(rows: Rows, config: GiGPO) -> None:
    """Inactive rows are renumbered away outside; only `step_index` may tell the difference."""
    counts: dict[int, int] = defaultdict(int)
    active = []
    for row in sorted(rows, key=lambda row: row["step_index"]):
        if row["is_active"] is not False:
            active.append({**row, "step_index": counts[row["episode_id"]]})
            counts[row["episode_id"]] += 1
    assert_frame_equal(
        advantages(active, config).drop("step_index"), advantages(rows, config).drop("step_index"), check_exact=True
    )


# --- special cases


@law
@given(rows=step_rows(), config=configs())
def test_a_singleton_anchor_gives_exactly_zero(rows: Rows, config: GiGPO) -> None:
    unique = changed(rows, state_hash=lambda row: 1000 * row["episode_id"] + row["step_index"])
    unique_rows = advantages(unique, config).filter(pl.col("a_step").is_not_null())
    assert (unique_rows["a_step"] == 0.0).all()
    assert unique_rows.filter(~has(Flag.SINGLETON_ANCHOR)).is_empty()


@law
@given(rows=step_rows(), config=configs())
def test_tied_scores_give_exactly_zero(rows: Rows, config: GiGPO) -> None:
    tied = changed(rows, episode_score=lambda _: 9.9, is_action_valid=lambda _: True, status=lambda _: "completed")
    config = GiGPO(**{**config.model_dump(), "episode_source": "score", "singleton": "zero"})
    assert (advantages(tied, config)["a_episode"] == 0.0).all()


@law
@given(rows=step_rows(nulls=False, statuses=False, invalid=False), config=configs(gamma=1.0, step_norm="mean_norm"))
def test_gamma_one_and_one_anchor_per_step_index_is_per_step_centring(rows: Rows, config: GiGPO) -> None:
    config = GiGPO(**{**config.model_dump(), "step_source": "rewards", "invalid_action_penalty": 0.0})
    actual = advantages(changed(rows, state_hash=lambda row: row["step_index"]), config)
    by_step = defaultdict(list)
    rewards = {(row["episode_id"], row["step_index"]): row["reward"] for row in rows if row["is_active"] is not False}
    for row in actual.iter_rows(named=True):
        episode_id = row["episode_id"]
        rest = sum(
            reward for (episode, step), reward in rewards.items() if episode == episode_id and step >= row["step_index"]
        )
        by_step[row["group_id"], row["step_index"]].append((rest, row["a_step"]))
    for pairs in by_step.values():
        mean = statistics.fmean(rest for rest, _ in pairs)
        for rest, a_step in pairs:
            assert a_step == pytest.approx(rest - mean, abs=1e-9)


@law
@given(rows=step_rows(), norm=st.sampled_from(["mean_norm", "mean_std_norm"]))
def test_omega_zero_is_grpo(rows: Rows, norm: str) -> None:
    """One score per trajectory, centred (and scaled) over its siblings, the same for all its steps."""
    rows = changed(rows, is_action_valid=lambda _: True, status=lambda _: "completed")
    actual = advantages(rows, GiGPO(omega=0.0, episode_norm=norm))
    score = {row["episode_id"]: row["episode_score"] for row in rows}
    siblings = defaultdict(set)
    for row in actual.iter_rows(named=True):
        siblings[row["group_id"]].add(row["episode_id"])
    for row in actual.iter_rows(named=True):
        scores = [score[e] for e in siblings[row["group_id"]] if score[e] is not None]
        own_score = score[row["episode_id"]]
        if own_score is None:
            assert row["advantage"] is None
        elif len(set(scores)) < 2:
            assert row["advantage"] == 0.0
        else:
            scale = statistics.stdev(scores) + 1e-6 if norm == "mean_std_norm" else 1.0
            assert row["advantage"] == pytest.approx((own_score - statistics.fmean(scores)) / scale, abs=1e-9)


# --- NULL is unknown, never 0


@law
@given(rows=step_rows(), config=configs(step_source="rewards", default_step_reward=None))
def test_returns_are_unknown_exactly_up_to_the_last_null_reward(rows: Rows, config: GiGPO) -> None:
    last_null: dict[int, int] = defaultdict(lambda: -1)
    for row in rows:
        if row["reward"] is None and row["is_active"] is not False:
            last_null[row["episode_id"]] = max(last_null[row["episode_id"]], row["step_index"])
    for row in advantages(rows, config).iter_rows(named=True):
        assert (row["return_to_go"] is None) == (row["step_index"] <= last_null[row["episode_id"]])


@law
@given(rows=step_rows(), config=configs(episode_source="score"), other_score=SCORES)
def test_an_unscored_episode_has_no_advantage_and_is_no_sibling(rows: Rows, config: GiGPO, other_score: float) -> None:
    """No matter what an unscored trajectory would have scored: its siblings' episode advantages are what they are."""
    assume(any(row["episode_score"] is None for row in rows))
    actual = advantages(rows, config)
    scored = {row["episode_id"] for row in rows if row["episode_score"] is not None}
    unscored = actual.filter(~pl.col("episode_id").is_in(list(scored)))
    assert unscored["a_episode"].is_null().all()
    assert unscored.filter(~has(Flag.UNSCORED)).is_empty()
    without = advantages([row for row in rows if row["episode_id"] in scored], config) if scored else None
    if without is not None:
        scored_rows = actual.filter(pl.col("episode_id").is_in(list(scored)))
        columns = [*KEYS, "a_episode", "group_size"]
        assert_frame_equal(scored_rows.select(columns), without.select(columns), abs_tol=1e-12)
    # A score given later may only add a sibling.
    rescored = changed(rows, episode_score=lambda r: other_score if r["episode_score"] is None else r["episode_score"])
    assert advantages(rescored, config)["a_episode"].null_count() <= actual["a_episode"].null_count()


@law
@given(rows=step_rows(), config=configs(truncated="exclude"))
def test_excluded_episodes_are_as_if_absent(rows: Rows, config: GiGPO) -> None:
    actual = advantages(rows, config)
    excluded = actual.filter(has(Flag.EXCLUDED))
    for name in ("a_episode", "a_step", "advantage"):
        assert excluded[name].is_null().all()
    excluded_ids = set(excluded["episode_id"])
    rest = [row for row in rows if row["episode_id"] not in excluded_ids]
    if rest:
        included = actual.filter(~has(Flag.EXCLUDED))
        assert_frame_equal(included, advantages(rest, config), abs_tol=1e-12)


@law
@given(rows=step_rows(), config=configs())
def test_masking_hides_only_the_truncated_episodes_own_advantage(rows: Rows, config: GiGPO) -> None:
    options = config.model_dump()
    untruncated = advantages(rows, GiGPO(**{**options, "truncated": "keep"}))
    masked = advantages(rows, GiGPO(**{**options, "truncated": "mask"}))
    truncated = has(Flag.TRUNCATED)
    assert masked.filter(truncated)["advantage"].is_null().all()
    assert_frame_equal(masked.drop("advantage", "flags"), untruncated.drop("advantage", "flags"), check_exact=True)
    assert_frame_equal(masked.filter(~truncated), untruncated.filter(~truncated), check_exact=True)


@law
@given(rows=step_rows(), config=configs())
def test_every_active_step_gets_one_row_and_no_number_is_nan(rows: Rows, config: GiGPO) -> None:
    actual = advantages(rows, config)
    active = [(row["group_id"], *(row[k] for k in KEYS)) for row in rows if row["is_active"] is not False]
    assert actual.select("group_id", *KEYS).rows() == sorted(active)
    for name in ("return_to_go", "a_episode", "a_step", "advantage"):
        assert actual[name].is_finite().all()
    reasons = pl.any_horizontal(*(has(f) for f in (Flag.UNSCORED, Flag.EXCLUDED, Flag.MASKED, Flag.UNKNOWN_RETURN)))
    assert actual.filter(pl.col("advantage").is_null() & ~reasons).is_empty()


@law
@given(rows=step_rows(nulls=False, statuses=False), config=configs())
def test_with_everything_known_every_advantage_is_known(rows: Rows, config: GiGPO) -> None:
    assert advantages(rows, config)["advantage"].null_count() == 0
