"""Ranking of prompts: against an obvious oracle, and what must hold of any ranking."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.prompts.candidates import CandidateReturns, compare_candidates, rank_candidates

RETURNS = st.dictionaries(st.sampled_from("abcdefg"), st.integers(-3, 3).map(float), max_size=7)


def played(returns: dict[str, float]) -> CandidateReturns:
    return CandidateReturns(returns=returns, unknown=0)


def oracle(one: dict[str, float], other: dict[str, float]) -> tuple[float, float] | None:
    """Mean difference and p over every pattern of signs, spelled out."""
    gaps = [one[start] - other[start] for start in one if start in other]
    if not gaps:
        return None
    patterns = [sum(s * g for s, g in zip(signs, gaps, strict=True)) for signs in product((1, -1), repeat=len(gaps))]
    return sum(gaps) / len(gaps), sum(abs(total) >= abs(sum(gaps)) for total in patterns) / len(patterns)


@given(RETURNS, RETURNS)
def test_a_comparison_is_what_counting_gives(one: dict[str, float], other: dict[str, float]) -> None:
    found, expected = compare_candidates(played(one), played(other), seed=0), oracle(one, other)
    if expected is None:
        assert (found.difference, found.p, found.tasks) == (None, None, 0)
    else:
        assert (found.difference, found.p) == pytest.approx(expected)
        assert found.test == "exact"


@given(st.lists(RETURNS, min_size=1, max_size=5))
def test_the_highest_difference_stands_first_and_equals_as_they_came(every: list[dict[str, float]]) -> None:
    names = [f"candidate {number}" for number in range(len(every))]
    standings = rank_candidates(dict(zip(names, map(played, every), strict=True)), names[0], seed=0)
    assert [one.rank for one in standings] == list(range(1, len(every) + 1))

    def key(name: str) -> tuple[bool, float, int]:
        known = oracle(every[names.index(name)], every[0])
        return known is None, 0.0 if known is None else -round(known[0], 9), names.index(name)

    assert [one.candidate for one in standings] == sorted(names, key=key)
    first = next(one for one in standings if one.candidate == names[0])
    assert first.p is first.test is first.low is first.high is None, "it is compared with nothing"


def test_starts_that_were_seen_are_left_out() -> None:
    one, other = played({"a": 1.0, "b": 5.0}), played({"a": 0.0, "b": 0.0})
    assert compare_candidates(one, other, seed=0).difference == 3.0
    found = compare_candidates(one, other, seed=0, without=["b"])
    assert (found.difference, found.tasks) == (1.0, 1)


def test_a_candidate_of_which_nothing_is_known_stands_last() -> None:
    every = {
        "first": played({"a": 0.0}),
        "silent": CandidateReturns(returns={}, unknown=4),
        "bad": played({"a": -2.0}),
    }
    standings = rank_candidates(every, "first", seed=0)
    assert [one.candidate for one in standings] == ["first", "bad", "silent"]
    assert (standings[2].mean, standings[2].difference, standings[2].unknown) == (None, None, 4)
