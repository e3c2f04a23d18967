"""Groups of siblings: the list (filter, order, pages), and one group's siblings.

`score` chooses the outcomes (`viewer.queries.outcomes`). A group is dead when two or more siblings are scored and all
scored the same: group-relative advantages are 0 there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import polars as pl

from lake.judgements.credit import Credit
from lake.judgements.scores import current_rows
from lake.judgements.selections import GROUPINGS
from viewer.queries import Params, Reads, Row, Sort, Window, only_row, order_by, outcomes, themselves
from viewer.queries.episodes import EpisodeFilter, conditions, looked_up
from viewer.queries.once import once

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

    having: EpisodeFilter = field(default_factory=EpisodeFilter)
    """Groups with at least one such episode. Its `score` is the outcome that tells groups apart."""
    signal: Signal | None = None
    """By the outcomes of all siblings, whichever of them the list is narrowed by."""
    grouping: str | None = None
    """Those of a grouping (`trajlake group`); None: as collected."""


# What the jobs of a series found in each group, by the newest of them; $jobs are in order.
_FOUND = """
    SELECT group_id, if(anchors > 0, shared_steps / steps, NULL) AS shared_share,
           error_steps / nullif(shared_steps, 0) AS error_share,
           empty_steps / nullif(shared_steps, 0) AS empty_share, last_actions_mean AS ways_in
    FROM credit_groups WHERE series_id = $series
    QUALIFY row_number() OVER (PARTITION BY group_id ORDER BY list_position($jobs, job_id) DESC) = 1
    """
# Asked alone, so that it is remembered until jobs end: to find it takes longer than the groups of a page.
_CURRENT = """
    SELECT list(job_id ORDER BY ended_order(sequence, ended_at, job_id)) AS jobs, any_value(series_id) AS series
    FROM job_runs WHERE series_id = (SELECT series_id FROM credit_series WHERE is_current)
    """
_BY_CREDIT = themselves("shared_share", "error_share", "empty_share", "ways_in")
ORDERS = (
    themselves("run_id", "collection_round", "signal", "size", "scored")
    | themselves("mean_return", "sd_return", "lowest", "highest", "mean_steps")
    | _BY_CREDIT
    | {"task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")}
)
"""Columns that may order the list."""
_USUAL_ORDER = "run_id, collection_round NULLS FIRST, TRY_CAST(task_id AS BIGINT) NULLS LAST, task_id, group_id"


@once(8)
def listed(lake: Reads, wanted: GroupFilter, sort: Sort | None) -> pl.Series:
    """The groups of the whole list in order, int64 [K]: by run, round and task if nothing else is asked for.

    Raises:
        QueryError: the query of the filter has no result.
    """
    members, params = _judged(lake, wanted)
    among, more = _having(lake, wanted)
    is_narrowed = wanted.having.narrows and not wanted.having.is_looked_up
    within = f"WHERE group_id IN (SELECT group_id FROM ({among}))" if is_narrowed else ""
    rows = f"({_GROUPS.format(episodes=members)} {within} GROUP BY group_id)"
    if sort is not None and sort.column in _BY_CREDIT:
        rows += f" LEFT JOIN ({_FOUND}) USING (group_id)"
        params |= _current(lake)
    if wanted.signal is not None:
        rows += " WHERE signal = $signal"
        params |= {"signal": str(wanted.signal)}
    query = f"SELECT group_id FROM {rows} ORDER BY {order_by(sort, ORDERS, _USUAL_ORDER)}"
    groups = lake.sql(query, params | (more if is_narrowed else {}) or None)
    if wanted.having.is_looked_up:
        having = looked_up(lake, wanted.having, lake.sql(among, more or None))
        groups = groups.join(having, on="group_id", how="semi", maintain_order="left")
    return groups["group_id"]


def total(lake: Reads, wanted: GroupFilter, sort: Sort | None = None) -> int:
    """Number of groups of a filter. `sort`: the order in which they are shown, so that they are found once."""
    return len(listed(lake, wanted, sort))


def page(lake: Reads, wanted: GroupFilter, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """A page of `listed`: what is known of each group, of all its siblings; sd_return is the sample deviation.

    By the current credit, NULL where it did not look: shared_share of the steps were taken from a state that siblings
    share, error_share of those from an error text, empty_share from a state that says nothing; ways_in is the mean
    number of distinct actions that led to them.
    """
    shown = listed(lake, wanted, sort).slice(window.offset, window.limit)
    members, params = _judged(lake, wanted)
    query = f"""
        SELECT * FROM ({_GROUPS.format(episodes=members)} GROUP BY group_id) LEFT JOIN ({_FOUND}) USING (group_id)
        WHERE {_these(shown)}
        """
    facts = lake.sql(query, params | _current(lake))
    return shown.to_frame().join(facts, on="group_id", how="left", maintain_order="left")


def scores_of(lake: Reads, wanted: GroupFilter, group_ids: tuple[int, ...]) -> pl.DataFrame:
    """The mean of what each scorer says of whole episodes of groups of a list: group_id, scorer, value."""
    members, params = _grouped(lake, wanted, "episodes")
    query = f"""
        SELECT group_id, scorer, avg(value) AS value
        FROM (SELECT group_id, episode_id FROM {members} WHERE {_these(group_ids)})
        JOIN (SELECT episode_id, scorer, value FROM {current_rows(lake)} WHERE step_index IS NULL) USING (episode_id)
        GROUP BY ALL
        """
    return lake.sql(query, params or None)


def among(lake: Reads, wanted: GroupFilter) -> tuple[str, Params]:
    """The episodes that put groups on a list as SQL (group_id, episode_id), and the parameters of a query with them.

    Raises:
        QueryError: the query of the filter has no result.
    """
    rows, params = _having(lake, wanted)
    if wanted.having.is_looked_up:
        ids = looked_up(lake, wanted.having, lake.sql(rows, params or None))["episode_id"]
        rows = f"SELECT * FROM ({rows}) WHERE episode_id IN (SELECT unnest($ids::BIGINT[]))"
        params |= {"ids": ids.to_list()}
    if wanted.signal is not None:
        rows = f"SELECT * FROM ({rows}) WHERE group_id IN (SELECT unnest($groups::BIGINT[]))"
        params |= {"groups": listed(lake, wanted, None).to_list()}
    return rows, params


def groupings(lake: Reads) -> list[str]:
    """Names of the groupings, each draw by its own, in order."""
    return [name for name, _ in _groupings(lake)]


def _groupings(lake: Reads) -> list[tuple[str, int]]:
    """Each grouping with the job that its name means."""
    return lake.sql(GROUPINGS).select("grouping", "job_id").rows()


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


def _having(lake: Reads, wanted: GroupFilter) -> tuple[str, Params]:
    """As `among`, by what of the filter is SQL about episodes: without text, query and signal."""
    members, params = _judged(lake, wanted)
    clauses, more = conditions(wanted.having)
    query = f"SELECT e.group_id, e.episode_id FROM {members} AS e WHERE {' AND '.join(clauses) or 'true'}"
    return query, params | more


def _judged(lake: Reads, wanted: GroupFilter) -> tuple[str, Params]:
    """Episodes with `outcome`, each in its group of the list, as SQL, and the parameters of a query with them."""
    # Siblings as collected are of one run; a grouping may mix runs.
    run = wanted.having.run if wanted.grouping is None else None
    judged, params = outcomes.judged(lake, wanted.having.score, run)
    members, more = _grouped(lake, wanted, judged)
    return members, params | more


def _grouped(lake: Reads, wanted: GroupFilter, episodes: str) -> tuple[str, Params]:
    """A relation of episodes with each in its group of the list, and the parameters of a query with it."""
    if wanted.grouping is None:
        return episodes, {}
    job = next((job for name, job in _groupings(lake) if name == wanted.grouping), None)
    params: Params = {"grouping": wanted.grouping, "grouping_job": job}
    return outcomes.regrouped(episodes, "grouping = $grouping AND job_id = $grouping_job"), params


def _current(lake: Reads) -> Params:
    """Parameters of a query with `_FOUND`, for the current credit; without one nothing is found."""
    return lake.sql(_CURRENT).row(0, named=True)


def _these(group_ids: Iterable[int]) -> str:
    """The condition that holds for some groups: named one by one, as no window looks at any other then."""
    return f"group_id IN ({', '.join(map(str, group_ids)) or 'NULL'})"
