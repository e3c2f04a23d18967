"""Weighted sums, renormalised or not, against a slow oracle; and the same sums written as SQL."""

import json
import math
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.score.rewards import Component, RewardDefinition, compute_rewards, name_error_column
from testkit.examples import examples
from testkit.scorer_oracles import weighted

SCORE = st.one_of(st.none(), st.floats(-1e3, 1e3), st.sampled_from([0.0, 1.0, -0.5]))
WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4)


@st.composite
def tables(draw: Any) -> tuple[list[float], list[list[float | None]]]:
    weights = draw(WEIGHTS)
    row = st.lists(SCORE, min_size=len(weights), max_size=len(weights))
    return weights, draw(st.lists(row, min_size=1, max_size=8))


def defined(weights: list[float], **fields: Any) -> RewardDefinition:
    components = tuple(Component(scorer=f"s{n}", weight=weight) for n, weight in enumerate(weights))
    return RewardDefinition(name="r", components=components, **fields)


def frame(rows: list[list[float | None]]) -> pl.DataFrame:
    names = [f"s{n}" for n in range(len(rows[0]))]
    keys = pl.DataFrame({"episode_id": range(len(rows))})
    return pl.concat(
        [keys, pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Float64), orient="row")], how="horizontal"
    )


@settings(max_examples=examples(30), deadline=None)
@given(table=tables(), renormalise=st.booleans())
def test_weighted_sums(table: tuple[list[float], list[list[float | None]]], renormalise: bool) -> None:
    weights, rows = table
    definition = defined(weights, on_null="renormalise" if renormalise else "null")
    rewards = compute_rewards(frame(rows), definition)
    assert rewards["episode_id"].to_list() == list(range(len(rows)))
    for row, value, reason, error, metrics in zip(
        rows, rewards["value"], rewards["reason"], rewards["error"], rewards["metrics"], strict=True
    ):
        expected = weighted(row, weights, renormalise=renormalise)
        assert (value is None) == (expected is None)
        assert error is None
        assert (reason is not None) == (None in row and (expected is None or renormalise))
        assert list(json.loads(metrics).values()) == row
        if expected is not None:
            scale = sum(abs(score or 0.0) * weight for score, weight in zip(row, weights, strict=True))
            assert math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9 * (1.0 + scale))


@settings(max_examples=examples(15), deadline=None)
@given(table=tables())
def test_laws_of_renormalised_sums(table: tuple[list[float], list[list[float | None]]]) -> None:
    """Complete rows are plain sums; a reward of equal scores is that score times the weights, no matter which are
    unknown."""
    weights, rows = table
    plain, scaled = defined(weights), defined(weights, on_null="renormalise")
    complete = [[0.0 if score is None else score for score in row] for row in rows]
    assert compute_rewards(frame(complete), plain)["value"].equals(compute_rewards(frame(complete), scaled)["value"])
    alike = [[None if score is None else 0.5 for score in row] for row in rows]
    for row, value in zip(alike, compute_rewards(frame(alike), scaled)["value"], strict=True):
        assert value is None if row.count(None) == len(row) else math.isclose(value, 0.5 * sum(weights), rel_tol=1e-9)


@settings(max_examples=8, deadline=None)
@given(table=tables())
def test_a_sum_in_sql_is_the_sum(table: tuple[list[float], list[list[float | None]]]) -> None:
    weights, rows = table
    text = " + ".join(f"{weight!r} * s{n}" for n, weight in enumerate(weights))
    in_sql = compute_rewards(frame(rows), defined([1.0] * len(weights), sql=text))["value"]
    for mine, plain in zip(in_sql, compute_rewards(frame(rows), defined(weights))["value"], strict=True):
        assert (mine is None) == (plain is None)
        assert mine is None or math.isclose(mine, plain, rel_tol=1e-12, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("row", "options", "value", "reason", "error"),
    [
        ([1.0, 0.5], {}, 2.0, None, None),
        ([1.0, None], {}, None, "unknown: s1 (no judge)", None),
        ([None, None], {}, None, "unknown: s0 (NULL); s1 (no judge)", None),
        ([1.0, None], {"on_null": "renormalise"}, 3.0, "renormalised without s1 (no judge)", None),
        ([None, 0.5], {"on_null": "renormalise"}, 1.5, "renormalised without s0 (NULL)", None),
        ([None, None], {"on_null": "renormalise"}, None, "unknown: s0 (NULL); s1 (no judge)", None),
        ([0.0, 0.0], {"on_null": "renormalise"}, 0.0, None, None),
    ],
)
def test_reasons(row: list[Any], options: Any, value: Any, reason: Any, error: Any) -> None:
    why = pl.Series([None if row[1] is not None else "no judge"], dtype=pl.String)
    components = frame([row]).with_columns(why.alias(name_error_column("s1")))
    rewards = compute_rewards(components, defined([1.0, 2.0], **options))
    assert rewards.drop("episode_id", "metrics").rows() == [(value, reason, error)]


@pytest.mark.parametrize(
    ("sql", "row", "value", "why"),
    [
        ("s0 / s1", [1.0, 0.0], None, "the formula gives no finite number"),
        ("ln(s0)", [0.0, 1.0], None, "the formula gives no finite number"),
        ("s0 * 1e308 * 1e308", [1.0, 1.0], None, "the formula gives no finite number"),
        ("coalesce(s0, s1)", [None, 2.0], 2.0, None),
        ("s0 - s1", [None, 2.0], None, "unknown: s0 (NULL)"),
        ("CASE WHEN s0 > 0 THEN 1 END", [0.0, 2.0], None, "the formula gives no finite number"),
    ],
)
def test_formulas_that_fail_are_unknown(sql: str, row: list[Any], value: Any, why: Any) -> None:
    """An unknown component is a reason; a formula that gives no number of known ones is an error."""
    rewards = compute_rewards(frame([row]), defined([1.0, 1.0], sql=sql))
    column, empty_column = ("error", "reason") if None not in row else ("reason", "error")
    assert (rewards["value"].item(), rewards[column].item(), rewards[empty_column].item()) == (value, why, None)


def test_an_overflowing_sum_is_unknown() -> None:
    rewards = compute_rewards(frame([[1e308, 1e308]]), defined([10.0, 10.0]))
    assert rewards["value"].item() is None
    assert "no finite number" in rewards["error"].item()


def test_minus_zero_is_zero() -> None:
    reward = compute_rewards(frame([[0.5, 0.5]]), defined([1.0, 1.0], sql="-abs(s0 - s1)"))["value"].item()
    assert math.copysign(1.0, reward) == 1.0
