"""How often a law is tried: on how many examples, and on which values outside `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(usual: int) -> int:
    """So many per 100 of the profile's: two fifths of `usual` by default, ten times as many with `explore`."""
    return max(1, usual * settings().max_examples // 100)


def mostly_slow(values: Iterable[Any], *usual: Any) -> list[Any]:
    """Values as parameters; those that are not `usual` are for `make test-slow` alone."""
    all_values = list(values)
    assert all(value in all_values for value in usual), usual
    return [value if value in usual else pytest.param(value, marks=pytest.mark.slow) for value in all_values]


def mostly_slow_cases(cases: Iterable[tuple[Any, ...]], *usual: tuple[Any, ...]) -> list[Any]:
    """The same for several parameters at a time: each case is a tuple of their values."""
    all_cases = list(cases)
    assert all(case in all_cases for case in usual), usual
    return [case if case in usual else pytest.param(*case, marks=pytest.mark.slow) for case in all_cases]
