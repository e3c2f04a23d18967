"""Credit: which jobs gave advantages to something, and the advantages of an episode.

A choice of credit is one job; a series (one estimator with one set of parameters), which counts with its newest job of
each group; or what a training job consumed, which is for each episode the newest credit job that covered it when the
training started, or, for a loop that computes credit as it goes, when it ended.
"""

from dataclasses import dataclass
from typing import Literal

import polars as pl

from viewer.queries.base import Params, Reads, Row

_ROWS = {
    "job": "SELECT * FROM advantages WHERE job_id = $credit",
    "series": "SELECT * FROM latest_advantages WHERE series_id = $credit",
    "training": """
        SELECT a.* FROM advantages AS a JOIN (
            SELECT g.episode_id, arg_max(g.job_id, (r.ended_at <= t.began, r.ended_at, g.job_id)) AS job_id
            FROM (
                SELECT DISTINCT episode_id, job_id FROM advantages
                WHERE episode_id IN (SELECT episode_id FROM trained_batches WHERE job_id = $credit)
            ) AS g
            JOIN job_runs AS r USING (job_id),
            (
                SELECT started_at AS began, coalesce(ended_at, 'infinity'::TIMESTAMPTZ) AS over
                FROM job_runs WHERE job_id = $credit
            ) AS t
            WHERE r.ended_at <= t.over GROUP BY g.episode_id
        ) USING (episode_id, job_id)
        """,
}


@dataclass(frozen=True, slots=True)
class Credit:
    """A choice of advantages."""

    id: int
    """Of the credit job, the series or the training job."""
    kind: Literal["job", "series", "training"] = "job"

    @property
    def rows(self) -> str:
        """SQL of the chosen rows of `advantages`; its parameter is $credit."""
        return _ROWS[self.kind]

    def params(self) -> Params:
        """Value of $credit."""
        return {"credit": self.id}


def jobs_of_episode(lake: Reads, episode_id: int) -> pl.DataFrame:
    """Credit jobs that covered an episode, newest first: job_id, series_id, ended_at, parameters."""
    return _covering(lake, "episode_id", episode_id)


def jobs_of_group(lake: Reads, group_id: int) -> pl.DataFrame:
    """Credit jobs that covered a group, newest first: job_id, series_id, ended_at, parameters."""
    return _covering(lake, "group_id", group_id)


def _covering(lake: Reads, column: str, value: int) -> pl.DataFrame:
    query = f"""
        SELECT job_id, series_id, ended_at, parameters FROM job_runs
        WHERE job_id IN (SELECT DISTINCT job_id FROM advantages WHERE {column} = $value)
        ORDER BY ended_at DESC, job_id
        """
    return lake.sql(query, {"value": value})


def find(lake: Reads, wanted: int) -> Credit | None:
    """The credit job or series with an id; None if there is none that succeeded."""
    query = """
        SELECT count(*) FILTER (job_id = $id) AS jobs, count(*) FILTER (series_id = $id) AS series
        FROM job_runs WHERE kind = 'credit' AND status = 'succeeded'
        """
    found = lake.sql(query, {"id": wanted}).row(0, named=True)
    if found["jobs"]:
        return Credit(wanted)
    return Credit(wanted, "series") if found["series"] else None


def ledger(lake: Reads, episode_id: int, credit: Credit) -> pl.DataFrame:
    """Advantages of an episode's steps: step_index and the columns of `advantages`, by step."""
    query = f"""
        SELECT step_index, group_id, defined, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
               anchor_size, anchor_episodes, flags
        FROM ({credit.rows}) WHERE episode_id = $episode ORDER BY step_index
        """
    return lake.sql(query, credit.params() | {"episode": episode_id})


def summary(lake: Reads, job_id: int) -> Row:
    """What a credit job's advantages look like.

    Returns:
        steps, undefined (advantage NULL), positive, negative, zero, groups, dead_groups, shared (steps whose anchor
        holds two episodes or more), mean_size (NULL of none): mean |advantage|.
    """
    query = """
        SELECT count(*) AS steps, count(*) FILTER (NOT defined) AS undefined,
               count(*) FILTER (advantage > 0) AS positive, count(*) FILTER (advantage < 0) AS negative,
               count(*) FILTER (advantage = 0) AS zero, count(DISTINCT group_id) AS groups,
               count(DISTINCT group_id) FILTER (list_contains(string_split(flags, ','), 'dead_group')) AS dead_groups,
               count(*) FILTER (anchor_episodes > 1) AS shared, avg(abs(advantage)) AS mean_size
        FROM advantages WHERE job_id = $job
        """
    return lake.sql(query, {"job": job_id}).row(0, named=True)
