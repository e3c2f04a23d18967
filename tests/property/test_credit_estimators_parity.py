"""Every estimator and its slow oracle agree on everything: returns to 1e-12, advantages to 1e-9, the rest exactly."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from lake.ids import text_hash
from pipelines.credit.steps import make_output_schema
from testkit.credit_anchor_oracles import ANCHOR_ORACLES
from testkit.credit_oracles import ORACLES
from testkit.estimator_strategies import NAMES, estimators, wide_frame, wide_rows
from testkit.examples import examples

EVERY = {**ORACLES, **ANCHOR_ORACLES}
EXACT = ["episode_id", "step_index", "group_id", "anchor_key", "group_size", "anchor_size", "anchor_episodes", "flags"]


def test_every_estimator_has_an_oracle() -> None:
    assert {*EVERY, "gigpo"} == set(NAMES)


@pytest.mark.parametrize("name", sorted(EVERY))
@settings(deadline=None, max_examples=examples(25))
@given(data=st.data())
def test_oracle(name: str, data: st.DataObject) -> None:
    rows = data.draw(wide_rows(positive=name == "maxrl"))
    estimator = data.draw(estimators(name))
    actual = estimator.advantages(wide_frame(rows).drop("state_hash").lazy()).collect()
    wanted_rows = EVERY[name](rows, estimator)
    for row in wanted_rows:
        row["anchor_key"] = None if row["anchor"] is None else text_hash(row["anchor"])
    expected = pl.DataFrame(
        [{c: row[c] for c in actual.schema} for row in wanted_rows], schema=actual.schema, orient="row"
    )
    assert actual.schema == make_output_schema(wide_frame([]).schema)
    assert_frame_equal(actual.select(EXACT), expected.select(EXACT))
    assert_frame_equal(actual.select("return_to_go"), expected.select("return_to_go"), abs_tol=1e-12, rel_tol=1e-12)
    numbers = ["a_episode", "a_step", "advantage"]
    assert_frame_equal(actual.select(numbers), expected.select(numbers), abs_tol=1e-9, rel_tol=1e-9)
