"""SQL twins of estimators, for DuckDB: GiGPO and the estimators with one comparison of siblings.

The query is `pipelines/sql/NAME.sql`; its lines `-- include PART` include files of `pipelines/sql/parts/`. One part
checks the steps, so a twin refuses what the job refuses. Options are prepared parameters, and the input relation is a
name. Fixed text replaces absent columns.
"""

import re
from importlib.resources import files
from typing import Any

import duckdb

from lake.errors import UsageError
from pipelines.credit.anchors.definitions import ExactText
from pipelines.credit.estimators.protocol import Estimator

_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
_UNPENALISED = {"baseline": "trajectories", "singleton": "zero", "invalid_action_penalty": 0.0}
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "dr_grpo": ("siblings", {"scaling": "mean_norm"}),
    "gigpo": ("gigpo", {}),
    "grpo": ("siblings", {"scaling": "mean_std_norm"}),
    "maxrl": ("siblings", {"scaling": "mean_ratio", **_UNPENALISED}),
    "rloo": ("siblings", {"scaling": "leave_one_out", **_UNPENALISED}),
}
"""Estimator -> its query, and the query's options that the estimator fixes."""

STATE_HASH = "state_hash"
_INPUT = "query_table($steps)"
_DEFAULTS = {
    "reward": "NULL::DOUBLE",
    "episode_score": "NULL::DOUBLE",
    "status": "'completed'",
    "is_active": "true",
    "is_action_valid": "true",
}
"""Replacements of absent optional columns, as in `Estimator.advantages`."""


def estimator_sql(config: Estimator) -> str:
    """Return the query of an estimator, header comment included; UsageError if it has no SQL twin."""
    if config.name not in TWINS:
        msg = f"{config.name} has no SQL twin; estimators with one: {', '.join(TWINS)}"
        raise UsageError(msg)
    folder = files("pipelines") / "sql"
    text = (folder / f"{TWINS[config.name][0]}.sql").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda line: (folder / "parts" / f"{line[1]}.sql").read_text(encoding="utf-8"), text)


def estimator_relation(connection: duckdb.DuckDBPyConnection, config: Estimator, steps: str) -> duckdb.DuckDBPyRelation:
    """Return the advantages of the rows of a table or view, as `config.advantages` does, in canonical order.

    The query's header lists the columns of the relation. Columns that the configuration does not need may be absent.

    Raises:
        UsageError: the estimator has no SQL twin, its anchors are not exact text, or the relation lacks a column.
        duckdb.Error: there is no such relation, or a row breaks the contract.
    """
    text = estimator_sql(config)
    anchors = getattr(config, "anchors", ExactText())
    if not isinstance(anchors, ExactText):
        msg = (
            f"anchors {anchors.kind!r} cannot be computed in SQL. Use the estimator's `advantages`, or write the keys "
            "that it returns into state_hash and use exact anchors."
        )
        raise UsageError(msg)
    options = TWINS[config.name][1] | config.model_dump(exclude={"anchors"})
    present = connection.sql("FROM query_table($steps) LIMIT 0", params={"steps": steps}).columns
    required = config.input_needs((STATE_HASH,)).required
    if missing := [name for name in required if name not in present]:
        hint = "; the twin compares states by that hash, not by text" if STATE_HASH in missing else ""
        msg = (
            f"{steps}: column {', '.join(missing)} is missing (found: {', '.join(present)}). The SQL twin of "
            f"{config.name} reads {', '.join(required)}{hint}"
        )
        raise UsageError(msg)
    filled = [f"{value} AS {name}" for name, value in _DEFAULTS.items() if name not in present]
    if filled:
        text = text.replace(_INPUT, f"(SELECT *, {', '.join(filled)} FROM {_INPUT})")
    return connection.sql(text, params={"steps": steps, **options})
