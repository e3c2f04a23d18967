"""Runs the SQL twins of the estimators, for people who work in DuckDB: `pipelines/sql/{siblings,gae}.sql`.

Options travel as prepared parameters, the input relation by name; nothing is formatted into the query. GiGPO's own twin
is in `gigpo_sql.py`.
"""

from importlib.resources import files
from typing import Any

import duckdb

from lake.errors import UsageError
from pipelines.credit.estimators.gae import GAE
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.estimators.siblings import PenalisedSiblings, ScaledSiblings

_PLAIN = {"baseline": "trajectories", "singleton": "zero", "invalid_action_penalty": 0.0}


def estimator_sql(config: Estimator) -> str:
    """Text of the query that computes an estimator, header comment included.

    Raises:
        UsageError: the estimator has no SQL twin here.
    """
    return _query(config)[0]


def estimator_relation(connection: duckdb.DuckDBPyConnection, config: Estimator, steps: str) -> duckdb.DuckDBPyRelation:
    """Advantages of the rows of a table or view, as `config.advantages` gives them.

    Args:
        connection: where `steps` is found.
        config: one of grpo, dr_grpo, rloo, maxrl, gae.
        steps: name of a relation with the columns that the query's header lists.

    Returns:
        The rows, sorted by (group_id, episode_id, step_index).

    Raises:
        UsageError: the estimator has no SQL twin here.
        duckdb.Error: the relation lacks a column, or a row breaks the contract.
    """
    text, options = _query(config)
    return connection.sql(text, params={"steps": steps, **options})


def _query(config: Estimator) -> tuple[str, dict[str, Any]]:
    if isinstance(config, PenalisedSiblings | ScaledSiblings):
        return _text("siblings.sql"), {"scaling": config.scaling, **_PLAIN, **config.model_dump()}
    if isinstance(config, GAE):
        return _text("gae.sql"), config.model_dump()
    msg = (
        f"{config.name} has no SQL twin here. Valid: grpo, dr_grpo, rloo, maxrl, gae, and gigpo through "
        "pipelines.credit.gigpo_sql. Use its `advantages`, which gives the same columns."
    )
    raise UsageError(msg)


def _text(name: str) -> str:
    return (files("pipelines") / "sql" / name).read_text(encoding="utf-8")
