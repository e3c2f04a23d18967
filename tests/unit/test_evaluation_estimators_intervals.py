"""Intervals and the rules by which an off-policy estimate is reported or refused."""

import math

import numpy as np
import pytest

from lake.statistics import (
    LEVEL_Z,
    MAX_BLOCKS,
    share_interval,
    spread_by_task,
    spread_of_mean,
    spread_of_share,
    success_interval,
    t_quantile,
    wilson_interval,
)
from testkit.off_policy import turns_of
from trainer.evaluation.estimators import ClippedImportance, FittedEvaluation
from trainer.evaluation.estimators.fitted import compute_shared_share
from trainer.evaluation.estimators.importance import LEAST_ESS, MOST_WEIGHT, build_mean, measure_reliability


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_what_is_published(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(1 - successes / trials, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_solves_its_equation() -> None:
    for successes, trials in ((1, 7), (3, 20), (99, 100)):
        for end in wilson_interval(successes / trials, trials):
            distance = abs(successes / trials - end)
            assert distance == pytest.approx(LEVEL_Z * math.sqrt(end * (1 - end) / trials))


@pytest.mark.parametrize(
    ("df", "tail", "quantile"),
    # Abramowitz, Stegun 1964, table 26.10.
    [
        (1, 0.025, 12.706),
        (2, 0.025, 4.303),
        (5, 0.025, 2.571),
        (9, 0.05, 1.833),
        (30, 0.005, 2.750),
        (120, 0.025, 1.980),
    ],
)
def test_student_s_quantiles_are_what_is_published(df: float, tail: float, quantile: float) -> None:
    assert t_quantile(df, tail) == pytest.approx(quantile, abs=6e-4)


def test_student_s_quantiles_become_normal_and_never_grow() -> None:
    assert t_quantile(1e9) == pytest.approx(LEVEL_Z, rel=1e-3)
    quantiles = [t_quantile(df) for df in (1, 1.5, 2, 4.4, 50, 99, 101, 1000, 1e6)]
    assert quantiles == sorted(quantiles, reverse=True)


def test_an_interval_of_a_mean_is_student_s() -> None:
    """Ten values without outliers: nine degrees of freedom."""
    value_P = np.array([1.0, -1.5, 0.5, 2.0, -1.0, 1.5, 0.0, -2.0, 1.0, -0.5])
    interval = spread_of_mean(value_P)
    assert interval is not None
    half = 2.262157 * value_P.std(ddof=1) / math.sqrt(10)
    assert interval.interval() == pytest.approx((value_P.mean() - half, value_P.mean() + half), rel=1e-5)


def test_few_values_that_differ_leave_few_degrees_of_freedom() -> None:
    """Three of 300 are all that is known of the error."""
    interval = spread_of_mean(np.repeat([0.0, 20.0], [297, 3]))
    assert interval is not None
    assert 5 < interval.df < 7


def test_the_sample_is_that_of_tasks_and_not_of_episodes() -> None:
    """Two tasks, one all right and one all wrong: the same as two episodes, no matter what their siblings say."""
    outcome_E = np.repeat([0.0, 1.0], 50)
    interval = spread_by_task(build_mean(outcome_E), np.repeat([0, 1], 50))
    assert interval == pytest.approx(spread_of_mean(np.array([0.0, 1.0])))


def test_leaving_out_tasks_of_a_mean_is_the_spread_of_the_mean() -> None:
    value_P = np.random.default_rng(0).normal(size=MAX_BLOCKS)
    assert spread_by_task(build_mean(value_P), np.arange(MAX_BLOCKS)) == pytest.approx(spread_of_mean(value_P))
    many_P = np.random.default_rng(0).normal(size=20 * MAX_BLOCKS)
    blocks, each = spread_by_task(build_mean(many_P), np.arange(20 * MAX_BLOCKS)), spread_of_mean(many_P)
    assert blocks is not None
    assert each is not None
    assert blocks.error == pytest.approx(each.error, rel=0.2)


@pytest.mark.parametrize("tasks", [2, 30, 2 * MAX_BLOCKS + 100])
def test_a_share_of_equal_trials_is_the_mean_of_the_tasks(tasks: int) -> None:
    """However many tasks: parts of several tasks would give another error."""
    wins_P = np.random.default_rng(0).binomial(4, 0.4, tasks).astype(np.float64)
    assert spread_of_share(wins_P, np.full(tasks, 4.0)) == pytest.approx(spread_of_mean(wins_P / 4))


def test_a_share_of_unequal_trials_is_the_jackknife_over_tasks() -> None:
    rng = np.random.default_rng(1)
    trials_P = rng.integers(1, 9, 60).astype(np.float64)
    wins_P = rng.binomial(trials_P.astype(np.int64), 0.4).astype(np.float64)
    slow = spread_by_task(lambda counts_P: float(counts_P @ wins_P / (counts_P @ trials_P)), np.arange(60))
    assert spread_of_share(wins_P, trials_P) == pytest.approx(slow)
    assert spread_of_share(wins_P[:1], trials_P[:1]) is None


def test_one_task_has_the_interval_of_its_attempts() -> None:
    assert success_interval(np.array([8.0]), np.array([10.0])) == pytest.approx((0.4902, 0.9433), abs=5e-5)


def test_one_task_and_estimates_that_rest_on_one_have_no_spread() -> None:
    assert spread_by_task(lambda _: 1.0, np.zeros(5, np.int64)) is None
    assert spread_by_task(lambda counts_E: 1.0 if counts_E[0] else math.nan, np.arange(5)) is None
    assert spread_of_mean(np.ones(1)) is None


def test_values_that_do_not_differ_have_no_interval() -> None:
    interval = spread_of_mean(np.full(30, 0.1))
    assert interval is not None
    assert (interval.error, interval.interval()) == (0, None)


def test_shares_of_tasks_keep_inside_0_and_1() -> None:
    none, all_succeed = (spread_of_mean(np.full(10, share)) for share in (0.0, 1.0))
    assert none is not None
    assert all_succeed is not None
    low, high = share_interval(none, 10, 40)
    assert low == 0
    assert 0.2 < high < 0.4, "ten tasks without a success: not the (0, 0) of a bootstrap"
    assert share_interval(all_succeed, 10, 40) == pytest.approx((1 - high, 1.0))
    two = spread_of_mean(np.array([0.4, 0.6]))
    assert two is not None
    low, high = share_interval(two, 2, 10)
    assert low < 0.1
    assert high > 0.9


# ---------------------------------------------------------------- what weights say


def test_equal_weights_are_all_effective() -> None:
    reliability = measure_reliability(np.full(80, 3.7))
    assert (reliability.n, reliability.ess, reliability.max_share) == (80, pytest.approx(80), pytest.approx(1 / 80))
    assert reliability.refusal is None


@pytest.mark.parametrize("scale", [1.0, math.exp(300), math.exp(-300)])
def test_the_scale_of_weights_does_not_matter(scale: float) -> None:
    reliability = measure_reliability(scale * np.array([1.0, 2.0, 3.0]))
    assert reliability.ess == pytest.approx(36 / 14)
    assert reliability.max_share == pytest.approx(0.5)


def test_what_is_refused_and_why() -> None:
    few = measure_reliability(np.ones(49))
    assert few.refusal == f"effective sample size 49.0 of 49, needed are {LEAST_ESS:.0f}"
    # 5 % of many is more than 50.
    many = measure_reliability(np.concatenate([np.ones(60), np.zeros(2000)]))
    assert many.refusal == "effective sample size 60.0 of 2060, needed are 103"
    heavy = measure_reliability(np.concatenate([[0.21 * 790 / 0.79], np.ones(790)]))
    assert heavy.max_share == pytest.approx(0.21)
    assert heavy.refusal == "effective sample size 22.3 of 791, needed are 50; one weight is 21% of their sum"
    assert measure_reliability(np.zeros(100)).refusal == "effective sample size 0.0 of 100, needed are 50"
    assert measure_reliability(np.zeros(0)).ess == 0


def test_a_weight_above_a_fifth_is_always_refused() -> None:
    """The second rule follows from the first: (sum w)^2 / sum w^2 <= 1 / share^2, at most 25 from a fifth on."""
    for share in (0.2001, 0.3, 0.9):
        rest = np.full(1_000_000, (1 - share) / 1_000_000)
        reliability = measure_reliability(np.concatenate([[share], rest]))
        assert reliability.ess <= 1 / MOST_WEIGHT**2
        assert reliability.refusal is not None


def test_an_estimator_may_object_to_even_weights() -> None:
    assert measure_reliability(np.ones(100), objection="too much was clipped").refusal == "too much was clipped"
    few = measure_reliability(np.ones(10), objection="too much was clipped").refusal
    assert few == "effective sample size 10.0 of 10, needed are 50"


def test_clipped_weights_that_lost_too_much_are_refused() -> None:
    """Half of the episodes are twice as likely under the target, half hardly: the mean is 1.025, and 0.625 clipped."""
    ratios = [math.log(2.0), math.log(0.05)] * 50
    turns = turns_of([[(ratio, 1.0, 0)] for ratio in ratios], [0] * 100)
    assert ClippedImportance(2.0).reliability(turns).refusal is None
    refused = ClippedImportance(1.2).reliability(turns)
    assert refused.mean == pytest.approx(0.625)
    assert refused.refusal == "mean weight 0.625, needed are 0.8: too much was clipped"


def test_values_are_not_fitted_to_states_that_do_not_recur() -> None:
    alone = turns_of([[(0.0, 1.0, n), (0.0, 0.0, n if n % 2 else -n)] for n in range(100)], [0] * 100)
    assert compute_shared_share(alone) == 0
    refused = FittedEvaluation().reliability(alone).refusal
    assert refused is not None
    assert refused.startswith("0% of turns ")
    assert refused.endswith("needed are 50%")
    # The same state at another turn is another cell; half of the turns in one start state are enough.
    half = turns_of([[(0.0, 1.0, 7), (0.0, 0.0, n)] for n in range(100)], [0] * 100)
    assert compute_shared_share(half) == 0.5
    assert FittedEvaluation().reliability(half).refusal is None


def test_the_mean_of_huge_weights_is_finite() -> None:
    assert measure_reliability(np.full(100, math.exp(300))).mean == pytest.approx(math.exp(300))
