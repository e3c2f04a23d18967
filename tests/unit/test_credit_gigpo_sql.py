"""The SQL twin's own surface: its header, its options, its refusals. Parity is in tests/property."""

import re
from typing import Any

import duckdb
import pytest

from lake.errors import UsageError
from pipelines.credit import GiGPO
from pipelines.credit.columns import output_schema
from pipelines.credit.gigpo_sql import gigpo_relation, gigpo_sql
from testkit.credit_strategies import frame


def run(rows: list[dict[str, Any]], config: GiGPO | None = None) -> duckdb.DuckDBPyRelation:
    connection = duckdb.connect()
    connection.register("stored", frame(rows).to_arrow())
    return gigpo_relation(connection, config or GiGPO(), "stored")


def steps(*numbers: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"episode_id": 8, "group_id": 1, "step_index": i, "state_hash": 1, **columns} for i in numbers]


def test_the_header_names_every_option_and_every_output_column() -> None:
    header = gigpo_sql().split("WITH", 1)[0]
    assert all(line.startswith("--") for line in header.strip().splitlines())
    assert {"Grain", "Input", "Options", "Output"} <= set(re.findall(r"^-- (\w+)", header, re.MULTILINE))
    options = set(GiGPO.model_fields) - {"anchors"}
    assert set(re.findall(r"\$(\w+)", header)) == options | {"steps"}
    assert set(re.findall(r"\$(\w+)", gigpo_sql())) == options | {"steps"}
    for name in output_schema(frame([]).schema):
        assert name in header


def test_schema_and_order_are_the_estimators() -> None:
    rows = [*steps(0, 1, episode_score=1.0), *({**row, "episode_id": 7} for row in steps(0, episode_score=0.0))]
    found = run(rows).pl()
    assert found.schema == output_schema(frame([]).schema)
    assert found.select("episode_id", "step_index").rows() == [(7, 0), (8, 0), (8, 1)]


def test_similar_states_are_refused() -> None:
    with pytest.raises(UsageError, match="'similarity' cannot be computed in SQL"):
        run(steps(0), GiGPO(anchors={"kind": "similarity"}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (steps(0, 1, 1), "episode 8, step_index 1: wrong step number"),
        (steps(0, 2), "episode 8, step_index 2: wrong step number"),
        (steps(0, reward=float("nan")), "episode 8, step_index 0: reward not finite"),
        (steps(0, reward=float("-inf")), "episode 8, step_index 0: reward not finite"),
        (steps(0, episode_score=float("inf")), "episode 8: episode_score not finite"),
        (steps(0, status="done"), "episode 8, step_index 0: unknown status"),
        (steps(0, status=None), "episode 8, step_index 0: unknown status"),
        ([*steps(0), {**steps(0)[0], "group_id": 2}], "episode 8, step_index 0: wrong step number"),
    ],
)
def test_faults_stop_the_query_and_name_the_episode(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(duckdb.Error, match=message):
        run(rows).fetchall()


def test_a_wrong_number_of_an_inactive_step_stops_the_query_too() -> None:
    rows = steps(0, 1, 3)
    rows[2]["is_active"] = False
    with pytest.raises(duckdb.Error, match="step_index 3: wrong step number"):
        run(rows).fetchall()


def test_the_relation_is_named_by_parameter_only() -> None:
    with pytest.raises(duckdb.Error, match="does not exist"):
        gigpo_relation(duckdb.connect(), GiGPO(), "stored; DROP TABLE x").fetchall()
