"""Groups of siblings: the list (filter, order, pages, facets), and the siblings of one group.

`score` chooses the outcomes (`lake.judgements.outcomes`). A group is dead if two or more siblings are scored and all
scored the same: group-relative advantages are 0 there.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import polars as pl

from lake.judgements import outcomes
from lake.judgements.credit import Credit
from lake.judgements.scores import current_scores_sql
from lake.judgements.selections import GROUPINGS
from viewer.queries import (
    NO_ADVANTAGES,
    LakeReader,
    ListWindow,
    Params,
    Row,
    Sort,
    build_id_list,
    build_sort_terms,
    get_first_row,
    order_by,
)
from viewer.queries.anchors import SHARED_ANCHORS
from viewer.queries.episodes import (
    FACETS,
    FIRST_VALUES,
    EpisodeFilter,
    FacetValues,
    apply_lookups,
    build_conditions,
    count_values,
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
    """Conditions on groups; None leaves none out."""

    having: EpisodeFilter = field(default_factory=EpisodeFilter)
    """Groups with at least one such episode. Its `score` chooses the outcome that signals compare."""
    signal: Signal | None = None
    """By the outcomes of all siblings, also of those that `having` leaves out."""
    grouping: str | None = None
    """Groups of a grouping (`trajlake group`); None: as collected."""


_SHARES = f"""
    SELECT group_id, if(count(anchor_key) > 0, sum(if(is_shared, size, 0)) / sum(size), NULL) AS shared_share
    FROM ({SHARED_ANCHORS.format(rows="(SELECT * FROM current_advantages WHERE {within})")}) GROUP BY group_id
    """
# Findings of the credit jobs of a series in each group, from the newest job of the group; $jobs are in order.
_FINDINGS = """
    SELECT group_id, scored < episodes AS is_partial, if(anchors > 0, shared_steps / steps, NULL) AS shared_share,
           error_steps / nullif(shared_steps, 0) AS error_share, empty_steps / nullif(shared_steps, 0) AS empty_share,
           last_actions_mean AS ways_in FROM credit_groups WHERE series_id = $series
    QUALIFY row_number() OVER (PARTITION BY group_id ORDER BY list_position($jobs, job_id) DESC) = 1
    """
# A separate query, because its answer is cached until a job ends and costs more than the groups of a page.
_CURRENT_SERIES = """
    SELECT list(job_id ORDER BY ended_order(sequence, ended_at, job_id)) AS jobs, any_value(series_id) AS series
    FROM job_runs WHERE series_id = (SELECT series_id FROM credit_series WHERE is_current)
    """
_CREDIT_ORDERS = build_sort_terms("shared_share", "error_share", "empty_share", "ways_in")
ORDERS = (
    build_sort_terms("run_id", "collection_round", "signal", "size", "scored")
    | build_sort_terms("mean_return", "sd_return", "lowest", "highest", "mean_steps")
    | _CREDIT_ORDERS
    | {"task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")}
)
"""Columns that may order the list."""
_DEFAULT_ORDER = "run_id, collection_round NULLS FIRST, TRY_CAST(task_id AS BIGINT) NULLS LAST, task_id, group_id"


def list_groups(lake: LakeReader, group_filter: GroupFilter, sort: Sort | None) -> pl.Series:
    """Return the groups of the list in order, int64 [K]; by default by run, round and task.

    Raises:
        QueryError: the query of the filter has no result.
    """
    having = group_filter.having
    relation, params = _build_relation(lake, group_filter)
    members, member_params = _build_filtered_members_sql(lake, group_filter)
    is_narrowed = having.narrows and not having.has_lookup
    within = f"WHERE group_id IN (SELECT group_id FROM ({members}))" if is_narrowed else ""
    rows = f"({_GROUPS.format(episodes=relation)} {within} GROUP BY group_id)"
    if sort is not None and sort.column == "shared_share":
        rows += f" LEFT JOIN ({_SHARES.format(within='true')}) USING (group_id)"
    elif sort is not None and sort.column in _CREDIT_ORDERS:
        rows += f" LEFT JOIN ({_FINDINGS}) USING (group_id)"
        params |= _read_current_series(lake)
    if group_filter.signal is not None:
        rows += " WHERE signal = $signal"
        params |= {"signal": str(group_filter.signal)}
    query = f"SELECT group_id FROM {rows} ORDER BY {order_by(sort, ORDERS, _DEFAULT_ORDER)}"
    groups = lake.sql(query, params | (member_params if is_narrowed else {}) or None)
    if having.has_lookup:
        matches = apply_lookups(lake, having, lake.sql(members, member_params or None))
        groups = groups.join(matches, on="group_id", how="semi", maintain_order="left")
    return groups["group_id"]


def count_groups(lake: LakeReader, group_filter: GroupFilter, sort: Sort | None = None) -> int:
    """Count the groups of a filter. Pass the order of the page as `sort`: the page then reads the cached list."""
    return len(lake.read(list_groups, group_filter, sort))


def read_page(
    lake: LakeReader, group_filter: GroupFilter, window: ListWindow, sort: Sort | None = None
) -> pl.DataFrame:
    """Return a page of `list_groups` with figures of all siblings; sd_return is the sample deviation.

    From the current credit, NULL where it has no row: shared_share, the share of steps in a state that siblings share.
    error_share and empty_share are of those steps of scored siblings: from an error text, and from an empty state.
    ways_in is the mean number of distinct actions that led to them.
    """
    group_ids = lake.read(list_groups, group_filter, sort).slice(window.offset, window.limit)
    relation, params = _build_relation(lake, group_filter)
    query = f"""
        SELECT * FROM ({_GROUPS.format(episodes=relation)} GROUP BY group_id) LEFT JOIN ({_FINDINGS}) USING (group_id)
        WHERE group_id IN ({build_id_list(group_ids)})
        """
    facts = lake.sql(query, params | _read_current_series(lake))
    # Findings leave unscored siblings out.
    if (partial_ids := facts.filter("is_partial")["group_id"]).len():
        shares = _SHARES.format(within=f"group_id IN ({build_id_list(partial_ids)})")
        facts = facts.update(lake.sql(shares), on="group_id")
    return group_ids.to_frame().join(facts, on="group_id", how="left", maintain_order="left")


def read_mean_scores(lake: LakeReader, group_filter: GroupFilter, group_ids: tuple[int, ...]) -> pl.DataFrame:
    """Return the mean score of whole episodes by group: group_id, scorer, value."""
    members, params = _regroup(lake, group_filter, "episodes")
    query = f"""
        SELECT group_id, scorer, avg(value) AS value
        FROM (SELECT group_id, episode_id FROM {members} WHERE group_id IN ({build_id_list(group_ids)}))
        JOIN (SELECT episode_id, scorer, value FROM {current_scores_sql(lake)} WHERE step_index IS NULL)
        USING (episode_id)
        GROUP BY ALL
        """
    return lake.sql(query, params or None)


def count_group_facet_values(
    lake: LakeReader, facet: str, group_filter: GroupFilter, limit: int = FIRST_VALUES
) -> FacetValues:
    """Count the groups of a list that have an episode of the filter with each value of a facet.

    Raises:
        QueryError: the query of the filter has no result.
    """
    members, params = _build_filtered_members_sql(lake, group_filter)
    if group_filter.having.has_lookup:
        ids = apply_lookups(lake, group_filter.having, lake.sql(members, params or None))["episode_id"]
        members = f"SELECT * FROM ({members}) WHERE episode_id IN (SELECT unnest($ids::BIGINT[]))"
        params |= {"ids": ids.to_list()}
    if group_filter.signal is not None:
        members = f"SELECT * FROM ({members}) WHERE group_id IN (SELECT unnest($groups::BIGINT[]))"
        params |= {"groups": lake.read(list_groups, group_filter, None).to_list()}
    pairs = f"SELECT group_id, value FROM ({FACETS[facet]}) JOIN ({members}) USING (episode_id)"
    return count_values(lake, pairs, params, limit, "count(DISTINCT group_id)")


def _build_filtered_members_sql(lake: LakeReader, group_filter: GroupFilter) -> tuple[str, Params]:
    """Return SQL (group_id, episode_id) of the episodes that put groups on the list, without lookups and signal."""
    relation, params = _build_relation(lake, group_filter)
    clauses, condition_params = build_conditions(group_filter.having)
    query = f"SELECT e.group_id, e.episode_id FROM {relation} AS e WHERE {' AND '.join(clauses) or 'true'}"
    return query, params | condition_params


def _build_relation(lake: LakeReader, group_filter: GroupFilter) -> tuple[str, Params]:
    """Return SQL of episodes with `outcome`, each in its group of the list, and its parameters."""
    # Collected siblings belong to one run; a grouping may mix runs.
    run = group_filter.having.run if group_filter.grouping is None else None
    relation, params = outcomes.build_relation(lake, group_filter.having.score, run)
    members, group_params = _regroup(lake, group_filter, relation)
    return members, params | group_params


def _regroup(lake: LakeReader, group_filter: GroupFilter, episodes: str) -> tuple[str, Params]:
    """Return a relation of episodes with the groups of the filter's grouping, and its parameters."""
    if group_filter.grouping is None:
        return episodes, {}
    jobs = dict(lake.sql(GROUPINGS).select("grouping", "job_id").iter_rows())
    params: Params = {"grouping": group_filter.grouping, "grouping_job": jobs.get(group_filter.grouping)}
    return outcomes.build_regrouped_relation(episodes, "grouping = $grouping AND job_id = $grouping_job"), params


