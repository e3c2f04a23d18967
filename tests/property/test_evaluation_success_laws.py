"""pass@k, pass^k, the permutation test and success rows against slow, obvious ways of counting."""

from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lake.statistics import EXACT_TASKS, compare_paired, sign_flip_p, wilson_interval
from testkit.examples import examples
from trainer.evaluation.success import (
    compare_names,
    compute_pass_all_k,
    compute_pass_at_k,
    compute_success,
    summarise_tasks,
)

outcomes = st.lists(st.booleans(), max_size=7)


@given(outcomes, st.integers(1, 8))
def test_pass_at_k_is_the_share_of_draws_of_k(outcome_G: list[bool], k: int) -> None:
    draws = list(combinations(outcome_G, k))
    actual = (
        compute_pass_at_k(len(outcome_G), sum(outcome_G), k),
        compute_pass_all_k(len(outcome_G), sum(outcome_G), k),
    )
    if not draws:
        assert actual == (None, None)
    else:
        assert actual[0] == pytest.approx(sum(map(any, draws)) / len(draws))
        assert actual[1] == pytest.approx(sum(map(all, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    """The mean over many tasks of success rate p is 1 - (1 - p)^k, and p^k for pass^k."""
    rng = np.random.default_rng(0)
    wins_P = rng.binomial(6, 0.3, 20_000)
    for k in (1, 2, 4):
        at = [compute_pass_at_k(6, int(wins), k) or 0.0 for wins in wins_P]
        all_succeed = [compute_pass_all_k(6, int(wins), k) or 0.0 for wins in wins_P]
        assert np.mean(at) == pytest.approx(1 - 0.7**k, abs=4 * np.std(at) / np.sqrt(len(at)))
        assert np.mean(all_succeed) == pytest.approx(0.3**k, abs=4 * np.std(all_succeed) / np.sqrt(len(all_succeed)))


steps = st.integers(-4, 4).map(lambda n: n / 4)


@given(st.lists(steps, max_size=8))
def test_the_exact_test_counts_sign_patterns(differences: list[float]) -> None:
    """Zeros included: flipping them changes nothing, so leaving them out is the same."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    expected = sum(total >= observed - 1e-9 for total in sums) / len(sums)
    assert sign_flip_p(np.array(differences), seed=0) == (pytest.approx(expected), "exact")


@given(st.lists(st.floats(-3, 3), max_size=9))
def test_differences_of_any_size_are_counted_by_halves(differences: list[float]) -> None:
    observed = abs(sum(differences))
    slack = 1e-9 * sum(map(abs, differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    # A sum at the very border of a tie may be counted either way.
    low, high = (sum(total >= observed - slack * edge for total in sums) / len(sums) for edge in (0.5, 2.0))
    p, how = sign_flip_p(np.array(differences), seed=0)
    assert how == "exact"
    assert low <= p <= high


@pytest.mark.parametrize(("wins", "losses"), [(60, 0), (141, 51), (30, 30), (700, 610)])
def test_success_rates_of_any_number_of_tasks_are_a_binomial(wins: int, losses: int) -> None:
    """Of single attempts the test is the sign test: a tail of Pascal's triangle."""
    tasks = wins + losses
    tail = sum(comb(tasks, k) for k in range(max(wins, losses), tasks + 1))
    p, how = sign_flip_p(np.array([1.0] * wins + [-1.0] * losses + [0.0] * 7), seed=0)
    assert how == "exact"
    assert p == pytest.approx(min(1.0, float(Fraction(2 * tail, 2**tasks))), rel=1e-9)


def test_more_tasks_than_halves_can_count_are_exact_where_differences_have_one_unit() -> None:
    """Thirds of one policy against quarters of the other, an eighth of a cent each."""
    rng = np.random.default_rng(1)
    differences = 0.00125 * (rng.integers(0, 4, 90) / 3 - rng.integers(0, 5, 90) / 4)
    exact, how = sign_flip_p(differences, seed=0)
    assert how == "exact"
    assert exact == sign_flip_p(differences * 1e6, seed=0)[0], "whatever the unit of the return is"
    signs = rng.integers(0, 2, (20_000, 90)) * 2.0 - 1.0
    sampled = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12).mean()
    assert sampled == pytest.approx(exact, abs=0.02)


def test_the_sampled_test_agrees_with_the_exact_one() -> None:
    rng = np.random.default_rng(5)
    differences = rng.normal(0.1, 1.0, EXACT_TASKS)
    exact, how = sign_flip_p(differences, seed=0)
    assert how == "exact"
    # One task more that hardly differs: too many to count, and nearly the same question.
    sampled, how = sign_flip_p(np.append(differences, 1e-7), seed=0)
    assert how == "sampled"
    assert sampled == pytest.approx(exact, abs=0.005)
    assert (sampled, how) == sign_flip_p(np.append(differences, 1e-7), seed=0)


def test_a_sampled_p_is_never_zero() -> None:
    p, how = sign_flip_p(np.random.default_rng(0).uniform(1, 2, 60), seed=0)
    assert how == "sampled"
    assert 0 < p < 1e-4


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5), st.sampled_from([1.0, 0.1, 1 / 3]))
def test_successes_and_failures_are_counted_exactly_however_many(won: int, lost: int, same: int, size: float) -> None:
    """McNemar's exact test; the oracle adds a fair sign at a time to the distribution of their sum."""
    patterns = {0: 1}
    for _ in range(won + lost):
        patterns = {
            total: patterns.get(total - 1, 0) + patterns.get(total + 1, 0)
            for total in {total + sign for total in patterns for sign in (1, -1)}
        }
    expected = sum(count for total, count in patterns.items() if abs(total) >= abs(won - lost)) / 2 ** (won + lost)
    assert sign_flip_p(np.repeat([size, -size, 0.0], [won, lost, same]), seed=0) == (pytest.approx(expected), "exact")


