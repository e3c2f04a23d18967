"""The surface of the SQL twins: headers, options, refusals. Parity is in tests/property."""

import re
from typing import Any

import duckdb
import polars as pl
import pytest

from lake.errors import UsageError
from pipelines.credit import GiGPO
from pipelines.credit.columns import output_schema
from pipelines.credit.estimator_sql import estimator_relation, estimator_sql
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.estimators.protocol import Estimator
from testkit.credit_strategies import frame
from testkit.estimator_strategies import wide_frame

OPTIONS: dict[str, dict[str, Any]] = {name: {"batch_key": "all"} for name in ESTIMATORS if "pp" in name}
OPTIONS |= {"batch_std": {"batch_key": "all"}, "gdpo": {"batch_key": "all", "components": {"a": 1.0}}}
each = pytest.mark.parametrize("name", ESTIMATORS)


def build(name: str) -> Estimator:
    return ESTIMATORS[name].model_validate(OPTIONS.get(name, {}))


def steps(*numbers: int | None, **columns: Any) -> list[dict[str, Any]]:
    return [{"episode_id": 8, "group_id": 1, "step_index": i, "value_estimate": 0.0, **columns} for i in numbers]


def run(estimator: Estimator, rows: list[dict[str, Any]]) -> duckdb.DuckDBPyRelation:
    connection = duckdb.connect()
    connection.register("stored", wide_frame(rows).to_arrow())
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
    for column in output_schema(frame([]).schema):
        assert column in header
    assert "-- include" not in text


@each
def test_schema_and_order_are_the_estimators(name: str) -> None:
    known = {"episode_score": 1.0, "reward": 1.0, "state_hash": 1, "completion_tokens": 3, "score_a": 1.0}
    rows = [*steps(0, 1, **known), *steps(0, **known | {"episode_id": 7})]
    found = run(build(name), rows).pl()
    assert found.schema == output_schema(frame([]).schema)
    assert found.select("episode_id", "step_index").rows() == [(7, 0), (8, 0), (8, 1)]


class Stranger(GRPO):
    name = "stranger"


def test_an_estimator_of_somebody_elses_has_no_twin() -> None:
    with pytest.raises(UsageError, match=r"stranger has no SQL twin; those that have: batch_std, .*, rloo$"):
        estimator_sql(Stranger())


@pytest.mark.parametrize("name", ["gigpo", "gigpo_loo", "hgpo"])
def test_similar_states_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="'similarity' cannot be computed in SQL"):
        run(ESTIMATORS[name].model_validate({"anchors": {"kind": "similarity"}}), steps(0))


