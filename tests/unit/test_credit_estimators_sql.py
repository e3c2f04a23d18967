"""The surface of the SQL twins: headers, options, refusals. Parity is in tests/property."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

import duckdb
import polars as pl
import pytest

from lake.errors import ContractError, UsageError
from pipelines.credit import GiGPO
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.estimators.sql import TWINS, estimator_relation, estimator_sql
from pipelines.credit.steps import make_output_schema
from testkit.credit_strategies import frame
from testkit.examples import mostly_slow

each = pytest.mark.parametrize("name", TWINS)


def build(name: str) -> Estimator:
    return ESTIMATORS[name]()


def steps(*numbers: int | None, **columns: Any) -> list[dict[str, Any]]:
    return [{"episode_id": 8, "group_id": 1, "step_index": i, **columns} for i in numbers]


@cache
def database() -> duckdb.DuckDBPyConnection:
    """A database in memory: to open one costs more than what a test asks."""
    return duckdb.connect(config={"threads": 1})


def run(estimator: Estimator, rows: list[dict[str, Any]]) -> duckdb.DuckDBPyRelation:
    connection = database()
    connection.register("stored", frame(rows).to_arrow())
    return estimator_relation(connection, estimator, "stored")


@each
def test_the_header_names_every_option_and_every_output_column(name: str) -> None:
    text = estimator_sql(build(name))
    header = text.split("WITH", 1)[0]
    assert all(line.startswith("--") for line in header.strip().splitlines())
    assert {"Grain", "Input", "Options", "Output"} <= set(re.findall(r"^-- (\w+)", header, re.MULTILINE))
    assert f"{name}.py" in header or name in re.findall(r"\w+", header)
    used = set(re.findall(r"\$(\w+)", text))
    assert used == set(re.findall(r"\$(\w+)", header))
    assert set(ESTIMATORS[name].model_fields) - {"anchors"} <= used
    for column in make_output_schema(frame([]).schema):
        assert column in header
    assert "-- include" not in text


@each
def test_schema_and_order_are_the_estimators(name: str) -> None:
    defaults = {"episode_score": 1.0, "reward": 1.0, "state_hash": 1}
    rows = [*steps(0, 1, **defaults), *steps(0, **defaults | {"episode_id": 7})]
    actual = run(build(name), rows).pl()
    assert actual.schema == make_output_schema(frame([]).schema)
    assert actual.select("episode_id", "step_index").rows() == [(7, 0), (8, 0), (8, 1)]


class Stranger(GRPO):
    name = "stranger"


@pytest.mark.parametrize("config", [ESTIMATORS["hgpo"](), ESTIMATORS["reinforce_pp"](batch_key="all"), Stranger()])
def test_of_an_estimator_without_a_twin_those_that_have_one_are_listed(config: Estimator) -> None:
    with pytest.raises(UsageError) as error:
        run(config, steps(0))
    text = str(error.value)
    assert text.startswith(f"{config.name} has no SQL twin")
    assert text.endswith(", ".join(sorted(TWINS)))


def test_similar_states_are_refused() -> None:
    with pytest.raises(UsageError, match="'similarity' cannot be computed"):
        run(GiGPO(anchors={"kind": "similarity"}), steps(0))


@each
def test_nothing_but_the_check_reads_the_steps(name: str) -> None:
    text = estimator_sql(build(name))
    assert (files("pipelines") / "sql" / "parts" / "checked_steps.sql").read_text("utf-8") in text
    assert len(re.findall(r"\bgiven$", text, re.MULTILINE)) == 1
    assert len(re.findall(r"query_table", text)) == 1
    assert re.findall(r"FROM (?:numbered|checked)", text) == ["FROM numbered", "FROM checked"]


ANOTHER_GROUP = [*steps(0), *steps(1, group_id=2)]
NULL_GROUP = [*steps(0), *steps(1, group_id=None)]
SECOND_SCORE = [*steps(0, episode_score=1.0), *steps(1, episode_score=None)]


@pytest.mark.parametrize("name", mostly_slow(TWINS, "gigpo"))
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (steps(0, 1, 1), "episode 8, step_index 1: duplicate, missing or negative step"),
        (steps(0, 2), "episode 8, step_index 2: duplicate, missing or negative step"),
        ([*steps(0, 1), *steps(3, is_active=False)], "step_index 3: duplicate, missing or negative step"),
        ([*steps(0), *steps(0, group_id=2)], "step_index 0: duplicate, missing or negative step"),
        (ANOTHER_GROUP, "episode 8, step_index 1: another group than the step before"),
        (NULL_GROUP, "episode 8, step_index 1: group_id is NULL"),
        ([*steps(0), {**steps(0)[0], "episode_id": None}], "step_index 0: episode_id is NULL"),
        ([*steps(0, 1), *steps(None, is_active=False)], "episode 8: step_index is NULL"),
        (steps(0, status="done"), "episode 8, step_index 0: status is invalid; valid: completed"),
        (steps(0, status=None, is_active=False), "episode 8, step_index 0: status is invalid; valid: completed"),
        ([*steps(0), *steps(1, status="truncated")], "episode 8, step_index 1: another status than the step before"),
        (SECOND_SCORE, "episode 8, step_index 1: another episode_score than the step before"),
        (steps(0, reward=float("nan")), "episode 8, step_index 0: reward is not a finite number"),
        (steps(0, reward=float("-inf")), "episode 8, step_index 0: reward is not a finite number"),
        (steps(0, reward=1e308, episode_score=1.0), "reward is not a finite number below 1e100"),
        (steps(0, episode_score=float("inf")), "episode 8, step_index 0: episode_score is not a finite number"),
    ],
)
def test_what_the_job_refuses_stops_the_query(name: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ContractError):
        build(name).advantages(frame(rows).lazy()).collect()
    with pytest.raises(duckdb.Error, match=f"steps: .*{message}"):
        run(build(name), rows).fetchall()


@each
def test_what_the_job_takes_stops_no_query(name: str) -> None:
    odd = {"reward": None, "episode_score": None, "is_active": None, "state_hash": None}
    rows = [*steps(0, **odd), *steps(1, **odd | {"is_active": False, "reward": float("nan")})]
    expected = build(name).advantages(frame(rows).lazy()).collect()
    assert run(build(name), rows).pl().rows() == expected.rows()
    assert len(expected) == 1


def test_a_negative_score_has_no_ratio_to_a_mean() -> None:
    with pytest.raises(duckdb.Error, match="episode 8: a negative score has no ratio to a mean"):
        run(build("maxrl"), steps(0, episode_score=-1.0)).fetchall()


def test_the_relation_is_named_by_parameter_only() -> None:
    with pytest.raises(duckdb.Error, match="does not exist"):
        estimator_relation(database(), GiGPO(), "stored; DROP TABLE x").fetchall()


def lean(config: Estimator, *names: str) -> tuple[duckdb.DuckDBPyRelation, pl.LazyFrame]:
    """The twin over a relation that has no other columns than these, and the relation."""
    rows = frame([{"episode_id": e, "group_id": 1, "step_index": i, "state_hash": 5} for e in (7, 8) for i in (0, 1)])
    rows = rows.with_columns(episode_score=pl.col("episode_id").cast(pl.Float64))
    rows = rows.select("episode_id", "group_id", "step_index", *names)
    connection = database()
    connection.register("stored", rows.to_arrow())
    return estimator_relation(connection, config, "stored"), rows.lazy()


@pytest.mark.parametrize(
    ("config", "columns"),
    [
        (GRPO(), ("episode_score",)),
        (build("rloo"), ("episode_score",)),
        (GiGPO(step_source="terminal_score"), ("state_hash", "episode_score")),
    ],
)
def test_columns_that_a_configuration_does_not_need_may_be_absent(config: Estimator, columns: tuple[str, ...]) -> None:
    twin, rows = lean(config, *columns)
    actual, expected = twin.pl(), config.advantages(rows).collect()
    assert actual["advantage"].to_list() == pytest.approx(expected["advantage"].to_list(), abs=1e-9)
    assert actual["advantage"].null_count() == 0
    assert actual["flags"].to_list() == expected["flags"].to_list()


@pytest.mark.parametrize(
    ("config", "missing"),
    [(GRPO(), "episode_score"), (GRPO(episode_source="sum_rewards"), "reward"), (GiGPO(), "state_hash")],
)
def test_a_column_that_is_needed_and_absent_is_named(config: Estimator, missing: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^stored: column .*{missing}.* is missing \(found: episode_id, group_id, "
    ) as error:
        lean(config)
    assert "\n" not in str(error.value)
