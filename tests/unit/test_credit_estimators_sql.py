"""The surface of the SQL twins: headers, options, refusals. Parity is in tests/property."""

import re
from typing import Any

import duckdb
import pytest

from lake.errors import UsageError
from pipelines.credit.columns import output_schema
from pipelines.credit.estimator_sql import estimator_relation, estimator_sql
from pipelines.credit.estimators import ESTIMATORS
from testkit.credit_strategies import frame
from testkit.estimator_strategies import wide_frame

TWINS = ["dr_grpo", "gae", "grpo", "maxrl", "rloo"]


def steps(*numbers: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"episode_id": 8, "group_id": 1, "step_index": i, "value_estimate": 0.0, **columns} for i in numbers]


def run(name: str, rows: list[dict[str, Any]]) -> duckdb.DuckDBPyRelation:
    connection = duckdb.connect()
    connection.register("stored", wide_frame(rows).to_arrow())
    return estimator_relation(connection, ESTIMATORS[name](), "stored")


@pytest.mark.parametrize("name", TWINS)
def test_the_header_names_every_option_and_every_output_column(name: str) -> None:
    text = estimator_sql(ESTIMATORS[name]())
    header = text.split("WITH", 1)[0]
    assert all(line.startswith("--") for line in header.strip().splitlines())
    assert {"Grain", "Input", "Options", "Output"} <= set(re.findall(r"^-- (\w+)", header, re.MULTILINE))
    used = set(re.findall(r"\$(\w+)", text))
    assert used == set(re.findall(r"\$(\w+)", header))
    assert set(ESTIMATORS[name].model_fields) <= used
    for column in output_schema(frame([]).schema):
        assert column in header


@pytest.mark.parametrize("name", TWINS)
def test_schema_and_order_are_the_estimators(name: str) -> None:
    rows = [*steps(0, 1, episode_score=1.0, reward=1.0), *steps(0, episode_id=7, episode_score=0.0, reward=0.0)]
    found = run(name, rows).pl()
    assert found.schema == output_schema(frame([]).schema)
    assert found.select("episode_id", "step_index").rows() == [(7, 0), (8, 0), (8, 1)]


@pytest.mark.parametrize("name", ["opo", "discounted_grpo", "hgpo"])
def test_an_estimator_without_twin_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no SQL twin here. Valid: grpo"):
        estimator_sql(ESTIMATORS[name]())


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (steps(0, 1, 1), "episode 8, step_index 1: wrong step number"),
        (steps(0, reward=float("nan")), "episode 8, step_index 0: reward not finite"),
        (steps(0, episode_score=float("inf")), "episode 8: episode_score not finite"),
        (steps(0, status="done"), "episode 8, step_index 0: unknown status"),
    ],
)
def test_faults_stop_the_query_and_name_the_episode(name: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(duckdb.Error, match=message):
        run(name, rows).fetchall()


def test_further_faults() -> None:
    with pytest.raises(duckdb.Error, match="episode 8: a negative score has no ratio to a mean"):
        run("maxrl", steps(0, episode_score=-1.0)).fetchall()
    for column in ("value_estimate", "final_value_estimate"):
        with pytest.raises(duckdb.Error, match="episode 8, step_index 0: value not finite"):
            run("gae", steps(0, **{column: float("inf")})).fetchall()
