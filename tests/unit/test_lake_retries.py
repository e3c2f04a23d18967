"""Pauses between tries."""

import pytest

from lake import retries
from lake.retries import compute_pause


def test_pauses_double_up_to_the_longest() -> None:
    pauses = [compute_pause(failures, first=0.5, longest=3.0) for failures in range(6)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_hours_of_failures_do_not_overflow() -> None:
    assert compute_pause(10_000, first=0.5, longest=30.0) == 30.0


def test_only_the_spread_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries.random, "random", lambda: 1.0)
    assert compute_pause(2, first=1.0, longest=9.0, jitter=0.5) == 1.0
    assert compute_pause(2, first=1.0, longest=9.0, jitter=1) == 0.0
