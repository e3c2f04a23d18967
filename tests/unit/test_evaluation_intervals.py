"""Intervals and the rules by which an off-policy estimate is told or refused."""

import math

import numpy as np
import pytest

from testkit.off_policy import turns_of
from trainer.evaluation.estimators import Clipped, Fitted
from trainer.evaluation.estimators.fitted import shared_states
from trainer.evaluation.intervals import LEVEL_Z, bootstrap_by_task, wilson
from trainer.evaluation.reliability import LEAST_ESS, MOST_WEIGHT, reliability


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_what_is_published(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_solves_its_equation() -> None:
    for successes, trials in ((1, 7), (3, 20), (99, 100)):
        for end in wilson(successes, trials):
            distance = abs(successes / trials - end)
            assert distance == pytest.approx(LEVEL_Z * math.sqrt(end * (1 - end) / trials))


def test_the_bootstrap_draws_tasks_and_not_episodes() -> None:
    """Two tasks, one all right and one all wrong: a draw has 0, half or all, and nothing between."""
    task_E = np.repeat([0, 1], 50)
    outcome_E = np.repeat([0.0, 1.0], 50)
    seen = set()

    def value(counts_E: np.ndarray) -> float:
        share = float(counts_E @ outcome_E / counts_E.sum())
        seen.add(share)
        return share

    assert bootstrap_by_task(value, task_E, resamples=200, seed=0) == (0.0, 1.0)
    assert seen == {0.0, 0.5, 1.0}


def test_the_bootstrap_is_repeatable_and_about_as_wide_as_theory_says() -> None:
    rng = np.random.default_rng(0)
    outcome_P = rng.normal(size=200)

    def value(counts_E: np.ndarray) -> float:
        return float(counts_E @ outcome_P / counts_E.sum())

    found = bootstrap_by_task(value, np.arange(200), resamples=2000, seed=3)
    assert found == bootstrap_by_task(value, np.arange(200), resamples=2000, seed=3)
    assert found is not None
    half = LEVEL_Z * outcome_P.std() / math.sqrt(200)
    assert found == pytest.approx((outcome_P.mean() - half, outcome_P.mean() + half), abs=0.15 * half)


def test_one_task_has_no_interval_and_lost_draws_are_left_out() -> None:
    assert bootstrap_by_task(lambda _: 1.0, np.zeros(5, np.int64), resamples=10, seed=0) is None
    assert bootstrap_by_task(lambda _: math.nan, np.arange(5), resamples=10, seed=0) is None
    only_first = bootstrap_by_task(lambda c: 1.0 if c[0] else math.nan, np.arange(2), resamples=50, seed=0)
    assert only_first == (1.0, 1.0)


def test_equal_weights_are_all_effective() -> None:
    found = reliability(np.full(80, 3.7))
    assert (found.n, found.ess, found.max_share) == (80, pytest.approx(80), pytest.approx(1 / 80))
    assert found.refusal is None


@pytest.mark.parametrize("scale", [1.0, math.exp(300), math.exp(-300)])
def test_the_scale_of_weights_does_not_matter(scale: float) -> None:
    found = reliability(scale * np.array([1.0, 2.0, 3.0]))
    assert found.ess == pytest.approx(36 / 14)
    assert found.max_share == pytest.approx(0.5)


def test_what_is_refused_and_why() -> None:
    few = reliability(np.ones(49))
    assert few.refusal == f"effective sample size 49.0 of 49, needed are {LEAST_ESS:.0f}"
    # 5 % of many is more than 50.
    many = reliability(np.concatenate([np.ones(60), np.zeros(2000)]))
    assert many.refusal == "effective sample size 60.0 of 2060, needed are 103"
    heavy = reliability(np.concatenate([[0.21 * 790 / 0.79], np.ones(790)]))
    assert heavy.max_share == pytest.approx(0.21)
    assert heavy.refusal == "effective sample size 22.3 of 791, needed are 50; one weight is 21% of their sum"
    assert reliability(np.zeros(100)).refusal == "effective sample size 0.0 of 100, needed are 50"
    assert reliability(np.zeros(0)).ess == 0


def test_a_weight_above_a_fifth_is_always_refused() -> None:
    """The second rule follows from the first: (sum w)^2 / sum w^2 <= 1 / share^2, at most 25 from a fifth on."""
    for share in (0.2001, 0.3, 0.9):
        rest = np.full(1_000_000, (1 - share) / 1_000_000)
        found = reliability(np.concatenate([[share], rest]))
        assert found.ess <= 1 / MOST_WEIGHT**2
        assert found.refusal is not None


def test_an_estimator_may_object_to_even_weights() -> None:
    assert reliability(np.ones(100), objection="too much was clipped").refusal == "too much was clipped"
    few = reliability(np.ones(10), objection="too much was clipped").refusal
    assert few == "effective sample size 10.0 of 10, needed are 50"


def test_clipped_weights_that_lost_too_much_are_refused() -> None:
    """Half of the episodes are three times as likely under the target, half hardly: clipped at 2 the mean is 1.05."""
    ratios = [math.log(3.0), math.log(0.1)] * 50
    turns = turns_of([[(ratio, 1.0, 0)] for ratio in ratios], [0] * 100)
    assert Clipped(2.0).reliability(turns).refusal is None
    refused = Clipped(1.2).reliability(turns)
    assert refused.mean == pytest.approx(0.65)
    assert refused.refusal == "mean weight 0.650, needed are 0.8: too much was clipped"


def test_values_are_not_fitted_to_states_that_do_not_recur() -> None:
    alone = turns_of([[(0.0, 1.0, n), (0.0, 0.0, n if n % 2 else -n)] for n in range(100)], [0] * 100)
    assert shared_states(alone) == 0
    refused = Fitted().reliability(alone).refusal
    assert refused == "0% of turns in states that recur, needed are 50%"
    # The same state at another turn is another cell; half of the turns in one start state are enough.
    half = turns_of([[(0.0, 1.0, 7), (0.0, 0.0, n)] for n in range(100)], [0] * 100)
    assert shared_states(half) == 0.5
    assert Fitted().reliability(half).refusal is None


def test_the_mean_of_huge_weights_is_finite() -> None:
    assert reliability(np.full(100, math.exp(300))).mean == pytest.approx(math.exp(300))
