"""Runs `pipelines/sql/gigpo.sql`: the same estimator for people who work in DuckDB.

Options travel as prepared parameters, the input relation by name; nothing is formatted into the query.
"""

from importlib.resources import files

import duckdb

from lake.errors import UsageError
from pipelines.credit.anchors import ExactText
from pipelines.credit.estimators.gigpo import GiGPO


def gigpo_sql() -> str:
    """The query's text, header comment included."""
    return (files("pipelines") / "sql" / "gigpo.sql").read_text(encoding="utf-8")


def gigpo_relation(connection: duckdb.DuckDBPyConnection, config: GiGPO, steps: str) -> duckdb.DuckDBPyRelation:
    """Advantages of the rows of a table or view, as `GiGPO.advantages` gives them.

    Args:
        connection: where `steps` is found.
        config: the estimator. Anchors must be exact text.
        steps: name of a relation with the nine columns that the query's header lists.

    Returns:
        The rows, sorted by (group_id, episode_id, step_index).

    Raises:
        UsageError: the anchors are not exact text.
        duckdb.Error: the relation lacks a column, or a row breaks the contract.
    """
    if not isinstance(config.anchors, ExactText):
        msg = (
            f"anchors {config.anchors.kind!r} cannot be computed in SQL. Use GiGPO.advantages, or write the keys it "
            "returns into state_hash and use exact anchors."
        )
        raise UsageError(msg)
    return connection.sql(gigpo_sql(), params={"steps": steps, **config.model_dump(exclude={"anchors"})})