def _read_current_series(lake: LakeReader) -> Params:
    """Return the parameters of `_FINDINGS` for the current credit; without credit no row matches them."""
    return lake.sql(_CURRENT_SERIES).row(0, named=True)


def list_groupings(lake: LakeReader) -> list[str]:
    """Return the names of the groupings in order, each draw under its name."""
    return lake.sql(GROUPINGS)["grouping"].to_list()


def read_group(lake: LakeReader, group_id: int, score: str | None = None) -> Row | None:
    """Return a group's row as in `read_page`; None for an unknown group."""
    relation, params = outcomes.build_group_relation(lake, group_id, score)
    query = f"{_GROUPS.format(episodes=relation)} WHERE group_id = $group GROUP BY group_id"
    return get_first_row(lake.sql(query, params | {"group": group_id}))


SIBLING_ORDERS = build_sort_terms(
    "rollout_index", "status", "outcome", "num_steps", "policy_version", "a_episode", "mean_advantage"
)
"""Columns that may order siblings."""


def read_siblings(
    lake: LakeReader,
    group_id: int,
    credit: Credit | None,
    window: ListWindow,
    score: str | None = None,
    sort: Sort | None = None,
) -> pl.DataFrame:
    """Return the siblings of a group by rollout; a_episode (of the first step), mean_advantage: NULL without credit."""
    relation, params = outcomes.build_group_relation(lake, group_id, score)
    members = lake.sql(f"SELECT episode_id FROM {relation} WHERE group_id = $group", params | {"group": group_id})
    advantages = credit.rows_of(lake, members["episode_id"]) if credit else NO_ADVANTAGES
    query = f"""
        SELECT e.episode_id, e.rollout_index, e.attempt, e.status, e.outcome, e.num_steps, e.policy_version,
               arg_min(a.a_episode, a.step_index) AS a_episode, avg(a.advantage) AS mean_advantage
        FROM {relation} AS e LEFT JOIN {advantages} AS a ON a.episode_id = e.episode_id
        WHERE e.group_id = $group
        GROUP BY ALL ORDER BY {order_by(sort, SIBLING_ORDERS, "e.rollout_index, e.attempt, e.episode_id")}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"group": group_id} | window.params())


def read_outcomes(lake: LakeReader, group_id: int, score: str | None = None) -> pl.DataFrame:
    """Return all siblings by outcome, the unscored last: episode_id, rollout_index, attempt, status, outcome."""
    relation, params = outcomes.build_group_relation(lake, group_id, score)
    query = f"""
        SELECT episode_id, rollout_index, attempt, status, outcome FROM {relation} WHERE group_id = $group
        ORDER BY outcome NULLS LAST, rollout_index, attempt, episode_id
        """
    return lake.sql(query, params | {"group": group_id})
