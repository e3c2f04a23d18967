"""Laws of the off-policy estimators: what holds for any episodes, and what must come out where the truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from testkit.off_policy import HORIZON, a_process, slow, turns_of
from trainer.evaluation.estimators import DoublyRobust, FittedEvaluation, OpeEstimator, all_estimators
from trainer.evaluation.estimators.fitted import (
    FOLDS,
    assign_folds,
    compute_contributions,
    cross_fit_values,
    fit_values,
    list_visits,
)
from trainer.evaluation.estimators.importance import Turns

SLOW = ("behaviour", "pdis", "wis", "wpdis", "clipped")
EVERY = [estimator.name for estimator in all_estimators()]

rewards = st.floats(-2, 2, allow_nan=False)
log_ratios = st.floats(-1.5, 1.5, allow_nan=False)
episode = st.lists(st.tuples(log_ratios, rewards, st.integers(0, 3)), min_size=1, max_size=5)


@st.composite
def some_turns(draw: st.DrawFn) -> Turns:
    episodes = draw(st.lists(episode, min_size=1, max_size=8))
    tasks = draw(st.lists(st.integers(0, 2), min_size=len(episodes), max_size=len(episodes)))
    numbered = [sorted(set(tasks)).index(task) for task in tasks]
    return turns_of(episodes, numbered, draw(st.sampled_from([1.0, 0.9, 0.5])))


def named(name: str) -> OpeEstimator:
    return next(estimator for estimator in all_estimators() if estimator.name == name)


def once(turns: Turns) -> np.ndarray:
    return np.ones(turns.episodes)


def on_policy(turns: Turns) -> Turns:
    return Turns(
        np.zeros_like(turns.log_ratio_EH), turns.reward_EH, turns.length_E, turns.state_EH, turns.task_E, turns.gamma
    )


@settings(max_examples=examples(25))
@given(some_turns())
@pytest.mark.parametrize("name", EVERY)
def test_the_behaviour_policy_s_own_value_is_the_recorded_mean(name: str, turns: Turns) -> None:
    turns = on_policy(turns)
    estimator = named(name)
    assert estimator.value(turns)(once(turns)) == pytest.approx(slow("behaviour", turns), abs=1e-9)
    reliability = estimator.reliability(turns)
    assert reliability.mean == pytest.approx(1.0)
    assert reliability.ess == pytest.approx(reliability.n)
    assert reliability.n == (turns.length_E.sum() if name == "fqe" else turns.episodes)
    if name != "fqe":
        assert estimator.bias(turns) in ("none", "towards behaviour")


@settings(max_examples=examples(25))
@given(some_turns())
@pytest.mark.parametrize("name", SLOW)
def test_an_estimate_is_what_its_formula_says(name: str, turns: Turns) -> None:
    assert named(name).value(turns)(once(turns)) == pytest.approx(slow(name, turns), rel=1e-9, abs=1e-9)


@settings(max_examples=examples(25))
@given(some_turns(), st.data())
@pytest.mark.parametrize("name", [name for name in EVERY if name != "dr"])
def test_counting_an_episode_twice_is_having_it_twice(name: str, turns: Turns, data: st.DataObject) -> None:
    """dr is left out: its critic is fitted once, on the episodes that there are."""
    counts = np.array(data.draw(st.lists(st.integers(0, 3), min_size=turns.episodes, max_size=turns.episodes)))
    if not counts.sum():
        counts[0] = 1
    resample = np.repeat(np.arange(turns.episodes), counts)
    copies = Turns(
        turns.log_ratio_EH[resample],
        turns.reward_EH[resample],
        turns.length_E[resample],
        turns.state_EH[resample],
        turns.task_E[resample],
        turns.gamma,
    )
    estimator = named(name)
    weighted = estimator.value(turns)(counts.astype(float))
    assert weighted == pytest.approx(estimator.value(copies)(once(copies)), rel=1e-9, abs=1e-9)


@given(some_turns())
def test_doubly_robust_without_values_is_per_decision_importance_sampling(turns: Turns) -> None:
    nothing = np.zeros_like(turns.reward_EH)
    assert compute_contributions(turns, nothing, nothing).mean() == pytest.approx(slow("pdis", turns), abs=1e-9)


@given(some_turns())
def test_a_fit_without_pull_is_doubly_robust_where_no_state_recurs(turns: Turns) -> None:
    """Every turn its own state: with hardly any shrinkage the products of ratios come back."""
    alone = np.where(turns.state_EH < 0, -1, np.arange(turns.state_EH.size).reshape(turns.state_EH.shape))
    turns = Turns(turns.log_ratio_EH, turns.reward_EH, turns.length_E, alone, turns.task_E, turns.gamma)
    values, levels = fitted_by_hand(turns)
    assert FittedEvaluation(1e-12).value(turns)(once(turns)) == pytest.approx(values.mean(), rel=1e-6, abs=1e-6)
    assert compute_contributions(turns, levels, levels).mean() == pytest.approx(values.mean(), rel=1e-6, abs=1e-6)


def fitted_by_hand(turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """b + w (r + gamma V' - b) from the last turn to the first: V of the first turn, and the b of every turn."""
    value = [0.0] * turns.episodes
    levels = np.zeros_like(turns.reward_EH)
    for t in reversed(range(turns.horizon)):
        alive = [e for e in range(turns.episodes) if t < turns.length_E[e]]
        y = {e: turns.reward_EH[e, t] + turns.gamma * (value[e] if t + 1 < turns.length_E[e] else 0.0) for e in alive}
        w = {e: float(np.exp(turns.log_ratio_EH[e, t])) for e in alive}
        b = sum(w[e] * y[e] for e in alive) / sum(w.values())
        levels[:, t] = b
        for e in alive:
            value[e] = b + w[e] * (y[e] - b)
    return np.array(value), levels


@given(some_turns())
def test_fitted_values_add_up_to_their_targets(turns: Turns) -> None:
    """The unpenalised intercept: shrinkage moves value between states, and none in or out of a turn."""
    values = fit_values(turns, list_visits(turns), once(turns), 1.0)
    padded = np.concatenate([values, np.zeros((turns.episodes, 1))], axis=1)
    for t in range(turns.horizon):
        alive = turns.alive_EH[:, t]
        outcome, ratio = turns.reward_EH[alive, t] + turns.gamma * padded[alive, t + 1], turns.ratio_EH[alive, t]
        level = (ratio @ outcome) / ratio.sum()
        assert values[alive, t].sum() == pytest.approx((level + ratio * (outcome - level)).sum(), abs=1e-8)
        assert not values[~alive, t].any()


def test_fitted_values_are_what_least_squares_finds() -> None:
    """The closed form against the normal equations of ridge regression on indicators, intercept unpenalised."""
    rng = np.random.default_rng(1)
    states, rewards_E = rng.integers(0, 4, 30), rng.normal(size=30)
    ratios = rng.normal(size=30)
    turns = turns_of([[(w, r, s)] for w, r, s in zip(ratios, rewards_E, states, strict=True)], [0] * 30)
    design = np.concatenate([np.ones((30, 1)), np.eye(4)[states]], axis=1)
    penalty = np.diag([0.0, 1.7, 1.7, 1.7, 1.7])
    weights = np.exp(ratios)
    level = weights @ rewards_E / weights.sum()
    solution = np.linalg.solve(design.T @ design + penalty, design.T @ (level + weights * (rewards_E - level)))
    assert fit_values(turns, list_visits(turns), np.ones(30), 1.7)[:, 0] == pytest.approx(design @ solution)


@given(some_turns())
def test_the_critic_does_not_know_the_episode_it_is_used_for(turns: Turns) -> None:
    """Another outcome of one episode leaves the values that are used for it as they were."""
    before = cross_fit_values(turns, 1.0)
    changed = turns.reward_EH.copy()
    changed[0, 0] += 100.0
    other_turns = Turns(turns.log_ratio_EH, changed, turns.length_E, turns.state_EH, turns.task_E, turns.gamma)
    assert cross_fit_values(other_turns, 1.0)[0] == pytest.approx(before[0])


@given(st.lists(st.integers(0, 4), max_size=40))
def test_siblings_and_lone_episodes_are_spread_over_the_parts(tasks: list[int]) -> None:
    fold_E = assign_folds(np.array(tasks, np.int64))
    assert set(fold_E) <= set(range(FOLDS))
    for task in set(tasks):
        mine = [int(fold) for fold, other_task in zip(fold_E, tasks, strict=True) if other_task == task]
        assert len(set(mine)) == min(FOLDS, len(mine)), "siblings repeat a part only when all have had one"
    assert len(set(assign_folds(np.arange(FOLDS)).tolist())) == FOLDS


def test_tasks_of_one_episode_have_a_critic_too() -> None:
    """It knows the turn's mean of the other episodes, and takes variance away."""
    turns = turns_of([[(0.3 * (-1) ** n, 1.0 + n % 3, n)] for n in range(50)], list(range(50)))
    values = cross_fit_values(turns, 1.0)[:, 0]
    assert ((values > 1) & (values < 3)).all()
    plain = np.var(slow_contributions(turns))
    assert np.var(compute_contributions(turns, values[:, None], values[:, None])) < 0.8 * plain


def slow_contributions(turns: Turns) -> np.ndarray:
    return np.array([np.exp(turns.log_ratio_EH[e, 0]) * turns.reward_EH[e, 0] for e in range(turns.episodes)])


# ---------------------------------------------------------------- a process with a known truth

SAMPLES, SIZE = 30, 300


@pytest.fixture(scope="module")
def draws() -> list[Turns]:
    """Independent data sets of one process."""
    process = a_process()
    return [process.episodes(SIZE, seed)[0] for seed in range(SAMPLES)]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("behaviour", "clipped")])
