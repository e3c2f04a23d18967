"""Centring and scaling inside a group: ties, lone members, rows that do not take part."""

import math
import statistics

import numpy as np
import pytest

from pipelines.credit.estimators.normalise import EPSILON, Moments, Norm, Singleton
from pipelines.credit.steps import Segments

ONE_GROUP_OF = {n: Segments.opening_at(np.arange(n) == 0) for n in range(1, 8)}


def normalise(values: list[float], norm: Norm, singleton: Singleton = "zero", members: list[bool] | None = None):
    group = ONE_GROUP_OF[len(values)]
    values_N = np.array(values)
    member_N = np.array(members if members is not None else [True] * len(values))
    return Moments.of(values_N, member_N, group).normalise(values_N, member_N, group, norm, singleton).tolist()


def test_mean_norm_centres() -> None:
    assert normalise([10.0, 0.0, 2.0], "mean_norm") == [6.0, -4.0, -2.0]


def test_mean_std_norm_divides_by_the_sample_deviation() -> None:
    values = [10.0, 0.0, 2.0]
    scale = statistics.stdev(values) + EPSILON
    assert normalise(values, "mean_std_norm") == pytest.approx([6 / scale, -4 / scale, -2 / scale], rel=1e-15)


@pytest.mark.parametrize("gap", [1e-3, 1.0, 1e6])
def test_two_members_are_always_0_7071_apart_from_their_mean(gap: float) -> None:
    assert normalise([0.0, gap], "mean_std_norm") == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)


@pytest.mark.parametrize("norm", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("values", [[9.9] * 7, [0.1 + 0.2, 0.3], [1e12, 1e12 + 0.5], [0.0, 1e-10], [-5.0, -5.0]])
def test_ties_are_exactly_zero(values: list[float], norm: Norm) -> None:
    assert normalise(values, norm) == [0.0] * len(values)


@pytest.mark.parametrize("values", [[0.0, 1e-8], [1e12, 1e12 + 1e4], [1.0, 1.0 + 3e-9]])
def test_values_just_apart_are_not_a_tie(values: list[float]) -> None:
    low, high = normalise(values, "mean_norm")
    assert low < 0.0 < high


def test_lone_member() -> None:
    assert normalise([3.5], "mean_norm", "zero") == [0.0]
    assert normalise([3.5], "mean_std_norm", "zero") == [0.0]
    assert normalise([3.5], "mean_norm", "raw") == [3.5]
    assert normalise([3.5], "mean_std_norm", "raw") == [3.5 / (1 + EPSILON)]


def test_rows_that_take_no_part_change_nothing_and_get_nan() -> None:
    for absent in (math.nan, 1e9):
        normalised = normalise([10.0, absent, 0.0, 2.0], "mean_norm", members=[True, False, True, True])
        assert normalised[:1] + normalised[2:] == [6.0, -4.0, -2.0]
        assert math.isnan(normalised[1])


def test_a_group_without_members_is_all_nan() -> None:
    assert all(map(math.isnan, normalise([math.nan, 1.0], "mean_std_norm", "raw", members=[False, False])))


def test_moments_are_per_group() -> None:
    groups = Segments.opening_at(np.array([True, False, True, False, False, True]))
    values = np.array([1.0, 3.0, 5.0, 5.0, 5.0, 7.0])
    member = np.array([True, True, True, True, True, False])
    moments = Moments.of(values, member, groups)
    assert moments.count_K.tolist() == [2, 3, 0]
    assert moments.mean_K.tolist() == [2.0, 5.0, 0.0]
    assert moments.std_K.tolist() == [2.0**0.5, 0.0, 0.0]
    assert moments.tied_K.tolist() == [False, True, False]


def test_large_values_keep_their_digits() -> None:
    """Two passes: a sum of squares would lose all digits here."""
    normalised = normalise([1e9, 1e9 + 2.0, 1e9 + 4.0], "mean_std_norm")
    assert normalised == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