@each
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (steps(0, 1, 1), "episode 8, step_index 1: wrong step number"),
        (steps(0, 2), "episode 8, step_index 2: wrong step number"),
        (steps(0, reward=float("nan")), "episode 8, step_index 0: reward not finite"),
        (steps(0, reward=float("-inf")), "episode 8, step_index 0: reward not finite"),
        (steps(0, episode_score=float("inf"), score_a=float("inf")), "episode 8: episode_score not finite"),
        (steps(0, status="done"), "episode 8, step_index 0: unknown status"),
        (steps(0, status=None), "episode 8, step_index 0: unknown status"),
        ([*steps(0), {**steps(0)[0], "group_id": 2}], "episode 8, step_index 0: wrong step number"),
        ([*steps(0, 1), *steps(3, is_active=False)], "step_index 3: wrong step number"),
        ([*steps(0), {**steps(0)[0], "episode_id": None}], "steps: episode_id is NULL"),
        (steps(0, group_id=None), "steps: group_id is NULL"),
        ([*steps(0, 1), *steps(None, is_active=False)], "steps: step_index is NULL"),
    ],
)
def test_faults_stop_the_query_and_name_the_episode(name: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(duckdb.Error, match=message):
        run(build(name), rows).fetchall()


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("maxrl", steps(0, episode_score=-1.0), "episode 8: a negative score has no ratio to a mean"),
        ("gae", steps(0, value_estimate=float("inf")), "episode 8, step_index 0: value not finite"),
        ("gae", steps(0, final_value_estimate=float("inf")), "episode 8, step_index 0: value not finite"),
        ("gdpo", [*steps(0, score_a=1.0), *steps(1, score_a=2.0)], "episode 8: a component has no column score_<name>"),
    ],
)
def test_further_faults(name: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(duckdb.Error, match=message):
        run(build(name), rows).fetchall()


def test_a_component_without_a_column_stops_the_query() -> None:
    estimator = ESTIMATORS["gdpo"].model_validate({"batch_key": "all", "components": {"a": 1.0, "z": 1.0}})
    with pytest.raises(UsageError, match="stored: column score_z is missing"):
        run(estimator, steps(0, score_a=1.0))
    connection = duckdb.connect()
    connection.register("stored", wide_frame(steps(0, score_a=1.0)).to_arrow())
    options = estimator.model_dump() | {"components": {"key": ["a", "z"], "value": [1.0, 1.0]}}
    with pytest.raises(duckdb.Error, match="episode 8: a component has no column"):
        connection.sql(estimator_sql(estimator), params={"steps": "stored", **options}).fetchall()


def test_a_batch_key_without_a_column_stops_the_query() -> None:
    with pytest.raises(UsageError, match="stored: column nowhere is missing"):
        run(ESTIMATORS["reinforce_pp"].model_validate({"batch_key": "nowhere"}), steps(0))


def test_lengths_are_finite() -> None:
    rows = wide_frame(steps(0, episode_score=1.0)).with_columns(completion_tokens=float("nan"))
    connection = duckdb.connect()
    connection.register("stored", rows.to_arrow())
    with pytest.raises(duckdb.Error, match="episode 8: completion_tokens not finite"):
        estimator_relation(connection, build("opo"), "stored").fetchall()


def test_the_relation_is_named_by_parameter_only() -> None:
    with pytest.raises(duckdb.Error, match="does not exist"):
        estimator_relation(duckdb.connect(), GiGPO(), "stored; DROP TABLE x").fetchall()


def lean(config: Estimator, *names: str, **columns: Any) -> duckdb.DuckDBPyRelation:
    """Over a relation that has no other columns than these."""
    connection = duckdb.connect()
    rows = wide_frame([{"episode_id": e, "group_id": 1, "step_index": i, **columns} for e in (7, 8) for i in (0, 1)])
    rows = rows.with_columns(episode_score=pl.col("episode_id").cast(pl.Float64))
    connection.register("stored", rows.select("episode_id", "group_id", "step_index", *names).to_arrow())
    return estimator_relation(connection, config, "stored")


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("opo", {"length": "steps"}, ("episode_score",)),
        ("grpo", {}, ("episode_score",)),
        ("rloo", {}, ("episode_score",)),
        ("batch_std", {"batch_key": "all"}, ("episode_score",)),
        ("gigpo", {"step_source": "terminal_score"}, ("state_hash", "episode_score")),
    ],
)
def test_columns_that_a_configuration_does_not_need_may_be_absent(
    name: str, options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    config = ESTIMATORS[name].model_validate(options)
    found = lean(config, *columns, state_hash=5).pl()
    rows = wide_frame(
        [{"episode_id": e, "group_id": 1, "step_index": i, "state_hash": 5} for e in (7, 8) for i in (0, 1)]
    )
    rows = rows.with_columns(episode_score=pl.col("episode_id").cast(pl.Float64))
    expected = config.advantages(rows.lazy().select("episode_id", "group_id", "step_index", *columns)).collect()
    assert found["advantage"].to_list() == pytest.approx(expected["advantage"].to_list(), abs=1e-9)
    assert found["advantage"].null_count() == 0
    assert found["flags"].to_list() == expected["flags"].to_list()


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("opo", {}, "completion_tokens"),
        ("gigpo", {}, "state_hash"),
        ("hgpo", {}, "state_hash"),
        ("gae", {}, "value_estimate"),
        ("batch_std", {"batch_key": "policy_version"}, "policy_version"),
        ("gdpo", {"batch_key": "all", "components": {"mine": 1.0}}, "score_mine"),
    ],
)
def test_a_column_that_is_needed_and_absent_is_named(name: str, options: dict[str, Any], missing: str) -> None:
    config = ESTIMATORS[name].model_validate(options)
    with pytest.raises(
        UsageError, match=rf"^stored: column .*{missing}.* is missing \(found: episode_id, group_id, "
    ) as told:
        lean(config, "episode_score", "reward")
    assert "\n" not in str(told.value)


def test_a_number_too_large_is_told_as_such() -> None:
    with pytest.raises(duckdb.Error, match="episode 8, step_index 0: reward not finite, or beyond 1e100"):
        run(build("grpo"), steps(0, reward=1e308, episode_score=1.0)).fetchall()
