"""How often told intervals hold the truth, where it is known. Slow: thousands of data sets.

Two promises: an interval that is reported holds the truth at least 9 times of 10, also where estimates usually go
wrong, and fair data are reported. `-s` prints what was measured.
"""

from collections.abc import Callable

import numpy as np
import pytest

from lake.statistics import share_interval, spread_of_mean
from testkit.off_policy import a_process, hidden_action, history_matters, rare_action, tasks_that_differ
from trainer.evaluation.estimators import all_estimators
from trainer.evaluation.estimators.importance import Turns

pytestmark = pytest.mark.slow

World = Callable[[int], tuple[Turns, float]]
PRODUCTS = ("pdis", "wis", "wpdis", "dr")


def measured(world: World, names: tuple[str, ...], samples: int) -> dict[str, tuple[float, float]]:
    """Per estimator: the share of data sets that it tells, and of those the share whose interval holds the truth."""
    reported, covered = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for seed in range(samples):
        turns, truth = world(seed)
        for estimator in all_estimators():
            if estimator.name not in names:
                continue
            estimate = estimator.estimate(turns)
            if estimate.low is not None and estimate.high is not None:
                reported[estimator.name] += 1
                covered[estimator.name] += estimate.low <= truth <= estimate.high
    figures = {name: (reported[name] / samples, covered[name] / max(1, reported[name])) for name in names}
    print(
        {
            name: f"told {reported_share:.2f}, held {covered_share:.2f}"
            for name, (reported_share, covered_share) in figures.items()
        }
    )
    return figures


def error_of(share: float, count: float) -> float:
    """Three standard errors of a measured share."""
    return 3 * float(np.sqrt(share * (1 - share) / max(1.0, count)))


@pytest.mark.parametrize("episodes", [300, 1000])
@pytest.mark.parametrize("behaved", [0.001, 0.01])
@pytest.mark.parametrize("target_rate", [0.03, 0.1, 0.5])
@pytest.mark.parametrize("other_reward", [0.0, 0.3])
def test_rare_actions(episodes: int, behaved: float, target_rate: float, other_reward: float) -> None:
    samples = 300

    def world(seed: int) -> tuple[Turns, float]:
        return rare_action(seed, episodes=episodes, behaved=behaved, target_rate=target_rate, other_reward=other_reward)

    for name, (reported, covered) in measured(world, ("pdis", "wis", "wpdis", "clipped", "dr"), samples).items():
        assert reported == 0 or covered > 0.9 - error_of(0.9, reported * samples), (name, reported, covered)


WITH_ROOM = (*PRODUCTS, "clipped", "fqe")


@pytest.mark.parametrize(
    "case", [{}, {"noise": 0.5}, {"target_rate": 0.03}, {"base": 0.2}, {"target_rate": 0.5}], ids=str
)
def test_mass_that_noise_hides(case: dict[str, float]) -> None:
    """An action of probability .0005 alone succeeds, and the noise of the other ratios hides that it is missing."""
    samples = 400
    for name, (reported, covered) in measured(lambda seed: hidden_action(seed, **case), WITH_ROOM, samples).items():
        assert (
            covered > 0.95 - error_of(0.95, reported * samples) if reported > 0.0 else case == {"target_rate": 0.5}
        ), name


@pytest.mark.parametrize(
    ("turns", "strength"), [(2, 1.0), (2, 0.5), (2, 0.25), (2, 0.1), (4, 1.0), (4, 0.25), (4, 0.1)]
)
def test_rewards_that_depend_on_what_was_done_before(turns: int, strength: float) -> None:
    samples = 150

    def world(seed: int) -> tuple[Turns, float]:
        return history_matters(seed, episodes=500, turns=turns, strength=strength)

    for name, (reported, covered) in measured(world, ("dr", "fqe"), samples).items():
        assert reported == 0 or covered > 0.9 - error_of(0.9, reported * samples), (name, reported, covered)
        if name == "fqe" and strength == 1.0:
            assert reported < 0.02


@pytest.mark.parametrize("tasks", [2, 5, 10, 20])
def test_few_tasks(tasks: int) -> None:
    samples = 300
    shares = measured(lambda seed: tasks_that_differ(seed, tasks=tasks, siblings=200 // tasks), PRODUCTS, samples)
    for name, (reported, covered) in shares.items():
        assert reported > 0.85, (name, reported)
        assert covered > 0.93 - error_of(0.93, reported * samples), (name, covered)


@pytest.mark.parametrize(("seed", "distance"), [(9, 0.5), (9, 0.25), (3, 0.5), (5, 0.3)])
def test_fair_data(seed: int, distance: float) -> None:
    """Told at least 9 times of 10, and held as often as promised: intervals have room for mass that is not seen."""
    samples = 150
    process = a_process(seed, distance=distance)
    truth, _, _ = process.value(process.target_SA)
    shares = measured(lambda sample: (process.episodes(300, sample, tasks=30)[0], truth), (*PRODUCTS, "fqe"), samples)
    for name, (reported, covered) in shares.items():
        assert reported > (0.85 if name == "fqe" else 0.9) - error_of(0.9, samples), (name, reported)
        assert 0.93 - error_of(0.93, samples) < covered, (name, covered)


@pytest.mark.parametrize("tasks", [2, 5, 10, 20, 50])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, 0.7), (0.1, 0.9)])
def test_successes_of_tasks(tasks: int, alpha: float, beta: float) -> None:
    """Four attempts at each task, whose rates of success differ: `eval`'s success and pass@1."""
    rng = np.random.default_rng(0)
    samples, covered = 500, 0
    for _ in range(samples):
        share_P = rng.binomial(4, rng.beta(alpha, beta, tasks)) / 4
        spread = spread_of_mean(share_P)
        assert spread is not None
        low, high = share_interval(spread, tasks, 4 * tasks)
        covered += low <= alpha / (alpha + beta) <= high
    assert covered / samples > 0.93
