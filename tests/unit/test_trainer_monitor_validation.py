"""When a validated run stops, and which of its weights are the best."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.monitor import Measurement, find_best, should_stop

values = st.one_of(st.integers(0, 6).map(float), st.just(math.nan))
histories = st.lists(values, max_size=12).map(
    lambda values_drawn: [(10 * (i + 1), v) for i, v in enumerate(values_drawn)]
)


def stopped(history: list[Measurement], patience: int | None, least: float = 0.0) -> bool:
    return should_stop(history, patience, least)


@pytest.mark.parametrize(
    ("nll", "patience", "expected"),
    [
        ([3.0, 2.0, 1.0], 1, False),
        ([3.0, 3.0], 1, True),
        ([3.0, 3.5, 2.9], 2, False),
        ([3.0, 3.5, 3.1], 2, True),
        ([3.0, 3.5, 3.1], None, False),
        ([], 1, False),
        ([math.nan, math.nan], 2, True),
    ],
)
def test_patience(nll: list[float], patience: int | None, expected: bool) -> None:
    assert stopped([(i + 1, v) for i, v in enumerate(nll)], patience) is expected


def test_a_small_improvement_is_none() -> None:
    history = [(1, 3.0), (2, 2.95)]
    assert stopped(history, 1, least=0.1)
    assert not stopped(history, 1, least=0.01)
    assert find_best(history, 0.1) == (1, 3.0)


@given(histories, st.integers(1, 4))
def test_stopping_is_what_a_loop_would_do(history: list[Measurement], patience: int) -> None:
    lowest, bad = math.inf, 0
    for _, value in history:
        bad = 0 if value < lowest else bad + 1
        lowest = min(lowest, value) if not math.isnan(value) else lowest
    assert stopped(history, patience) is (bool(history) and bad >= patience)


@given(histories)
def test_the_best_is_the_first_of_the_lowest(history: list[Measurement]) -> None:
    real = [(value, step) for step, value in history if not math.isnan(value)]
    assert find_best(history) == ((min(real)[1], min(real)[0]) if real else None)
