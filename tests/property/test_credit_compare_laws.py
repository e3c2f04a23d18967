"""The queries that compare two credit jobs, against loops over rows, and the laws of a comparison."""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.credit.compare import ZERO, read_compare_sql
from pipelines.credit.estimators.protocol import STATE
from testkit.examples import examples

Row = dict[str, Any]
Rows = dict[tuple[int, int], Row]
SCHEMA = {
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "advantage": pl.Float64,
    "group_size": pl.Int32,
    "flags": pl.String,
}
EPISODES = pl.DataFrame(
    {
        "episode_id": range(4),
        "group_id": [0, 0, 1, 1],
        "run_id": ["r"] * 4,
        "task_id": ["t", "t", "u", "u"],
        "rollout_index": [0, 1] * 2,
    }
)
STEPS = pl.DataFrame(
    [(e, s, "r", e // 2, f"act {e}.{s}", None) for e in range(4) for s in range(3)],
    schema=["episode_id", "step_index", "run_id", "group_id", "action", "tool_calls"],
    orient="row",
)
VALUES = st.none() | st.sampled_from([0.0, -0.0, 1e-12, 0.5, -0.5, 1.0, -2.0, 3.25]) | st.floats(-5, 5, width=32)
JOBS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2)),
    st.fixed_dictionaries(
        {
            "advantage": VALUES,
            "group_size": st.integers(0, 3),
            "flags": st.sampled_from(["", "dead_group", "constant_anchor,dead_group", "dead_groups", "truncated"]),
        }
    ),
)
"""Advantages by (episode, step) of two groups with two episodes."""


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute("SET threads = 1")
        connection.register("episodes", EPISODES.to_arrow())
        connection.register("steps", STEPS.to_arrow())
        yield connection


def ask(database: duckdb.DuckDBPyConnection, name: str, first: Rows, two: Rows, **params: Any) -> list[Row]:
    for relation, rows in (("one_rows", first), ("two_rows", two)):
        answer = [{"episode_id": e, "step_index": s} | row for (e, s), row in rows.items()]
        database.register(relation, pl.DataFrame(answer, schema=SCHEMA).to_arrow())
    extra_params = {"level": {"level": "advantage"}, "groups": {"state": STATE}}.get(name, {})
    text = read_compare_sql(name, one="one_rows", two="two_rows", **extra_params)
    table = database.sql(text, params=params or {"zero": ZERO}).to_arrow_table()
    return pl.DataFrame(table).to_dicts()


# ---------------------------------------------------------------- the obvious comparison


def shared(first: Rows, two: Rows) -> list[tuple[tuple[int, int], float, float]]:
    shared_keys = sorted(set(first) & set(two))
    pairs = [(key, first[key]["advantage"], two[key]["advantage"]) for key in shared_keys]
    return [(key, x, y) for key, x, y in pairs if x is not None and y is not None]


def sign(value: float) -> int:
    return 0 if abs(value) <= ZERO else 1 if value > 0 else -1


