"""How many versions of the policy behind a training job's data were: the one rule that all pages use."""

from dataclasses import dataclass

import polars as pl

from viewer.queries import Reads

MOST = 50
"""Ages that are told of at most."""

STALENESS = """
    WITH versions AS (
        SELECT optimizer_step, max(policy_version) AS version FROM checkpoints
        WHERE job_id = $job AND "cursor" ->> '$.round' IS NOT NULL GROUP BY optimizer_step
    ),
    consumed AS (
        SELECT b.*, coalesce(e.run_id = (SELECT run_id FROM job_runs WHERE job_id = $job), false) AS is_own,
               e.run_id, e.policy_version
        FROM trained_batches AS b LEFT JOIN episodes AS e USING (episode_id) WHERE b.job_id = $job
    ),
    numbering AS (
        SELECT coalesce((SELECT bool_and(policy_version = optimizer_step) FROM checkpoints WHERE job_id = $job), false)
               AND coalesce(bool_and(policy_version <= optimizer_step) FILTER (is_own), false) AS is_of_updates
        FROM consumed
    ),
    stale AS (
        SELECT c.*, CASE WHEN NOT c.is_own THEN max(c.policy_version) OVER (PARTITION BY c.run_id)
                         WHEN EXISTS (FROM versions) THEN coalesce(v.version, 0)
                         WHEN n.is_of_updates THEN c.optimizer_step
                         ELSE max(c.policy_version) OVER (PARTITION BY c.run_id ORDER BY c.optimizer_step)
                    END - c.policy_version AS staleness
        FROM consumed AS c CROSS JOIN numbering AS n
        ASOF LEFT JOIN versions AS v ON c.optimizer_step >= v.optimizer_step
    )
    """
"""SQL before a query: `stale` is the rows of `batches` of $job with `staleness` in policy versions, NULL if unknown.

It is the version of the update minus that of the rollout. Of the job's own run, the version of an update is what the
checkpoints of a loop say; or its index, where all checkpoints number versions by updates and no rollout is newer than
its update; or else the newest version consumed up to that update. Rollouts of another run have no version of the
update: they are measured against the newest one that the job consumed of that run, as the trainer's metrics are.
"""


def by_age(lake: Reads, job_id: int) -> pl.DataFrame:
    """How stale what a job consumed was: staleness (NULL: unknown), episodes, rows, action_tokens; at most `MOST`."""
    query = f"""{STALENESS}
        SELECT staleness, count(DISTINCT episode_id) AS episodes, count(*) AS rows,
               sum(action_tokens)::BIGINT AS action_tokens
        FROM stale GROUP BY staleness ORDER BY staleness NULLS LAST LIMIT {MOST}
        """
    return lake.sql(query, {"job": job_id})


@dataclass(frozen=True, slots=True)
class Played:
    """Which versions of the policy played the batch of an update: the lowest and the highest."""

    versions: tuple[int, int]
    behind: tuple[int, int]


def around(lake: Reads, job_id: int, update: int) -> dict[int, Played]:
    """Of an update and its neighbours, by update; those of which no version is known are left out."""
    query = f"""{STALENESS}
        SELECT optimizer_step, min(policy_version), max(policy_version), min(staleness), max(staleness) FROM stale
        WHERE policy_version IS NOT NULL GROUP BY optimizer_step ORDER BY optimizer_step
        """
    # Of all updates, as each takes a look at all: the reader remembers it for the next one.
    played = lake.sql(query, {"job": job_id})
    rows = played.filter(pl.col("optimizer_step").is_between(update - 1, update + 1)).iter_rows()
    return {step: Played((oldest, newest), (least, most)) for step, oldest, newest, least, most in rows}
