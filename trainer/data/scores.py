"""What a scorer says of whole episodes."""

import polars as pl

from lake.errors import UsageError
from lake.reading import collected
from lake.snapshot import Snapshot

ENV_RETURN = "env_return"
"""The return that the environment reported: a score without a scorer."""
_VALUES = """
WITH mine AS (
    SELECT s.episode_id, s.scorer_version, s.value, coalesce(r.sequence, -1) AS sequence, r.ended_at, s.job_id
    FROM scores AS s JOIN job_runs AS r USING (job_id)
    WHERE s.scorer = $scorer AND s.step_index IS NULL AND ($version IS NULL OR s.scorer_version = $version)
)
SELECT episode_id, value FROM mine
WHERE scorer_version = (SELECT arg_max(scorer_version, (sequence, ended_at, job_id)) FROM mine)
QUALIFY row_number() OVER (PARTITION BY episode_id ORDER BY sequence DESC, ended_at DESC, job_id DESC) = 1
"""


def episode_scores(snapshot: Snapshot, score: str) -> pl.DataFrame:
    """episode_id and score of the episodes that have a score, which may be NULL.

    Args:
        snapshot: the data.
        score: env_return, or a scorer as NAME (its newest version) or NAME@VERSION.

    Raises:
        UsageError: a scorer that scored no episode.
    """
    if score == ENV_RETURN:
        return collected(snapshot.scan("episodes").select("episode_id", score=ENV_RETURN))
    return scores_of(snapshot, score)


def scores_of(snapshot: Snapshot, scorer: str) -> pl.DataFrame:
    """episode_id and score: what one version of a scorer says of whole episodes.

    Raises:
        UsageError: it scored none.
    """
    name, _, version = scorer.partition("@")
    values = snapshot.sql(_VALUES, {"scorer": name, "version": version or None}).rename({"value": "score"})
    if values.is_empty():
        known = snapshot.sql("SELECT DISTINCT scorer, scorer_version FROM scores WHERE step_index IS NULL ORDER BY ALL")
        versions = known.filter(scorer=name)["scorer_version"].to_list()
        valid = [f"{name}@{v}" for v in versions] or [ENV_RETURN, *known["scorer"].unique().sort().to_list()]
        msg = f"no episode has a score of {scorer!r}; valid: {', '.join(valid)}"
        raise UsageError(msg)
    return values