def ranks(values: list[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def correlation(x: list[float], y: list[float]) -> float | None:
    return statistics.correlation(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else None


def obvious_level(first: Rows, two: Rows) -> Row:
    pairs = shared(first, two)
    x, y = [p[1] for p in pairs], [p[2] for p in pairs]
    flipped = [(a, b) for a, b in zip(x, y, strict=True) if sign(a) * sign(b) < 0]
    weight = sum(abs(a) + abs(b) for a, b in zip(x, y, strict=True))
    defined = [{key for key, row in rows.items() if row["advantage"] is not None} for rows in (first, two)]
    return {
        "covered_1": len(first),
        "covered_2": len(two),
        "defined_1": len(defined[0]),
        "defined_2": len(defined[1]),
        "shared": len(pairs),
        "only_1": len(defined[0] - defined[1]),
        "only_2": len(defined[1] - defined[0]),
        "pearson": correlation(x, y),
        "spearman": correlation(ranks(x), ranks(y)),
        "flips": len(flipped),
        "flip_share": len(flipped) / len(pairs) if pairs else None,
        "flip_weight": sum(abs(a) + abs(b) for a, b in flipped) / weight if weight > 0 else None,
        "gained_sign": sum(sign(a) == 0 and sign(b) != 0 for a, b in zip(x, y, strict=True)),
        "lost_sign": sum(sign(a) != 0 and sign(b) == 0 for a, b in zip(x, y, strict=True)),
        "mean_1": statistics.fmean(x) if x else None,
        "mean_2": statistics.fmean(y) if y else None,
        "sd_1": statistics.stdev(x) if len(x) > 1 else None,
        "sd_2": statistics.stdev(y) if len(y) > 1 else None,
        "mean_change": statistics.fmean(abs(b - a) for a, b in zip(x, y, strict=True)) if x else None,
        "max_change": max((abs(b - a) for a, b in zip(x, y, strict=True)), default=None),
    }


def state(rows: Rows, group: int) -> str:
    mine = [row for (episode, _), row in rows.items() if episode // 2 == group]
    if not mine:
        return "absent"
    largest = max(row["group_size"] for row in mine)
    if any(row["group_size"] >= 2 and "dead_group" not in row["flags"].split(",") for row in mine):
        return "live"
    return "dead" if largest >= 2 else "singleton" if largest == 1 else "unscored"


def change(before: str, after: str) -> str:
    if "absent" in (before, after):
        return "only_2" if before == "absent" else "only_1"
    return "gained" if before != "live" == after else "lost" if before == "live" != after else "same"


def obvious_groups(first: Rows, two: Rows) -> list[Row]:
    groups = []
    for group in sorted({episode // 2 for episode, _ in [*first, *two]}):
        rows_of_group = [{key: row for key, row in rows.items() if key[0] // 2 == group} for rows in (first, two)]
        level = obvious_level(*rows_of_group)
        states = state(first, group), state(two, group)
        keys = {"group_id": group, "run_id": "r", "task_id": "tu"[group], "state_1": states[0], "state_2": states[1]}
        names = ("shared", "only_1", "only_2", "pearson", "flips", "mean_change", "max_change")
        groups.append(keys | {"change": change(*states)} | {name: level[name] for name in names})
    return groups


def close(actual: Row, expected: Row) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if isinstance(value, float) and actual[name] is not None:
            assert math.isclose(actual[name], value, rel_tol=1e-9, abs_tol=1e-9), (name, actual[name], value)
        else:
            assert actual[name] == value, (name, actual[name], value)


def well_spread(first: Rows, two: Rows) -> bool:
    """Correlations of values that differ in the last digits alone are noise in either computation."""
    pairs = shared(first, two)
    return all(
        max(v) == min(v) or statistics.pstdev(v) > 1e-6 for v in zip(*((x, y) for _, x, y in pairs), strict=True)
    )


# ---------------------------------------------------------------- against it


@settings(max_examples=examples(20))
@given(JOBS, JOBS)
def test_a_level_is_what_loops_over_its_rows_say(database: duckdb.DuckDBPyConnection, first: Rows, two: Rows) -> None:
    (actual,) = ask(database, "level", first, two)
    expected = obvious_level(first, two)
    if not well_spread(first, two):
        actual |= {"pearson": None}
        expected |= {"pearson": None}
    close(actual, expected)


@settings(max_examples=examples(20))
@given(JOBS, JOBS)
def test_groups_are_what_loops_over_their_rows_say(database: duckdb.DuckDBPyConnection, first: Rows, two: Rows) -> None:
    actual = ask(database, "groups", first, two)
    turned = [row["change"] in ("gained", "lost") for row in actual]
    assert turned == sorted(turned, reverse=True), "groups whose signal changed come first"
    for row, expected in zip(sorted(actual, key=lambda row: row["group_id"]), obvious_groups(first, two), strict=True):
        if row["pearson"] is not None and expected["pearson"] is not None and not well_spread(first, two):
            row["pearson"] = expected["pearson"]
        close(row, expected)


@settings(max_examples=examples(15))
@given(JOBS, JOBS, st.integers(0, 5))
def test_examples_are_the_largest_changes(
    database: duckdb.DuckDBPyConnection, first: Rows, two: Rows, limit: int
) -> None:
    pairs = [(-abs(y - x), key, x, y) for key, x, y in shared(first, two) if abs(y - x) > 0]
    actual = ask(database, "examples", first, two, examples=limit)
    expected = [(*key, x, y) for _, key, x, y in sorted(pairs)[:limit]]
    assert [
        (row["episode_id"], row["step_index"], row["advantage_1"], row["advantage_2"]) for row in actual
    ] == expected
    for row in actual:
        assert row["change"] == row["advantage_2"] - row["advantage_1"]
        assert row["action"] == f"act {row['episode_id']}.{row['step_index']}"


# ---------------------------------------------------------------- laws


@settings(max_examples=examples(10))
@given(JOBS)
def test_a_job_agrees_with_itself(database: duckdb.DuckDBPyConnection, job: Rows) -> None:
    (level,) = ask(database, "level", job, job)
    values = {row["advantage"] for row in job.values()} - {None}
    varies = len(values) > 1
    for name in ("pearson", "spearman"):
        assert level[name] == (pytest.approx(1, abs=1e-9) if varies else None)
    assert level["flips"] == level["gained_sign"] == level["lost_sign"] == level["only_1"] == level["only_2"] == 0
    assert level["max_change"] == (0 if level["shared"] else None)
    assert {row["change"] for row in ask(database, "groups", job, job)} <= {"same"}
    assert ask(database, "examples", job, job, examples=5) == []


MIRRORED = {"gained_sign": "lost_sign", "lost_sign": "gained_sign"}


def mirrored(row: Row) -> Row:
    """A row of the comparison with the two sides exchanged."""
    swapped = {}
    for name, value in row.items():
        mirrored = (
            name[:-1] + {"1": "2", "2": "1"}[name[-1]] if name.endswith(("_1", "_2")) else MIRRORED.get(name, name)
        )
        swapped[mirrored] = (
            {"gained": "lost", "lost": "gained", "only_1": "only_2", "only_2": "only_1"}.get(value, value)
            if name == "change"
            else value
        )
    return swapped


@settings(max_examples=examples(20))
@given(JOBS, JOBS)
def test_a_comparison_mirrors_its_reverse(database: duckdb.DuckDBPyConnection, first: Rows, two: Rows) -> None:
    (forth,), (back,) = ask(database, "level", first, two), ask(database, "level", two, first)
    close(dict(sorted(mirrored(back).items())), dict(sorted(forth.items())))
    there_groups, back_groups = ask(database, "groups", first, two), ask(database, "groups", two, first)
    for forth_group, right in zip(there_groups, back_groups, strict=True):
        close(dict(sorted(mirrored(right).items())), dict(sorted(forth_group.items())))


@settings(max_examples=examples(20))
@given(JOBS, st.floats(0.1, 10))
def test_correlations_do_not_mind_a_scale(database: duckdb.DuckDBPyConnection, job: Rows, scale: float) -> None:
    scaled = {
        key: row | {"advantage": None if row["advantage"] is None else row["advantage"] * scale}
        for key, row in job.items()
    }
    (level,) = ask(database, "level", job, scaled)
    if well_spread(job, job) and level["pearson"] is not None:
        assert level["pearson"] == pytest.approx(1, abs=1e-9)
    assert level["flips"] == 0


def test_a_turned_sign_is_a_correlation_of_minus_one(database: duckdb.DuckDBPyConnection) -> None:
    plain = {"group_size": 2, "flags": ""}
    first = {(0, step): plain | {"advantage": float(step - 1)} for step in range(3)}
    two = {key: row | {"advantage": -row["advantage"]} for key, row in first.items()}
    (level,) = ask(database, "level", first, two)
    assert (level["pearson"], level["spearman"]) == (pytest.approx(-1), pytest.approx(-1))
    assert (level["flips"], level["flip_share"], level["flip_weight"]) == (2, pytest.approx(2 / 3), 1)