def test_the_mean_over_many_data_sets_is_the_true_value(name: str, draws: list[Turns]) -> None:
    truth, _, _ = a_process().value(a_process().target_SA)
    values = np.array([named(name).value(turns)(once(turns)) for turns in draws])
    error = values.std(ddof=1) / np.sqrt(SAMPLES)
    # The self-normalised ones and the fit are biased by about 1/n, far below this.
    assert abs(values.mean() - truth) < 4 * error + 2e-3


def test_the_two_policies_of_the_process_differ_by_more_than_the_errors(draws: list[Turns]) -> None:
    """Else the test above could not fail."""
    process = a_process()
    difference = process.value(process.target_SA)[0] - process.value(process.behaviour_SA)[0]
    assert abs(difference) > 0.05
    values = np.array([named("pdis").value(turns)(once(turns)) for turns in draws])
    assert abs(difference) > 8 * values.std(ddof=1) / np.sqrt(SAMPLES)


def test_clipping_errs_in_the_direction_that_is_told(draws: list[Turns]) -> None:
    truth, _, _ = a_process().value(a_process().target_SA)
    clipped = next(e for e in all_estimators(clip=1.05) if e.name == "clipped")
    values = [clipped.value(turns)(once(turns)) for turns in draws]
    assert np.mean(values) < truth - 0.02
    assert {clipped.bias(turns) for turns in draws} == {"downward"}
    losses = [Turns(t.log_ratio_EH, -t.reward_EH, t.length_E, t.state_EH, t.task_E, t.gamma) for t in draws]
    assert {clipped.bias(turns) for turns in losses} == {"upward"}
    mixed = Turns(
        draws[0].log_ratio_EH,
        draws[0].reward_EH - 0.5 * draws[0].alive_EH,
        draws[0].length_E,
        draws[0].state_EH,
        draws[0].task_E,
    )
    assert clipped.bias(mixed) == "unknown"


