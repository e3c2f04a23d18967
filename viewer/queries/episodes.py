"""The list of episodes: filter, order, pages, and the neighbours of one episode in that order."""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import polars as pl

from viewer.queries.base import Params, Reads, Row, Window, like, only_row

_TASK_ORDER = "TRY_CAST(e.task_id AS BIGINT) NULLS LAST, e.task_id"
_USUAL_ORDER = f"e.run_id, e.collection_round NULLS FIRST, {_TASK_ORDER}, e.rollout_index, e.attempt, e.episode_id"


class Order(StrEnum):
    """Orders of the list."""

    TASK = "task"
    """Run, collection round, task, rollout."""
    LATEST = "latest"
    """Newest collection round and policy version first."""
    LOWEST = "lowest return"
    """Lowest return first, unscored last."""
    HIGHEST = "highest return"
    """Highest return first, unscored last."""
    LONGEST = "most steps"
    """Most steps first."""


_ORDERS = {
    Order.TASK: _USUAL_ORDER,
    Order.LATEST: f"e.collection_round DESC NULLS LAST, e.policy_version DESC NULLS LAST, {_USUAL_ORDER}",
    Order.LOWEST: f"e.env_return NULLS LAST, {_USUAL_ORDER}",
    Order.HIGHEST: f"e.env_return DESC NULLS LAST, {_USUAL_ORDER}",
    Order.LONGEST: f"e.num_steps DESC, {_USUAL_ORDER}",
}

_CLAUSES = {
    "run": "e.run_id = $run",
    "task": r"e.task_id LIKE $task ESCAPE '\'",
    "status": "e.status IN (SELECT unnest($status))",
    "group": "e.group_id = $group",
    "low": "e.env_return >= $low",
    "high": "e.env_return <= $high",
    "round": "e.collection_round = $round",
    "version": "e.policy_version = $version",
    "update": """e.episode_id IN (
        SELECT episode_id FROM trained_batches WHERE job_id = $job AND optimizer_step = $update
    )""",
    "held": "e.episode_id IN (SELECT unnest($held::BIGINT[]))",
}


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes; None filters nothing."""

    run: str | None = None
    task: str | None = None
    """Exact, or with `*` for anything."""
    status: tuple[str, ...] = ()
    """Any of these."""
    group: int | None = None
    low: float | None = None
    """Smallest return; leaves unscored episodes out."""
    high: float | None = None
    """Largest return; leaves unscored episodes out."""
    unscored: bool = False
    """Only episodes without a return."""
    text: str | None = None
    """In a state, an action or a reasoning text, whatever the case."""
    collection_round: int | None = None
    policy_version: int | None = None
    update: tuple[int, int] | None = None
    """(training job, optimizer step): the episodes that the update consumed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an episode in a filtered list."""

    position: int
    """From 1."""
    total: int
    previous: int | None
    next: int | None


def page(lake: Reads, wanted: EpisodeFilter, order: Order, window: Window) -> pl.DataFrame:
    """A page of the list.

    Returns:
        episode_id, group_id, run_id, task_id, rollout_index, attempt, collection_round, policy, policy_version,
        status, env_return, num_steps, completion_tokens, stop_reason.
    """
    where, params = _conditions(lake, wanted)
    return lake.sql(
        f"""
        SELECT episode_id, group_id, run_id, task_id, rollout_index, attempt, collection_round, policy, policy_version,
               status, env_return, num_steps, completion_tokens, stop_reason
        FROM episodes AS e WHERE {where} ORDER BY {_ORDERS[order]} LIMIT $limit OFFSET $offset
        """,
        params | window.params(),
    )


def totals(lake: Reads, wanted: EpisodeFilter) -> Row:
    """Figures of all episodes of a filter: episodes, groups, scored, mean_return, mean_steps (NULL of none)."""
    where, params = _conditions(lake, wanted)
    query = f"""
        SELECT count(*) AS episodes, count(DISTINCT group_id) AS groups, count(env_return) AS scored,
               avg(env_return) AS mean_return, avg(num_steps) AS mean_steps
        FROM episodes AS e WHERE {where}
        """
    return lake.sql(query, params or None).row(0, named=True)


def place(lake: Reads, wanted: EpisodeFilter, order: Order, episode_id: int) -> Place | None:
    """Position of an episode in the list; None if the filter leaves it out."""
    where, params = _conditions(lake, wanted)
    found = only_row(
        lake.sql(
            f"""
            SELECT * FROM (
                SELECT e.episode_id, row_number() OVER list AS position, count(*) OVER () AS total,
                       lag(e.episode_id) OVER list AS previous, lead(e.episode_id) OVER list AS next
                FROM episodes AS e WHERE {where} WINDOW list AS (ORDER BY {_ORDERS[order]})
            ) WHERE episode_id = $episode
            """,
            params | {"episode": episode_id},
        )
    )
    return Place(found["position"], found["total"], found["previous"], found["next"]) if found else None


@lru_cache(maxsize=16)
def holding(lake: Reads, text: str, run: str | None) -> tuple[int, ...]:
    """Ids of the episodes that hold a text in a state, an action or a reasoning text, whatever the case.

    Reading all texts is the one slow read of the viewer, so its answer is kept: turning pages does not repeat it.
    """
    query = """
        SELECT DISTINCT episode_id FROM steps
        WHERE (contains(lower(action), lower($text)) OR contains(lower(state), lower($text))
               OR contains(lower(reasoning), lower($text)))
        """
    params: Params = {"text": text}
    if run is not None:
        query += " AND run_id = $run"
        params["run"] = run
    return tuple(lake.sql(query, params)["episode_id"].to_list())


def _conditions(lake: Reads, wanted: EpisodeFilter) -> tuple[str, Params]:
    """The WHERE clause of a filter over `episodes AS e`, and its parameters."""
    job, update = wanted.update or (None, None)
    values: Params = {
        "run": wanted.run,
        "task": None if wanted.task is None else like(wanted.task),
        "status": list(wanted.status) or None,
        "group": wanted.group,
        "low": wanted.low,
        "high": wanted.high,
        "round": wanted.collection_round,
        "version": wanted.policy_version,
        "update": update,
        "held": None if wanted.text is None else list(holding(lake, wanted.text, wanted.run)),
    }
    params = {name: value for name, value in values.items() if value is not None}
    clauses = [_CLAUSES[name] for name in params]
    if update is not None:
        params["job"] = job
    if wanted.unscored:
        clauses.append("e.env_return IS NULL")
    return " AND ".join(clauses) or "true", params
