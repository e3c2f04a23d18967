"""The SQL twins agree with the estimators: advantages to 1e-9, sizes and flags exactly (GiGPO has its own file)."""

from collections.abc import Iterator
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from lake.errors import ContractError
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.estimators.sql import TWINS, estimator_relation
from pipelines.credit.steps import KEYS
from testkit.estimator_strategies import estimators, wide_frame, wide_rows

NUMBERS = ["return_to_go", "a_episode", "a_step", "advantage"]


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as opened:
        opened.execute("SET threads = 1")
        yield opened


def assert_twin(connection: duckdb.DuckDBPyConnection, steps: pl.DataFrame, estimator: Estimator) -> None:
    connection.register("some_steps", steps.to_arrow())
    actual = estimator_relation(connection, estimator, "some_steps").pl()
    expected = estimator.advantages(steps.lazy()).collect()
    assert actual.schema == expected.schema
    assert_frame_equal(actual.drop(NUMBERS), expected.drop(NUMBERS))
    assert_frame_equal(actual.select(NUMBERS), expected.select(NUMBERS), abs_tol=1e-9, rel_tol=1e-9)


@pytest.mark.parametrize("name", [name for name in TWINS if name != "gigpo"])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_sql_twin(connection: duckdb.DuckDBPyConnection, name: str, data: st.DataObject) -> None:
    rows: list[dict[str, Any]] = data.draw(wide_rows(positive=name == "maxrl"))
    assert_twin(connection, wide_frame(rows), data.draw(estimators(name)))


@pytest.mark.parametrize("name", TWINS)
@settings(deadline=None, max_examples=3)
@given(data=st.data())
def test_a_null_key_is_refused_by_both(connection: duckdb.DuckDBPyConnection, name: str, data: st.DataObject) -> None:
    """A row without its key is no row to leave out: its siblings would be credited as if it had never been."""
    rows: list[dict[str, Any]] = data.draw(wide_rows(positive=name == "maxrl"))
    places = st.tuples(st.integers(0, len(rows) - 1), st.sampled_from(KEYS))
    for position, key in data.draw(st.sets(places, min_size=1, max_size=3)):
        rows[position] = rows[position] | {key: None}
    estimator = data.draw(estimators(name))
    with pytest.raises(ContractError, match=r"steps: (\w+) is NULL in \d+ rows"):
        estimator.advantages(wide_frame(rows).lazy()).collect()
    connection.register("some_steps", wide_frame(rows).to_arrow())
    with pytest.raises(duckdb.Error, match="steps: "):
        estimator_relation(connection, estimator, "some_steps").fetchall()
