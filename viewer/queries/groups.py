"""Groups of siblings: the list, one group's siblings, and the anchor states that they share.

`score` chooses the outcomes (`viewer.queries.outcomes`). A group is dead when two or more siblings are scored and all
scored the same: group-relative advantages are 0 there.
"""

from dataclasses import dataclass
from enum import StrEnum

import polars as pl

from lake.judgements.credit import Credit
from viewer.queries import (
    EXCERPT,
    Params,
    Reads,
    Row,
    Sort,
    Window,
    count,
    is_empty,
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


ORDERS = themselves(
    *("run_id", "collection_round", "signal", "size", "scored"),
    *("mean_return", "sd_return", "lowest", "highest", "mean_steps"),
) | {"task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")}
"""Columns that may order the list."""
_USUAL_ORDER = "run_id, collection_round NULLS FIRST, TRY_CAST(task_id AS BIGINT) NULLS LAST, task_id, group_id"


def page(lake: Reads, wanted: GroupFilter, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """A page of the groups, by run, round and task if nothing else is asked for; sd_return is the sample deviation."""
    query, params = _filtered(lake, wanted)
    order = order_by(sort, ORDERS, _USUAL_ORDER)
    return lake.sql(f"SELECT * FROM ({query}) ORDER BY {order} LIMIT $limit OFFSET $offset", params | window.params())


def total(lake: Reads, wanted: GroupFilter) -> int:
    """Number of groups of a filter."""
    query, params = _filtered(lake, wanted)
    return count(lake, f"SELECT count(*) FROM ({query})", params or None)


def group(lake: Reads, group_id: int, score: str | None = None) -> Row | None:
    """A group's row of `page`; None if there is no such group."""
    judged, params = outcomes.judged(lake, score)
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
    judged, params = outcomes.judged(lake, score)
    chosen = credit.rows if credit else "(SELECT * FROM advantages WHERE false)"
    query = f"""
        SELECT e.episode_id, e.rollout_index, e.attempt, e.status, e.outcome, e.num_steps, e.policy_version,
               arg_min(a.a_episode, a.step_index) AS a_episode, avg(a.advantage) AS mean_advantage
        FROM {judged} AS e LEFT JOIN {chosen} AS a ON a.episode_id = e.episode_id
        WHERE e.group_id = $group
        GROUP BY ALL ORDER BY {order_by(sort, SIBLING_ORDERS, "e.rollout_index, e.attempt, e.episode_id")}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"group": group_id} | window.params())


def anchor_shares(lake: Reads, group_id: int, credit: Credit) -> Row:
    """How many steps of a group sit in which anchors: steps, shared (two episodes or more), alone (one step)."""
    query = f"""
        SELECT count(*) AS steps, count(*) FILTER (anchor_episodes > 1) AS shared,
               count(*) FILTER (anchor_size = 1) AS alone
        FROM {credit.rows} WHERE group_id = $group
        """
    return lake.sql(query, {"group": group_id}).row(0, named=True)


ANCHOR_ORDERS = themselves(
    "size", "episodes", "actions", "spread", "lowest", "highest", "mean_step", "ways_in", "doubt"
)
"""Columns that may order anchor states."""


def anchors(lake: Reads, group_id: int, credit: Credit, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """Anchor states that two or more episodes of a group passed, the most shared first.

    size is in steps, actions are the distinct ones taken there, ways_in the distinct ones that led there; lowest,
    highest and spread are of the return-to-go. doubt says why the state may stand for several: an error, or empty.
    """
    query = f"""
        SELECT a.anchor_key, count(*) AS size, count(DISTINCT a.episode_id) AS episodes,
               count(DISTINCT (s.action, s.tool_calls)) AS actions, min(a.return_to_go) AS lowest,
               max(a.return_to_go) AS highest, max(a.return_to_go) - min(a.return_to_go) AS spread,
               avg(a.step_index) AS mean_step, left(arg_min(s.state, a.step_index), {EXCERPT}) AS state,
               count(DISTINCT s.led_here) AS ways_in,
               CASE WHEN bool_or(s.state_is_error) THEN 'error text'
                    WHEN bool_and({is_empty("s.state")}) THEN 'empty' END AS doubt
        FROM {credit.rows} AS a
        JOIN {_steps(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        WHERE a.group_id = $group AND a.anchor_key IS NOT NULL
        GROUP BY a.anchor_key HAVING count(DISTINCT a.episode_id) > 1
        ORDER BY {order_by(sort, ANCHOR_ORDERS, "episodes DESC, size DESC, a.anchor_key")} LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, {"group": group_id} | window.params())


def anchors_total(lake: Reads, group_id: int, credit: Credit) -> int:
    """Number of rows of `anchors`."""
    query = f"""
        SELECT count(*) FROM (
            SELECT anchor_key FROM {credit.rows} WHERE group_id = $group AND anchor_key IS NOT NULL
            GROUP BY anchor_key HAVING count(DISTINCT episode_id) > 1
        )
        """
    return count(lake, query, {"group": group_id})


def visits(
    lake: Reads, group_id: int, anchor_key: int, credit: Credit, window: Window, score: str | None = None
) -> pl.DataFrame:
    """The steps of a group that were taken from an anchor state, by rollout and step; texts are cut."""
    judged, params = outcomes.judged(lake, score)
    query = f"""
        SELECT a.episode_id, e.rollout_index, a.step_index, left(s.action, {EXCERPT}) AS action,
               left(s.tool_calls, {EXCERPT}) AS tool_calls, s.reward, a.return_to_go, a.a_step, a.advantage,
               e.outcome
        FROM {credit.rows} AS a
        JOIN {_steps(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        JOIN {judged} AS e ON e.episode_id = a.episode_id
        WHERE a.group_id = $group AND a.anchor_key = $anchor
        ORDER BY e.rollout_index, e.attempt, a.episode_id, a.step_index LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"group": group_id, "anchor": anchor_key} | window.params())


def _steps(lake: Reads, group_id: int) -> str:
    """SQL of a group's steps, each with the action before it as `led_here`.

    Its episodes are named one by one: their files are found, and no other is read.
    """
    found = lake.sql("SELECT episode_id FROM episodes WHERE group_id = ?", [group_id])["episode_id"]
    return f"""(
        SELECT *, lag((action, tool_calls)) OVER (PARTITION BY episode_id ORDER BY step_index) AS led_here
        FROM steps WHERE episode_id IN ({", ".join(map(str, found)) or "NULL"})
    )"""


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
    query = f"{_GROUPS.format(episodes=judged)} WHERE {where} GROUP BY group_id"
    if wanted.signal is not None:
        query = f"SELECT * FROM ({query}) WHERE signal = $signal"
        params["signal"] = str(wanted.signal)
    return query, params
