"""Rows that are accepted and not there: a commit whose entry in the log is gone leaves no other trace.

An `episodes` row or a succeeded job's terminal row accepts a write attempt after its rows were committed, so each
attempt must be found in some file. The log's statistics tell that of files that hold one attempt, and the names of
compacted ones bear the sum of theirs: attempts are random, so sums that agree are the same attempts. Only where they
differ, compacted files are looked into, one column of them, until every attempt is found. What jobs wrote has no such
sum: readers are warned of its loss while it is not compacted, the doctor and whoever would reuse a result always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lake import ids
from lake.errors import LakeAccessError
from lake.read.text_table import counted
from lake.storage.data_files import WRITE_SUMS
from lake.tables import WRITTEN_BY_JOBS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import polars as pl

    from lake.read.snapshot import Snapshot
    from lake.storage.data_files import FileEntry

_OTHERWISE = ("retract", "forget")
"""Kinds of jobs that accept what other writes brought."""


def require_steps(snapshot: Snapshot) -> None:
    """Check that `steps` has what visible episodes need. Raises LakeAccessError: names episodes that lost steps."""
    if _sums_agree(snapshot.entries("episodes"), snapshot.entries("steps")):
        return
    import polars as pl

    from lake.read.parquet import collected

    accepted = frozenset().union(*map(snapshot.write_ids, snapshot.entries("episodes")))
    lost = _not_in(snapshot, accepted, ["steps"], look=True)
    if not lost:
        return
    of_lost = pl.col("write_id").is_in(sorted(lost)) & (pl.col("num_steps") > 0)
    rows = collected(snapshot.scan("episodes").filter(of_lost).select("episode_id", "run_id", "task_id", "num_steps"))
    if rows.is_empty():
        return
    named = "; ".join(
        f"{ids.to_text(row['episode_id'])} (run {row['run_id']}, task {row['task_id']})"
        for row in rows.head(3).iter_rows(named=True)
    )
    more = f" (+{len(rows) - 3} more)" if len(rows) > 3 else ""
    steps = counted(int(rows["num_steps"].sum()), "step")
    place = f"table `steps` of {snapshot.root} at version {snapshot.versions['steps']}"
    raise LakeAccessError(
        f"{place} lacks {steps} of {counted(len(rows), 'episode')}: {named}{more}. A commit of its log is "
        "gone: restore it from a backup, or `trajlake retract` these episodes to go on without them"
    )


def _sums_agree(episodes: Sequence[FileEntry], steps: Sequence[FileEntry]) -> bool:
    """Whether both hold the same write attempts, dead ones of `steps` aside, as far as log and names tell."""
    if any(entry.write_sum is None for entry in (*episodes, *steps)):
        return False
    alone = {entry.only_write_id for entry in episodes}
    # With every accepted attempt in a file of its own, the dead are known; else they make the sums differ.
    counted = [entry for entry in steps if alone & {None, entry.only_write_id} or entry.only_write_id is None]
    return (sum(e.write_sum or 0 for e in episodes) - sum(e.write_sum or 0 for e in counted)) % WRITE_SUMS == 0


def lost_jobs(snapshot: Snapshot, *, look: bool = True) -> pl.DataFrame:
    """Succeeded jobs of whose rows some are gone, of each series the newest: job_id, kind, lost (write attempts).

    What an older job of a series lost is history, as its rows are: running it again is what makes them whole.

    Args:
        look: into compacted files; without it a job whose rows may lie there is taken for whole.
    """
    import polars as pl

    from lake.read.parquet import collected

    ended = (pl.col("event") == "succeeded") & ~pl.col("kind").is_in(_OTHERWISE)
    columns = ["job_id", "kind", "series_id", "sequence", "accepted_write_ids"]
    jobs = collected(snapshot.scan_all("jobs").filter(ended).select(columns))
    jobs = jobs.sort("sequence", nulls_last=False).unique(["kind", "series_id"], keep="last", maintain_order=True)
    accepted = jobs["accepted_write_ids"].explode(empty_as_null=False, keep_nulls=False)
    lost = _not_in(snapshot, frozenset(accepted), WRITTEN_BY_JOBS, look=look)
    lost -= snapshot.emptied if lost else lost
    is_lost = pl.col("accepted_write_ids").list.eval(pl.element().is_in(sorted(lost)))
    return jobs.select("job_id", "kind", lost=is_lost.list.sum()).filter(pl.col("lost") > 0)


def _not_in(snapshot: Snapshot, write_ids: frozenset[int], tables: Iterable[str], *, look: bool) -> frozenset[int]:
    """Write attempts of which no file of some tables holds a row, as far as is looked."""
    entries = [entry for name in tables for entry in snapshot.entries(name)]
    left = write_ids.difference(*([entry.only_write_id, *entry.emptied] for entry in entries))
    for entry in (entry for entry in entries if entry.only_write_id is None):
        if not left or not look:
            return frozenset()
        left -= snapshot.write_ids(entry)
    return left
