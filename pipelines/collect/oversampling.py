"""Siblings beyond those that are wanted: how many were meant to run, and which of them a collection left out.

Everything that is played is recorded. With `--keep first` the superfluous rollouts are in the lake as aborted, with
`--keep best` a selection drops all but the best. Both facts follow from the lake: from the `collect` jobs, from
`selections` and from `episodes`.
"""

import polars as pl

from lake.judgements.selections import selection_job
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from pipelines.collect.players import SURPLUS

_ROUNDS = """
WITH rounds AS (
    SELECT run_id, CASE WHEN json_valid(parameters) THEN parameters END AS parameters
    FROM job_runs WHERE kind = 'collect' AND run_id IS NOT NULL
)

SELECT
    run_id,
    TRY_CAST(parameters ->> '$.plan.round' AS INTEGER) AS collection_round,
    max(
        TRY_CAST(parameters ->> '$.plan.siblings' AS INTEGER) - TRY_CAST(parameters ->> '$.plan.group_size' AS INTEGER)
    ) AS spare,
    max(parameters ->> '$.limits.keep') AS keep
FROM rounds GROUP BY ALL
"""
_SURPLUS = """
SELECT episode_id FROM episodes
WHERE status = 'aborted' AND stop_reason = $surplus AND run_id IN (SELECT unnest($runs))
"""


def best_selection(run: str) -> str:
    """The name of the selection that holds the best siblings of a run."""
    return f"best-{run}"


def oversampled_rounds(snapshot: Snapshot) -> pl.DataFrame:
    """The rounds in which more siblings were meant to run than are wanted: run_id, collection_round, spare, keep.

    `spare` is how many more, `keep` the option of `trajlake collect`.
    """
    return snapshot.sql(_ROUNDS).filter(pl.col("spare") > 0)


def left_out(snapshot: Snapshot, rounds: pl.DataFrame) -> pl.Series:
    """The episodes that the collections of some `oversampled_rounds` left out: `episode_id`.

    Of a round under `--keep best` that no selection has seen yet, nothing is left out.
    """
    runs = {keep: part["run_id"].unique().to_list() for (keep,), part in rounds.partition_by("keep", as_dict=True).items()}
    found = [pl.Series("episode_id", [], dtype=pl.Int64)]
    if first := runs.get("first"):
        found.append(snapshot.sql(_SURPLUS, {"surplus": SURPLUS, "runs": first})["episode_id"])
    for run in runs.get("best", []):
        if (job := selection_job(snapshot, best_selection(run))) is not None:
            rows = snapshot.scan("selections").filter(
                (pl.col("job_id") == job) & pl.col("step_index").is_null() & ~pl.col("kept")
            )
            found.append(collected(rows.select("episode_id"))["episode_id"])
    return pl.concat(found)
