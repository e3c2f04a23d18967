"""The estimator, its lazy and eager runs, its SQL twin and the slow oracle agree on everything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from lake.ids import text_hash
from pipelines.credit import GiGPO, SimilarText
from pipelines.credit.estimators.sql import estimator_relation
from testkit.credit_strategies import configs, frame, step_rows
from testkit.examples import examples
from testkit.gigpo_oracle import exact_keys, gigpo, similar_keys

NUMBERS = ["return_to_go", "a_episode", "a_step", "advantage"]
EXACT = ["episode_id", "step_index", "group_id", "anchor_key", "group_size", "anchor_size", "anchor_episodes", "flags"]


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as opened:
        opened.execute("SET threads = 1")
        yield opened


def expected(rows: list[dict[str, Any]], config: GiGPO, schema: pl.Schema, *, hashed: bool) -> pl.DataFrame:
    """The oracle's answer as a frame of the estimator's schema."""
    keys = similar_keys(config.anchors.threshold) if isinstance(config.anchors, SimilarText) else exact_keys
    actual = gigpo([{**row, "state": row["state_hash"]} for row in rows] if hashed else rows, config, keys)
    for row in actual:
        row["anchor_key"] = row["anchor"] if hashed or row["anchor"] is None else text_hash(row["anchor"])
    return pl.DataFrame([{name: row[name] for name in schema} for row in actual], schema=schema, orient="row")


def assert_same(actual: pl.DataFrame, expected: pl.DataFrame) -> None:
    """Equal in everything but the last digits of numbers."""
    assert actual.schema == expected.schema
    assert_frame_equal(actual.select(EXACT), expected.select(EXACT))
    assert_frame_equal(actual.select(NUMBERS), expected.select(NUMBERS), abs_tol=1e-9, rel_tol=1e-9)


@settings(deadline=None, max_examples=examples(120))
@given(rows=step_rows(), config=configs(), hashed=st.booleans())
def test_oracle(rows: list[dict[str, Any]], config: GiGPO, hashed: bool) -> None:
    steps = frame(rows) if hashed else frame(rows).drop("state_hash")
    actual = config.advantages(steps.lazy()).collect()
    assert_same(actual, expected(rows, config, actual.schema, hashed=hashed))


@settings(deadline=None, max_examples=examples(50))
@given(
    rows=step_rows(max_groups=2),
    config=configs(),
    threshold=st.sampled_from([0.2, 0.6, 0.9]),
    texts=st.lists(st.text("abc ", max_size=6), min_size=1, max_size=6),
    data=st.data(),
)
def test_oracle_with_similar_states(
    rows: list[dict[str, Any]], config: GiGPO, threshold: float, texts: list[str], data: st.DataObject
) -> None:
    for row in rows:
        row["state"] = data.draw(st.none() | st.sampled_from(texts))
    config = GiGPO(**{**config.model_dump(), "anchors": {"kind": "similarity", "threshold": threshold}})
    # The texts above are not those that the rows' hashes belong to, and equal hashes mean equal texts.
    actual = config.advantages(frame(rows).drop("state_hash").lazy()).collect()
    assert_same(actual, expected(rows, config, actual.schema, hashed=False))


@settings(deadline=None, max_examples=examples(30))
@given(rows=step_rows(), config=configs())
def test_sql_twin(connection: duckdb.DuckDBPyConnection, rows: list[dict[str, Any]], config: GiGPO) -> None:
    steps = frame(rows)
    connection.register("some_steps", steps.to_arrow())
    actual = estimator_relation(connection, config, "some_steps").pl()
    assert_same(actual, config.advantages(steps.lazy()).collect())


@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 0.95, 0.999, 1.0])
def test_sql_twin_on_episodes_longer_than_any_power_of_gamma(
    connection: duckdb.DuckDBPyConnection, gamma: float
) -> None:
    rewards = [((7 * i) % 11 - 5) / 4 for i in range(6000)]
    rows = [
        {
            "episode_id": episode,
            "group_id": 0,
            "step_index": i,
            "state_hash": i // 3,
            "reward": rewards[i + 7 * episode],
        }
        for episode in range(2)
        for i in range(5000)
    ]
    steps = frame([{**row, "episode_score": row["episode_id"]} for row in rows])
    config = GiGPO(gamma=gamma, step_norm="mean_norm")
    connection.register("steps", steps.to_arrow())
    actual = estimator_relation(connection, config, "steps").pl()
    assert_same(actual, config.advantages(steps.lazy()).collect())


@settings(deadline=None, max_examples=examples(25))
@given(rows=step_rows(), config=configs(), layout=st.integers(1, 4))
def test_lazy_eager_streaming_and_files(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], config: GiGPO, layout: int
) -> None:
    steps = frame(rows)
    eager = config.advantages(steps.lazy()).collect()
    folder: Path = tmp_path_factory.mktemp("steps")
    for part in range(layout):
        steps[part::layout].write_parquet(folder / f"{part}.parquet")
    lazy = config.advantages(pl.scan_parquet(folder / "*.parquet"))
    assert_frame_equal(lazy.collect(), eager, check_exact=True)
    assert_frame_equal(lazy.collect(engine="streaming"), eager, check_exact=True)


@settings(deadline=None, max_examples=examples(25))
@given(rows=step_rows(), config=configs())
def test_a_later_filter_does_not_reach_into_the_groups(rows: list[dict[str, Any]], config: GiGPO) -> None:
    lazy = config.advantages(frame(rows).lazy())
    condition = (pl.col("step_index") == 0) & (pl.col("episode_id") % 2 == 0)
    first_rows = lazy.collect().filter(condition).select("advantage", "group_size").head(2)
    actual = lazy.filter(condition).select("advantage", "group_size").head(2).collect()
    assert_frame_equal(actual, first_rows, check_exact=True)


@settings(deadline=None, max_examples=examples(10))
@given(rows=step_rows(), config=configs())
def test_ids_may_be_text(connection: duckdb.DuckDBPyConnection, rows: list[dict[str, Any]], config: GiGPO) -> None:
    steps = frame(rows)
    named = steps.with_columns(pl.format("e{}", pl.col("episode_id").cast(pl.String).str.zfill(4)).alias("episode_id"))
    named = named.with_columns(pl.format("g{}", "group_id").alias("group_id"))
    connection.register("steps", named.to_arrow())
    actual = config.advantages(named.lazy()).collect()
    expected = config.advantages(steps.lazy()).collect()
    assert_frame_equal(actual.drop("episode_id", "group_id"), expected.drop("episode_id", "group_id"), check_exact=True)
    assert_same(estimator_relation(connection, config, "steps").pl(), actual)
