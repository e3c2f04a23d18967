"""What a training job took in: how often, of what, and what became of the rest.

Shares are of the loss: what an episode's tokens weighed in the updates, added up (`batches.loss_weight`), or of the
trained tokens where that is not on record.
"""

from dataclasses import dataclass
from typing import Literal

import polars as pl

from lake import ids
from lake.documents import json_object
from viewer.queries import Reads, Row, only_row
from viewer.queries.training import credit_of

MOST = 50
"""Rows of a breakdown at most."""

By = Literal["run_id", "task_id", "collection_round", "policy_version", "source_format"]
"""What a mixture is broken down by."""


def times(lake: Reads, job_id: int) -> pl.DataFrame:
    """How often a job trained on its episodes, their most trained step: times, episodes; at most `MOST`."""
    query = f"""
        SELECT times::BIGINT AS times, count(*) AS episodes
        FROM (SELECT episode_id, max(times) AS times FROM step_seen WHERE job_id = $job GROUP BY episode_id)
        GROUP BY times ORDER BY times LIMIT {MOST}
        """
    return lake.sql(query, {"job": job_id})


def trained_so_often(job_id: int, times: int) -> str:
    """A query that names the episodes that a job trained on so many times."""
    mine = f"SELECT episode_id FROM step_seen WHERE job_id = id('{ids.to_text(job_id)}')"
    return f"{mine} GROUP BY episode_id HAVING max(times) = {times}"


def mixture(lake: Reads, job_id: int, by: By) -> pl.DataFrame:
    """Of what a job trained: value (NULL: not known), episodes, rows, action_tokens, share; the largest share first.

    share is of the loss weight, or of the trained tokens where no weights are on record.
    """
    query = f"""
        WITH mine AS (
            SELECT b.episode_id, b.action_tokens, b.loss_weight, e.{by}::VARCHAR AS value
            FROM trained_batches AS b LEFT JOIN episodes AS e USING (episode_id) WHERE b.job_id = $job
        ),
        total AS (SELECT sum(loss_weight) AS weight, count(*) = count(loss_weight) AS is_weighed,
                         sum(action_tokens) AS tokens FROM mine)
        SELECT value, count(DISTINCT episode_id) AS episodes, count(*) AS rows,
               sum(action_tokens)::BIGINT AS action_tokens,
               if(any_value(is_weighed), sum(loss_weight) / any_value(weight), sum(action_tokens) / any_value(tokens))
               AS share
        FROM mine, total GROUP BY value ORDER BY share DESC, value LIMIT {MOST}
        """
    return lake.sql(query, {"job": job_id})


def is_weighed(lake: Reads, job_id: int) -> bool:
    """Whether the weights of all that a job consumed are on record."""
    query = "SELECT count(*) = count(loss_weight) FROM trained_batches WHERE job_id = $job"
    return bool(lake.sql(query, {"job": job_id}).item())


@dataclass(frozen=True, slots=True)
class Stage:
    """A line of the funnel."""

    name: str
    episodes: int | None
    """None where it counts steps alone."""
    steps: int | None
    sql: str | None
    """A query that names its episodes, where one can."""
    is_drop: bool = False
    """It says what was left out, and why."""


def funnel(lake: Reads, job_id: int) -> list[Stage]:
    """From the episodes of the lake to what a job trained on, in order; what is not on record is left out.

    The drops by reason come between what was selected and what was trained on.
    """
    row = only_row(lake.sql("SELECT parameters, counts FROM job_runs WHERE job_id = ?", [job_id]))
    if row is None:
        return []
    parameters, counts = (json_object(row[name]) for name in ("parameters", "counts"))
    query = "SELECT count(DISTINCT episode_id), count(*) FROM step_seen WHERE job_id = ?"
    episodes, steps = lake.sql(query, [job_id]).row(0)
    mine = f"SELECT episode_id FROM trained_batches WHERE job_id = id('{ids.to_text(job_id)}')"
    chosen = _chosen(parameters)
    found = [Stage("In the lake", counts["episodes_in_lake"], None, None)] if "episodes_in_lake" in counts else []
    job_counts = only_row(lake.sql("SELECT rows_in, rows_dropped FROM job_runs WHERE job_id = ?", [job_id])) or {}
    selected, nothing = job_counts.get("rows_in"), job_counts.get("rows_dropped")
    if selected is not None:
        found.append(Stage(_how(parameters), selected, None, chosen))
    found += _drops(lake, job_id, counts, chosen)
    if nothing:
        left = None if chosen is None else f"{chosen} AND episode_id NOT IN ({mine})"
        found.append(Stage("Nothing left to train on", nothing, None, left, is_drop=True))
    return [*found, Stage("Trained on", episodes, steps, f"SELECT DISTINCT {mine.removeprefix('SELECT ')}")]


def _how(parameters: Row) -> str:
    """What selected the episodes, in words."""
    said = [f"where {parameters['where']}"] if parameters.get("where") else []
    said += [f"selection {parameters['selection']}"] if parameters.get("selection") else []
    said += ["mixture"] if parameters.get("mixture") else []
    return f"Selected ({', '.join(said)})" if said else "Selected (all)"


def _chosen(parameters: Row) -> str | None:
    """SQL of the episodes that the predicate names; None where more than a predicate decided."""
    if parameters.get("selection") or parameters.get("mixture") or parameters.get("validation"):
        return None
    return f"SELECT episode_id FROM episodes WHERE (\n{parameters.get('where') or 'true'}\n)"


_OF_STEPS = {
    "inactive": "NOT is_active",
    "copied_context": "is_copied_context",
    "not_trainable": "NOT trainable",
}
"""Reasons that a column of `steps` tells."""
_OF_CREDIT = {
    "dead_group": "list_has_any(string_split(flags, ','), ['dead_group', 'singleton_group'])",
    "no_advantage": "advantage IS NULL",
}
"""Reasons that the credit tells."""


def _drops(lake: Reads, job_id: int, counts: Row, chosen: str | None) -> list[Stage]:
    """Steps that carried no loss, by reason, the most first."""
    drops = {name.removeprefix("dropped_"): n for name, n in counts.items() if name.startswith("dropped_")}
    credit = credit_of(lake, job_id) if drops.keys() & _OF_CREDIT.keys() else None
    found = []
    for reason, steps in sorted(drops.items(), key=lambda drop: -drop[1]):
        named = None
        if reason in _OF_STEPS:
            named = f"SELECT episode_id FROM steps WHERE {_OF_STEPS[reason]}"
        elif reason in _OF_CREDIT and credit is not None:
            named = f"SELECT episode_id FROM {credit.rows} WHERE {_OF_CREDIT[reason]}"
        sql = None if named is None or chosen is None else f"{chosen} AND episode_id IN ({named})"
        found.append(Stage(reason.replace("_", " "), None, steps, sql, is_drop=True))
    return found
