"""What an off-policy evaluation must not tell, one refusal each, and what it must."""

import math

import numpy as np
import pytest

from testkit.off_policy import a_process, good_actions, hidden_action, history_matters, rare_action, turns_of
from testkit.wording import Wording
from trainer.evaluation.estimators import FittedEvaluation, OpeEstimator, all_estimators
from trainer.evaluation.estimators.importance import Turns, find_weight_objection, measure_reliability

WEIGHED = ("pdis", "wis", "wpdis", "clipped", "dr", "fqe")


def named(name: str) -> OpeEstimator:
    return next(estimator for estimator in all_estimators() if estimator.name == name)


@pytest.mark.parametrize("name", WEIGHED)
def test_an_action_that_never_occurred_is_missed(name: str) -> None:
    """Behaviour 0.001, target 0.5, not once in 300 episodes: even weights and interval (0, 0) at a truth of 0.5."""
    turns = turns_of([[(math.log(0.5 / 0.999), 0.0, 0)] for _ in range(300)], [n % 30 for n in range(300)])
    estimate = named(name).estimate(turns)
    assert (estimate.value, estimate.low, estimate.high) == (None, None, None)
    assert "mean weight 0.5" in (estimate.refused or "")


def test_weights_that_add_up_to_too_little_are_refused_whatever_their_spread(wording: Wording) -> None:
    turns, truth = rare_action(3, episodes=300, behaved=1e-9, target_rate=0.1, other_reward=0.3)
    assert truth == pytest.approx(0.37)
    refused = wording(named("pdis").estimate(turns).refused)
    assert refused.startswith("mean weight 0.901 +- 0.013 of turn 0, ")
    assert "do not show" in refused


def test_each_turn_is_looked_at() -> None:
    """A tenth of the target is missing at turn 1 alone."""
    rng = np.random.default_rng(0)
    log_ratio_EH = rng.normal(-0.02, 0.2, (400, 12))
    log_ratio_EH[:, 1] = math.log(0.9) + rng.normal(-0.005, 0.1, 400)
    turns = Turns(log_ratio_EH, 0 * log_ratio_EH, np.full(400, 12), np.zeros((400, 12), np.int64), np.arange(400) % 40)
    assert "of turn 1, 1 is expected" in (find_weight_objection(turns) or "")
    fair = Turns(
        np.delete(log_ratio_EH, 1, axis=1),
        turns.reward_EH[:, 1:],
        turns.length_E - 1,
        turns.state_EH[:, 1:],
        turns.task_E,
    )
    assert find_weight_objection(fair) is None


def test_weights_that_add_up_to_too_much_are_of_other_log_probabilities() -> None:
    ratios = np.random.default_rng(0).normal(0.2, 0.2, 300)
    turns = turns_of([[(float(ratio), 1.0, 0)] for ratio in ratios], [n % 30 for n in range(300)])
    assert "not the log-probabilities" in (find_weight_objection(turns) or "")


def test_fifty_effective_episodes_and_a_twentieth_of_all_are_needed() -> None:
    assert measure_reliability(np.ones(50)).refusal is None
    assert "45.0 of 45, needed are 50" in str(measure_reliability(np.ones(45)).refusal)
    few_of_many = np.concatenate([np.ones(90), np.full(1_910, 1e-9)])
    assert "90.0 of 2000, needed are 100" in str(measure_reliability(few_of_many).refusal)


def test_arithmetic_of_engines_is_no_lack_of_support() -> None:
    """Ratios of 1.0002, all alike: an engine in another precision."""
    turns = turns_of([[(2e-4, 1.0, 0)] for _ in range(300)], [n % 30 for n in range(300)])
    assert find_weight_objection(turns) is None


@pytest.mark.parametrize("name", WEIGHED)
def test_outcomes_that_do_not_differ_tell_no_error(name: str, wording: Wording) -> None:
    """No one ever succeeded: a bootstrap says (0, 0), as if that were certain."""
    turns = turns_of([[(0.0, 0.0, 0)] for _ in range(300)], [n % 30 for n in range(300)])
    estimate = named(name).estimate(turns)
    assert estimate.value is None
    assert wording(estimate.refused).startswith("every task gives ")


