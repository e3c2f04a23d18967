"""Episodes side by side: which are worth it, what is known of each, the states they passed, what they did there."""

from collections.abc import Sequence

import polars as pl

from lake.judgements.credit import Credit
from viewer.queries import EXCERPT, Reads, outcomes, replies, taken

MOST = 8
"""Episodes side by side."""
CALLS = 2000
"""Characters of tool calls that are read: enough to take apart the usual ones."""


def contrast(lake: Reads, group_id: int, score: str | None, beside: int | None = None, most: int = 4) -> list[int]:
    """Siblings whose comparison says most: from the best scored and the worst scored in turn, the unscored last.

    Args:
        beside: a sibling that comes first in any case.
    """
    judged, params = outcomes.of_group(lake, group_id, score)
    query = f"""
        SELECT episode_id FROM (
            SELECT episode_id, outcome, rollout_index,
                   row_number() OVER (ORDER BY outcome DESC NULLS LAST, rollout_index, attempt, episode_id) AS falling,
                   row_number() OVER (ORDER BY outcome NULLS LAST, rollout_index, attempt, episode_id) AS rising
            FROM {judged} WHERE group_id = $group
        ) ORDER BY episode_id IS DISTINCT FROM $beside, least(falling, rising), falling > rising, rollout_index
        LIMIT $most
        """
    return lake.sql(query, params | {"group": group_id, "beside": beside, "most": most})["episode_id"].to_list()


def facts(lake: Reads, episode_ids: Sequence[int], credit: Credit | None, score: str | None = None) -> pl.DataFrame:
    """What stands above each episode; one that readers do not see has no row, and the order is no promise.

    group_id, run_id, task_id, rollout_index, attempt, collection_round, status, outcome, num_steps, policy_version;
    a_episode (of the first step) and mean_advantage, NULL without credit.
    """
    judged, params = outcomes.judged(lake, score)
    chosen = _listed(episode_ids)
    advantages = credit.rows_of(lake, episode_ids) if credit else "(SELECT * FROM advantages WHERE false)"
    query = f"""
        SELECT e.episode_id, e.group_id, e.run_id, e.task_id, e.rollout_index, e.attempt, e.collection_round, e.status,
               e.outcome, e.num_steps, e.policy_version, a.a_episode, a.mean_advantage
        FROM {judged} AS e LEFT JOIN (
            SELECT episode_id, arg_min(a_episode, step_index) AS a_episode, avg(advantage) AS mean_advantage
            FROM {advantages} GROUP BY episode_id
        ) AS a USING (episode_id)
        WHERE e.episode_id IN ({chosen})
        """
    return lake.sql(query, params or None)


def walks(lake: Reads, episode_ids: Sequence[int], credit: Credit | None) -> pl.DataFrame:
    """The steps of episodes, by episode and step, without a text.

    episode_id, step_index; key, the state: as the credit tells states apart, or by its exact text without credit, NULL
    where it is not known; choice, equal for steps that did the same; reward, advantage.
    """
    chosen = _listed(episode_ids)
    advantages = credit.rows_of(lake, episode_ids) if credit else "(SELECT * FROM advantages WHERE false)"
    query = f"""
        SELECT s.episode_id, s.step_index, {"a.anchor_key" if credit else "s.state_hash"} AS key,
               hash({taken("s")}) AS choice, s.reward, a.advantage
        FROM steps AS s
        LEFT JOIN {advantages} AS a
        ON a.episode_id = s.episode_id AND a.step_index = s.step_index
        WHERE s.episode_id IN ({chosen}) ORDER BY s.episode_id, s.step_index
        """
    return lake.sql(query)


def texts(lake: Reads, places: Sequence[tuple[int, int]]) -> pl.DataFrame:
    """What was seen and done at steps (episode, step): state and action cut to an excerpt, tool_calls to `CALLS`.

    state_is_error, state_is_empty, reply_is_error, reply_is_empty: of the state, and of what came back.
    """
    mine = f"episode_id IN ({_listed({episode for episode, _ in places})})"
    query = f"""
        SELECT episode_id, step_index, left(state, {EXCERPT}) AS state, left(action, {EXCERPT}) AS action,
               left(tool_calls, {CALLS}) AS tool_calls, state_is_error, is_empty_state(state_hash) AS state_is_empty,
               r.is_error AS reply_is_error, r.is_empty AS reply_is_empty
        FROM steps LEFT JOIN {replies(mine)} AS r USING (episode_id, step_index)
        WHERE {mine} AND (episode_id, step_index) IN (SELECT (unnest($episodes::BIGINT[]), unnest($steps::INTEGER[])))
        """
    episodes, steps = [episode for episode, _ in places], [step for _, step in places]
    return lake.sql(query, {"episodes": episodes, "steps": steps})


def _listed(episode_ids: Sequence[int] | set[int]) -> str:
    """Ids for `IN (...)`: named one by one, their files are found, and no other is read."""
    return ", ".join(map(str, sorted(set(episode_ids)))) or "NULL"
