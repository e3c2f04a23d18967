"""Retraction: episodes that readers no longer see, and stay where they are.

A retry takes its predecessor back in the same commit that brings it (`lake.write.writer`); a person takes episodes back
with `retract`. Old snapshots still show them: what an update was trained on can always be looked at.
"""

from collections.abc import Sequence

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from lake.tables import RETRACTIONS
from lake.write.jobs import Job


def known_episodes(snapshot: Snapshot, episode_ids: Sequence[int]) -> pl.DataFrame:
    """Rows (episode_id, group_id, run_id, write_id) of episodes, retracted ones included.

    Raises:
        UsageError: no ids, or ids that the lake does not hold.
    """
    if not episode_ids:
        raise UsageError("no episodes are named; give ids, or a condition that some episodes meet")
    wanted = pl.Series("episode_id", sorted(set(episode_ids)), dtype=pl.Int64)
    columns = ["episode_id", "group_id", "run_id", "write_id"]
    found = snapshot.scan_all("episodes").filter(pl.col("episode_id").is_in(wanted.implode())).select(columns).collect()
    if unknown := sorted(set(wanted) - set(found["episode_id"])):
        more = f" (+{len(unknown) - 3} more)" if len(unknown) > 3 else ""
        msg = f"the lake holds no episode {', '.join(map(ids.to_text, unknown[:3]))}{more}; nothing was changed"
        raise UsageError(msg)
    return found


def write_retractions(job: Job, episode_ids: Sequence[int], kind: str, reason: str | None) -> None:
    """Take episodes back in a job: kind `retracted`, or `forgotten` for what is going to be erased."""
    at = job.now()
    frame = pl.DataFrame({"episode_id": sorted(set(episode_ids))}, schema={"episode_id": pl.Int64})
    job.write(RETRACTIONS.name, frame.with_columns(kind=pl.lit(kind), at=pl.lit(at), reason=pl.lit(reason, pl.String)))