def test_one_task_has_a_value_and_no_interval() -> None:
    turns = turns_of([[(0.0, float(n % 2), 0)] for n in range(100)], [0] * 100)
    assert named("pdis").estimate(turns) == (0.5, None, None, None)


def test_states_that_do_not_tell_what_follows_have_no_fitted_value(wording: Wording) -> None:
    turns, truth = history_matters(1, episodes=500, turns=2, strength=1.0)
    estimate = named("fqe").estimate(turns)
    assert estimate.value is None
    assert "more than the state" in wording(estimate.refused)
    robust = named("dr").estimate(turns)
    assert robust.low is not None
    assert robust.high is not None
    assert robust.low < truth < robust.high, "dr needs no states, and says what is right"


def test_fair_markov_data_have_a_fitted_value() -> None:
    """A ridge of 1 refuses nearly all of them, and the refusal names the ridge."""
    pulled = reported = covered = named_ridge = 0
    for seed in range(8):
        turns, truth = good_actions(seed)
        if named("dr").reliability(turns).refusal:
            continue
        estimate, strong = named("fqe").estimate(turns), FittedEvaluation(1.0).estimate(turns)
        pulled += strong.value is None
        named_ridge += "--ridge 0.01" in (strong.refused or "")
        if estimate.low is not None and estimate.high is not None:
            reported += 1
            covered += estimate.low <= truth <= estimate.high
    assert pulled >= 6
    assert named_ridge >= 5
    assert reported >= 6
    assert covered >= reported - 1


def test_a_fitted_value_that_cannot_be_checked_is_not_told() -> None:
    """Single turns are even enough, products are not."""
    ratios = np.random.default_rng(0).normal(-0.32, 0.8, (300, 12))
    episodes = [[(float(ratio), float(n % 2) / 12, 0) for ratio in row] for n, row in enumerate(ratios)]
    estimate = named("fqe").estimate(turns_of(episodes, [n % 30 for n in range(300)]))
    assert "checked with dr" in (estimate.refused or "")


def test_what_clipping_may_have_taken_is_in_the_interval() -> None:
    """A quarter of the weight of the rewarded action is clipped away."""
    good = np.arange(400) % 4 == 0
    turns = turns_of([[(math.log(2.4 if g else 1.6 / 3), float(g), 0)] for g in good], [n // 10 for n in range(400)])
    estimate = next(e for e in all_estimators(clip=1.8) if e.name == "clipped").estimate(turns)
    assert estimate.value == pytest.approx(0.45)
    assert estimate.high is not None
    assert estimate.high > 0.6, "the truth"


@pytest.mark.parametrize("name", WEIGHED)
def test_an_interval_has_room_for_mass_that_noise_hides(name: str) -> None:
    """A mass of .05 that is hardly ever seen passes the check of the mean weight in a third of the data sets."""
    reported = covered = 0
    for seed in range(60):
        turns, truth = hidden_action(seed)
        estimate = named(name).estimate(turns)
        if estimate.low is not None and estimate.high is not None:
            reported += 1
            covered += estimate.low <= truth <= estimate.high
    assert reported >= 10
    assert covered >= 0.75 * reported


@pytest.mark.parametrize("name", WEIGHED)
def test_a_large_mass_is_refused_however_noisy_the_others(name: str) -> None:
    for seed in range(20):
        assert named(name).estimate(hidden_action(seed, behaved=0.0005, target_rate=0.5)[0]).value is None


def test_missing_mass_counts_from_the_turn_at_which_it_is_lost() -> None:
    """A fifth of the weight is lost at the second turn: what the first turn gave is known, what follows is 0 or 2."""
    turns = turns_of([[(0.0, 1.0, 0), (math.log(0.8), 2.0 * (n % 2), 0)] for n in range(100)], list(range(100)))
    least, most = named("pdis").bounds(turns)
    assert (least.value, most.value) == (pytest.approx(1.8), pytest.approx(1.8 + 0.2 * 2.0))
    assert named("behaviour").bounds(turns) == []


@pytest.mark.parametrize("name", WEIGHED)
def test_a_fair_data_set_is_told(name: str) -> None:
    process = a_process(distance=0.25)
    truth, _, _ = process.value(process.target_SA)
    estimate = named(name).estimate(process.episodes(300, 1)[0])
    assert estimate.refused is None
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low < truth < estimate.high
