"""The ladder's tests: every sign pattern against a slow oracle, Holm against its definition, words for nulls."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ladder.statistics import LEVEL, holm, paired, verdicts

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=6)
COUNTS = st.lists(st.tuples(st.integers(0, 512), st.integers(0, 512)), min_size=2, max_size=8)


def by_every_pattern(differences: list[int]) -> float:
    """Share of all sign patterns whose sum is at least as far from 0 as the observed one; in whole numbers."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(value >= observed for value in sums) / len(sums)


@settings(max_examples=15)
@given(COUNTS)
def test_p_counts_every_sign_pattern(counts: list[tuple[int, int]]) -> None:
    success = {"a": [a / 512 for a, _ in counts], "b": [b / 512 for _, b in counts]}
    result = paired(success, "a", "b")
    assert result.test == "exact"
    assert result.p == pytest.approx(by_every_pattern([a - b for a, b in counts]), abs=1e-12)
    assert result.p == paired(success, "b", "a").p


def test_ten_seeds_that_agree_give_the_smallest_p_there_is() -> None:
    success = {"a": [0.5 + 0.01 * n for n in range(10)], "b": [0.4] * 10}
    result = paired(success, "a", "b")
    assert result.p == 2 / 2**10
    assert result.difference == pytest.approx(0.145)
    assert result.low is not None
    assert result.high is not None
    assert result.low < 0.145 < result.high


def test_pairs_count_not_means() -> None:
    """The same means, paired and unpaired seeds: what all seeds share must not hide a difference."""
    shared = [0.1 * n for n in range(8)]
    success = {
        "low": shared,
        "high": [value + 0.02 for value in shared],
        "mixed": [value + 0.02 for value in shared[::-1]],
    }
    assert paired(success, "high", "low").p == 2 / 2**8
    mixed = paired(success, "mixed", "low").p
    assert mixed is not None
    assert mixed > 0.5


@pytest.mark.parametrize(("first", "second"), [([0.5], [0.5, 0.6]), ([], []), ([0.1] * 33, [0.2] * 33)])
def test_seeds_that_are_no_pairs_are_refused(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError, match="1 to 32, paired"):
        paired({"a": first, "b": second}, "a", "b")


def test_holm_of_textbook_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.03, 0.04]) == pytest.approx([0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(P_VALUES, st.floats(0.001, 0.999))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values: list[float], level: float) -> None:
    """Holm's own procedure: from the smallest on, compare with level / (number left); stop at the first that fails."""
    rejected, remaining = set(), sorted(range(len(p_values)), key=lambda at: p_values[at])
    while remaining and p_values[remaining[0]] * len(remaining) < level:
        rejected.add(remaining.pop(0))
    corrected = holm(p_values)
    assert {at for at, p in enumerate(corrected) if p < level} == rejected
    assert all(p >= raw for p, raw in zip(corrected, p_values, strict=True))


def test_a_null_is_called_one() -> None:
    base = [0.3, 0.31, 0.29, 0.3, 0.32, 0.3, 0.28, 0.31, 0.3, 0.3]
    success = {
        "base": base,
        "better": [value + 0.1 for value in base],
        "worse": [value - 0.1 for value in base],
        "same": [value + (0.02 if seed % 2 else -0.02) for seed, value in enumerate(base)],
        "equal": list(base),
    }
    verdicts_found = verdicts(success, [("better", "base"), ("worse", "base"), ("same", "base"), ("equal", "base")])
    assert [verdict.words for verdict in verdicts_found] == ["better", "worse", *["null: no difference shown"] * 2]
    assert verdicts_found[0].holm == pytest.approx(4 * 2 / 2**10)
    assert verdicts_found[3].result.p == 1.0


def test_the_correction_can_take_a_finding_away() -> None:
    differences = [0.02, 0.03, 0.01, 0.04, 0.02, 0.05, -0.005, -0.006, 0.01, -0.009]
    success = {"a": [0.5 + d for d in differences], "b": [0.5] * 10, "c": [0.5 + d for d in differences]}
    alone = verdicts(success, [("a", "b")])[0]
    together = verdicts(success, [("a", "b"), ("c", "b"), ("c", "b"), ("c", "b")])[0]
    assert alone.holm < LEVEL < together.holm
    assert (alone.words, together.words) == ("better", "null: no difference shown")