def values_of(seed: int) -> tuple[Turns, np.ndarray, np.ndarray]:
    """Episodes with the true Q(s_t, a_t) and V(s_t) of the target policy."""
    process = a_process()
    turns, states, actions = process.episodes(SIZE, seed)
    _, q, v = process.value(process.target_SA)
    at = np.arange(HORIZON)
    return turns, q[at, states, actions], v[at, states]


def test_doubly_robust_with_wrong_values_and_right_ratios_is_unbiased() -> None:
    truth, _, _ = a_process().value(a_process().target_SA)
    values = []
    for seed in range(SAMPLES):
        turns, _, _ = values_of(seed)
        wrong = np.sin(7.0 * turns.state_EH) + 3.0
        values.append(compute_contributions(turns, wrong, wrong).mean())
    assert len(set(values)) == SAMPLES
    assert abs(np.mean(values) - truth) < 4 * np.std(values, ddof=1) / np.sqrt(SAMPLES)


def test_doubly_robust_with_right_values_and_wrong_ratios_is_unbiased() -> None:
    truth, _, _ = a_process().value(a_process().target_SA)
    values, plain = [], []
    for seed in range(SAMPLES):
        turns, q, v = values_of(seed)
        wrong = Turns(
            np.where(turns.alive_EH, 0.3 * turns.state_EH + 0.2, 0.0),
            turns.reward_EH,
            turns.length_E,
            turns.state_EH,
            turns.task_E,
            turns.gamma,
        )
        values.append(compute_contributions(wrong, q, v).mean())
        plain.append(named("pdis").value(wrong)(once(wrong)))
    assert abs(np.mean(values) - truth) < 4 * np.std(values, ddof=1) / np.sqrt(SAMPLES)
    assert abs(np.mean(plain) - truth) > 0.05


def test_the_critic_takes_variance_away(draws: list[Turns]) -> None:
    plain = [named("pdis").value(turns)(once(turns)) for turns in draws]
    robust = [DoublyRobust().value(turns)(once(turns)) for turns in draws]
    fitted = [FittedEvaluation().value(turns)(once(turns)) for turns in draws]
    assert np.var(robust) < 0.8 * np.var(plain)
    assert np.var(fitted) < 0.8 * np.var(plain)