@given(st.lists(st.tuples(steps, steps), min_size=1, max_size=8))
def test_a_comparison_turned_round(pairs: list[tuple[float, float]]) -> None:
    array = np.array(pairs)
    first, second = compare_paired(array, seed=1), compare_paired(array[:, ::-1], seed=1)
    assert first.difference == pytest.approx(-(second.difference or 0.0))
    assert (first.value, first.against, first.p, first.tasks) == (second.against, second.value, second.p, len(pairs))
    if first.low is not None and first.high is not None and second.low is not None and second.high is not None:
        assert (first.low, first.high) == pytest.approx((-second.high, -second.low))


def test_no_tasks_say_nothing() -> None:
    assert compare_paired(np.zeros((0, 2)), seed=0) == (None,) * 7 + (0,)


scores = st.one_of(st.none(), st.sampled_from([0.0, 0.4, 1.0, 1.5]))
rollouts = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["t0", "t1", "t2"]), scores, st.booleans()),
    min_size=1,
    max_size=25,
)


def frame(rows: list[tuple[str, str, float | None, bool]]) -> pl.DataFrame:
    schema = {"name": pl.String, "task": pl.String, "score": pl.Float64, "nested": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row").sort("name", "task", maintain_order=True)


@settings(max_examples=examples(50))
@given(rollouts, st.sampled_from([0.4, 1.0]))
def test_success_rows_are_what_counting_gives(
    rows: list[tuple[str, str, float | None, bool]], threshold: float
) -> None:
    actual = compute_success(frame(rows), threshold=threshold, ks=(1, 2))
    table = {(row["name"], row["measure"]): row for row in actual.iter_rows(named=True)}
    for name in {row[0] for row in rows if not row[3]}:
        mine = [row for row in rows if row[0] == name and not row[3]]
        known_rows = [row for row in mine if row[2] is not None]
        wins = [row for row in known_rows if (row[2] or 0.0) >= threshold]
        success = table[name, "success"]
        assert (success["attempts"], success["unscored"]) == (len(known_rows), len(mine) - len(known_rows))
        if not known_rows:
            assert success["value"] is None
            continue
        assert success["value"] == pytest.approx(len(wins) / len(known_rows))
        if len({row[1] for row in known_rows}) == 1:
            assert (success["low"], success["high"]) == wilson_interval(len(wins) / len(known_rows), len(known_rows))
        assert 0 <= success["low"] <= success["value"] <= success["high"] <= 1
        for k in (1, 2):
            shares = []
            for task in {row[1] for row in known_rows}:
                outcome_G = [(row[2] or 0.0) >= threshold for row in known_rows if row[1] == task]
                draws = list(combinations(outcome_G, k))
                shares += [sum(map(any, draws)) / len(draws)] if draws else []
            row = table[name, f"pass@{k}"]
            assert row["tasks"] == len(shares)
            assert row["value"] == (pytest.approx(sum(shares) / len(shares)) if shares else None)


@settings(max_examples=examples(25))
@given(st.lists(st.integers(0, 3), min_size=2, max_size=400))
@example([3] * 186 + [0] * 314)
def test_one_number_has_one_interval(wins: list[int]) -> None:
    """success and pass@1 are the same number where every task has as many attempts."""
    rows = [("a", f"t{t}", float(attempt < won), False) for t, won in enumerate(wins) for attempt in range(3)]
    success, _, first = compute_success(frame(rows)).select("value", "low", "high").rows()
    assert success == pytest.approx(first)


@settings(max_examples=examples(50))
@given(rollouts)
def test_two_names_are_compared_on_the_tasks_of_both(rows: list[tuple[str, str, float | None, bool]]) -> None:
    attempts = frame([*rows, ("a", "both", 1.0, False), ("b", "both", 0.0, False)])
    (row,) = compare_names(attempts, name="a", baseline="b", ks=(1,)).filter(measure="pass@1").to_dicts()
    plain = attempts.filter(~pl.col("nested"))
    ours, right = (
        {task: c / n for task, n, c, _ in summarise_tasks(plain.filter(name=name), 1.0).iter_rows()}
        for name in ("a", "b")
    )
    shared = ours.keys() & right.keys()
    assert row["tasks"] == len(shared)
    assert row["value"] == pytest.approx(sum(ours[task] for task in shared) / len(shared))
    assert row["difference"] == pytest.approx(row["value"] - row["against"])
