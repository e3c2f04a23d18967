"""Credit: which series have advantages of something, and the advantages of an episode.

Which rows a choice of credit means is decided in `lake.judgements.credit`, as for every other reader of the lake.
"""

import polars as pl

from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import Credit, find_credit
from viewer.queries import Reads, Row


def find(lake: Reads, wanted: str | None = None, before: int | None = None) -> Credit | None:
    """The advantages that a text names (the current ones for None), also as of a version of `jobs`; None if none do."""
    try:
        return find_credit(lake, wanted, before=before)
    except (UsageError, DataRefusedError):
        return None


def ledger(lake: Reads, episode_id: int, credit: Credit) -> pl.DataFrame:
    """Advantages of an episode's steps: step_index and the columns of `advantages`, by step."""
    query = f"""
        SELECT step_index, group_id, defined, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
               anchor_size, anchor_episodes, flags
        FROM {credit.rows} WHERE episode_id = $episode ORDER BY step_index
        """
    return lake.sql(query, {"episode": episode_id})


def summary(lake: Reads, job_id: int) -> Row:
    """What the advantages that a credit job computed look like.

    undefined counts NULL, shared the steps whose anchor holds two episodes or more; mean_size is the mean |advantage|.
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
