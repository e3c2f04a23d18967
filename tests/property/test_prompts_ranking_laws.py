"""Ranking of prompts: against an obvious oracle, and what must hold of any ranking."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.prompts.candidates import CandidateReturns, compare_candidates, rank_candidates

RETURNS = st.dictionaries(st.sampled_from("abcdefg"), st.integers(-3, 3).map(float), max_size=7)


def played(returns: dict[str, float]) -> CandidateReturns:
    return CandidateReturns(returns=returns, unknown=0)


def oracle(first: dict[str, float], second: dict[str, float]) -> tuple[float, float] | None:
    """Mean difference and p over every pattern of signs, spelled out."""
    gaps = [first[start] - second[start] for start in first if start in second]
    if not gaps:
        return None
    patterns = [sum(s * g for s, g in zip(signs, gaps, strict=True)) for signs in product((1, -1), repeat=len(gaps))]
    return sum(gaps) / len(gaps), sum(abs(total) >= abs(sum(gaps)) for total in patterns) / len(patterns)


@given(RETURNS, RETURNS)
def test_a_comparison_is_what_counting_gives(first: dict[str, float], second: dict[str, float]) -> None:
    comparison, expected = compare_candidates(played(first), played(second), seed=0), oracle(first, second)
    if expected is None:
        assert (comparison.difference, comparison.p, comparison.tasks) == (None, None, 0)
    else:
        assert (comparison.difference, comparison.p) == pytest.approx(expected)
        assert comparison.test == "exact"


@given(st.lists(RETURNS, min_size=1, max_size=5))
def test_the_highest_difference_stands_first_and_equals_as_they_came(all_returns: list[dict[str, float]]) -> None:
    names = [f"candidate {number}" for number in range(len(all_returns))]
    standings = rank_candidates(dict(zip(names, map(played, all_returns), strict=True)), names[0], seed=0)
    assert [standing.rank for standing in standings] == list(range(1, len(all_returns) + 1))

    def key(name: str) -> tuple[bool, float, int]:
        expected = oracle(all_returns[names.index(name)], all_returns[0])
        return expected is None, 0.0 if expected is None else -round(expected[0], 9), names.index(name)

    assert [standing.candidate for standing in standings] == sorted(names, key=key)
    first = next(standing for standing in standings if standing.candidate == names[0])
    assert first.p is first.test is first.low is first.high is None, "it is compared with nothing"


def test_starts_that_were_seen_are_left_out() -> None:
    first, second = played({"a": 1.0, "b": 5.0}), played({"a": 0.0, "b": 0.0})
    assert compare_candidates(first, second, seed=0).difference == 3.0
    comparison = compare_candidates(first, second, seed=0, without=["b"])
    assert (comparison.difference, comparison.tasks) == (1.0, 1)


def test_a_candidate_of_which_nothing_is_known_stands_last() -> None:
    returns = {
        "first": played({"a": 0.0}),
        "silent": CandidateReturns(returns={}, unknown=4),
        "bad": played({"a": -2.0}),
    }
    standings = rank_candidates(returns, "first", seed=0)
    assert [standing.candidate for standing in standings] == ["first", "bad", "silent"]
    assert (standings[2].mean, standings[2].difference, standings[2].unknown) == (None, None, 4)
