"""Groups of siblings: the list, and one group's siblings.

`score` chooses the outcomes (`viewer.queries.outcomes`). A group is dead when two or more siblings are scored and all
scored the same: group-relative advantages are 0 there.
"""

from dataclasses import dataclass
from enum import StrEnum

import polars as pl

from lake.judgements.credit import Credit
from lake.judgements.selections import GROUPINGS
from viewer.queries import (
    Params,
    Reads,
    Row,
    Sort,
    Window,
    count,
    like,
    only_row,
    order_by,
    outcomes,
    themselves,
)

_GROUPS = """
    SELECT group_id, any_value(run_id) AS run_id, any_value(task_id) AS task_id,
           any_value(collection_round) AS collection_round, any_value(seed) AS seed, count(*) AS size,
           max(expected_group_size) AS expected_size, count(outcome) AS scored, avg(outcome) AS mean_return,
           stddev_samp(outcome) AS sd_return, min(outcome) AS lowest, max(outcome) AS highest,
           min(policy_version) AS first_version, max(policy_version) AS last_version, avg(num_steps) AS mean_steps,
           CASE WHEN count(outcome) < 2 THEN 'unjudged' WHEN min(outcome) = max(outcome) THEN 'dead'
                ELSE 'live' END AS signal
    FROM {episodes}
    """


class Signal(StrEnum):
    """Whether the outcomes of a group differ."""

    LIVE = "live"
    """Outcomes differ."""
    DEAD = "dead"
    """Two or more scored siblings, all the same."""
    UNJUDGED = "unjudged"
    """Fewer than two scored siblings."""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups; None filters nothing."""

    run: str | None = None
    task: str | None = None
    """Exact, or with `*` for anything."""
    signal: Signal | None = None
    collection_round: int | None = None
    score: str | None = None
    """The outcome that tells them apart."""
    grouping: str | None = None
    """Those of a grouping (`trajlake group`); None: as collected."""


# What the current credit found in each group, by its newest job.
_OF_CREDIT = """
    SELECT g.group_id, g.shared_steps / nullif(g.steps, 0) AS shared_share,
           g.error_steps / nullif(g.shared_steps, 0) AS error_share,
           g.empty_steps / nullif(g.shared_steps, 0) AS empty_share, g.last_actions_mean AS ways_in
    FROM credit_groups AS g JOIN job_runs AS r USING (job_id)
    WHERE g.series_id = (SELECT series_id FROM credit_series WHERE is_current)
    QUALIFY row_number() OVER (
        PARTITION BY g.group_id ORDER BY ended_order(r.sequence, r.ended_at, g.job_id) DESC
    ) = 1
    """
ORDERS = themselves(
    *("run_id", "collection_round", "signal", "size", "scored"),
    *("mean_return", "sd_return", "lowest", "highest", "mean_steps"),
    *("shared_share", "error_share", "empty_share", "ways_in"),
) | {"task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")}
"""Columns that may order the list."""
_USUAL_ORDER = "run_id, collection_round NULLS FIRST, TRY_CAST(task_id AS BIGINT) NULLS LAST, task_id, group_id"


def page(lake: Reads, wanted: GroupFilter, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """A page of the groups, by run, round and task if nothing else is asked for; sd_return is the sample deviation.

    By the current credit, NULL where it did not look: shared_share of the steps were taken from a state that siblings
    share, error_share of those from an error text, empty_share from a state that says nothing; ways_in is the mean
    number of distinct actions that led to them.
    """
    query, params = _filtered(lake, wanted)
    order = order_by(sort, ORDERS, _USUAL_ORDER)
    listed = f"""
        SELECT * FROM ({query}) LEFT JOIN ({_OF_CREDIT}) USING (group_id)
        ORDER BY {order} LIMIT $limit OFFSET $offset
        """
    return lake.sql(listed, params | window.params())


def groupings(lake: Reads) -> list[str]:
    """Names of the groupings, each draw by its own, in order."""
    return [name for name, _ in _groupings(lake)]


def _groupings(lake: Reads) -> list[tuple[str, int]]:
    """Each grouping with the job that its name means."""
    return lake.sql(GROUPINGS).select("grouping", "job_id").rows()


def total(lake: Reads, wanted: GroupFilter) -> int:
    """Number of groups of a filter."""
    query, params = _filtered(lake, wanted)
    return count(lake, f"SELECT count(*) FROM ({query})", params or None)


def group(lake: Reads, group_id: int, score: str | None = None) -> Row | None:
    """A group's row of `page`; None if there is no such group."""
    judged, params = outcomes.of_group(lake, group_id, score)
    query = f"{_GROUPS.format(episodes=judged)} WHERE group_id = $group GROUP BY group_id"
    return only_row(lake.sql(query, params | {"group": group_id}))


