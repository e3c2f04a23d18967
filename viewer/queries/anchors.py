"""Anchor states: those that the siblings of a group share, and why one may be false.

An anchor is false if its steps stand for several situations: then A_S compares what cannot be compared. An error text
or an empty state is reached from anywhere; so is one that many different actions lead to. Sums of |A_S| say how much
of the step advantages an anchor makes.
"""

import polars as pl

from lake.judgements.credit import Credit
from viewer.queries import EXCERPT, Reads, Row, Sort, Window, count, is_empty, order_by, outcomes, themselves
from viewer.queries.side_by_side import taken

ORDERS = themselves(
    *("size", "episodes", "actions", "spread", "lowest", "highest", "mean_step", "ways_in", "states", "share", "doubt")
)
"""Columns that may order anchor states."""


def shares(lake: Reads, group_id: int, credit: Credit) -> Row:
    """How many steps of a group sit in which anchors: steps, shared (two episodes or more), alone (one step).

    doubted are shared steps from an error text or an empty state; doubted_weight is their share of the sum of |A_S|,
    NULL if that is 0.
    """
    query = f"""
        SELECT count(*) AS steps, count(*) FILTER (is_shared) AS shared, count(*) FILTER (anchor_size = 1) AS alone,
               count(*) FILTER (is_shared AND doubted) AS doubted,
               coalesce(sum(abs(a_step)) FILTER (is_shared AND doubted), 0) / nullif(sum(abs(a_step)), 0)
               AS doubted_weight
        FROM (
            SELECT a.*, a.anchor_episodes > 1 AND a.anchor_key IS NOT NULL AS is_shared,
                   coalesce(s.state_is_error, false) OR coalesce({is_empty("s.state")}, false) AS doubted
            FROM {credit.rows} AS a
            JOIN {_steps(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
            WHERE a.group_id = $group
        )
        """
    return lake.sql(query, {"group": group_id}).row(0, named=True)


def page(lake: Reads, group_id: int, credit: Credit, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """Anchor states that two or more episodes of a group passed, the most shared first.

    size is in steps, actions are the distinct ones taken there, ways_in the distinct ones that led there, states the
    distinct texts; lowest, highest and spread are of the return-to-go; share is of the group's sum of |A_S|. doubt says
    why the state may stand for several: an error, or empty.
    """
    query = f"""
        WITH visits AS (
            SELECT a.*, s.state, s.state_hash, s.state_is_error, s.led_here, {taken("s")} AS taken
            FROM {credit.rows} AS a
            JOIN {_steps(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
            WHERE a.group_id = $group
        )
        SELECT anchor_key, count(*) AS size, count(DISTINCT episode_id) AS episodes,
               count(DISTINCT taken) AS actions, min(return_to_go) AS lowest, max(return_to_go) AS highest,
               max(return_to_go) - min(return_to_go) AS spread, avg(step_index) AS mean_step,
               left(arg_min(state, step_index), {EXCERPT}) AS state, count(DISTINCT led_here) AS ways_in,
               count(DISTINCT state_hash) AS states,
               sum(abs(a_step)) / (SELECT nullif(sum(abs(a_step)), 0) FROM visits) AS share,
               CASE WHEN bool_or(state_is_error) THEN 'error text'
                    WHEN bool_and({is_empty("state")}) THEN 'empty' END AS doubt
        FROM visits WHERE anchor_key IS NOT NULL
        GROUP BY anchor_key HAVING count(DISTINCT episode_id) > 1
        ORDER BY {order_by(sort, ORDERS, "episodes DESC, size DESC, anchor_key")} LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, {"group": group_id} | window.params())


def total(lake: Reads, group_id: int, credit: Credit) -> int:
    """Number of rows of `page`."""
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
        SELECT *, lag({taken("steps")}) OVER (PARTITION BY episode_id ORDER BY step_index) AS led_here
        FROM steps WHERE episode_id IN ({", ".join(map(str, found)) or "NULL"})
    )"""