SIBLING_ORDERS = themselves(
    "rollout_index", "status", "outcome", "num_steps", "policy_version", "a_episode", "mean_advantage"
)
"""Columns that may order siblings."""


def siblings(
    lake: Reads,
    group_id: int,
    credit: Credit | None,
    window: Window,
    score: str | None = None,
    sort: Sort | None = None,
) -> pl.DataFrame:
    """The siblings of a group by rollout; a_episode (of the first step), mean_advantage: NULL without credit."""
    judged, params = outcomes.of_group(lake, group_id, score)
    members = lake.sql(f"SELECT episode_id FROM {judged} WHERE group_id = $group", params | {"group": group_id})
    chosen = credit.rows_of(lake, members["episode_id"]) if credit else "(SELECT * FROM advantages WHERE false)"
    query = f"""
        SELECT e.episode_id, e.rollout_index, e.attempt, e.status, e.outcome, e.num_steps, e.policy_version,
               arg_min(a.a_episode, a.step_index) AS a_episode, avg(a.advantage) AS mean_advantage
        FROM {judged} AS e LEFT JOIN {chosen} AS a ON a.episode_id = e.episode_id
        WHERE e.group_id = $group
        GROUP BY ALL ORDER BY {order_by(sort, SIBLING_ORDERS, "e.rollout_index, e.attempt, e.episode_id")}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"group": group_id} | window.params())


def strip(lake: Reads, group_id: int, score: str | None = None) -> pl.DataFrame:
    """Outcomes of all siblings, the lowest first, the unscored last.

    episode_id, rollout_index, attempt, status, outcome.
    """
    judged, params = outcomes.of_group(lake, group_id, score)
    query = f"""
        SELECT episode_id, rollout_index, attempt, status, outcome FROM {judged} WHERE group_id = $group
        ORDER BY outcome NULLS LAST, rollout_index, attempt, episode_id
        """
    return lake.sql(query, params | {"group": group_id})


def _filtered(lake: Reads, wanted: GroupFilter) -> tuple[str, Params]:
    """SQL of the groups of a filter, and its parameters."""
    task = None if wanted.task is None else like(wanted.task)
    clauses = {
        "run": ("run_id = $run", wanted.run),
        "task": (r"task_id LIKE $task ESCAPE '\'", task),
        "round": ("collection_round = $round", wanted.collection_round),
    }
    params: Params = {name: value for name, (_, value) in clauses.items() if value is not None}
    where = " AND ".join(clauses[name][0] for name in params) or "true"
    judged, of_outcome = outcomes.judged(lake, wanted.score, wanted.run)
    params |= of_outcome
    if wanted.grouping is not None:
        judged = outcomes.regrouped(judged, "grouping = $grouping AND job_id = $grouping_job")
        job = next((job for name, job in _groupings(lake) if name == wanted.grouping), None)
        params |= {"grouping": wanted.grouping, "grouping_job": job}
    query = f"{_GROUPS.format(episodes=judged)} WHERE {where} GROUP BY group_id"
    if wanted.signal is not None:
        query = f"SELECT * FROM ({query}) WHERE signal = $signal"
        params["signal"] = str(wanted.signal)
    return query, params
