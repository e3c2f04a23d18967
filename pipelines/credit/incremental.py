"""Which groups a credit job has to compute: those whose input differs from the one of their newest rows.

Every job leaves one row per group in `credit_groups`, with the hash of the group's input. The newest row of each group
of the series is the state that the next job compares with: exact whatever happened between, whether episodes came, were
retracted or scored again (and back), and whatever compaction did to the files. No step is read for it.

A group can end: its grouping was defined anew, or its last episode was retracted. A job that finds this says so with a
row without episodes, and the group's advantages no longer count (`latest_advantages`). A job that was told to look at
some groups only ends none.
"""

from dataclasses import dataclass

import polars as pl

from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import TABLES
from pipelines.credit.diagnosis import DIAGNOSED, CreditDiagnosis, diagnose

_COLUMNS = ("group_id", "run_id", "job_id", "input_fingerprint")

_JOBS = """
SELECT job_id FROM job_runs WHERE series_id = ? AND status = 'succeeded'
ORDER BY ended_order(sequence, ended_at, job_id)
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a job of a series has to do.

    Attributes:
        changed: groups to compute: group_id, input_fingerprint, episodes, steps.
        kept: rows of `credit_groups` of the other groups, as `newest_groups` reads them.
        ended: group_id and run_id of groups that have no episodes any more.
    """

    changed: pl.DataFrame
    kept: pl.DataFrame
    ended: pl.DataFrame

    @property
    def nothing(self) -> bool:
        """Whether every group is unchanged."""
        return self.changed.is_empty() and self.ended.is_empty()


def find_changes(
    snapshot: Snapshot, series_id: int, groups: pl.DataFrame, *, partial: bool = False, force: bool = False
) -> Changes:
    """Compare groups with what the series holds.

    Args:
        snapshot: where to read.
        series_id: of the job.
        groups: of `group_fingerprints`, what there is now.
        partial: `groups` are some of those that the series is about.
        force: everything changed.
    """
    newest = newest_groups(snapshot, series_id)
    same = newest.join(groups, on=["group_id", "input_fingerprint"], how="semi")
    if force:
        same = same.clear()
    ended = newest.filter(pl.col("episodes") > 0).join(groups, on="group_id", how="anti")
    if partial:
        ended = ended.clear()
    return Changes(
        changed=groups.join(same, on="group_id", how="anti", maintain_order="left"),
        kept=same,
        ended=ended.select("group_id", "run_id").sort("group_id"),
    )


def newest_groups(snapshot: Snapshot, series_id: int) -> pl.DataFrame:
    """The newest row of each group of a series: what comparing and diagnosing need, and when its job ended."""
    rows = snapshot.scan("credit_groups").filter(pl.col("series_id") == series_id).select(*_COLUMNS, *DIAGNOSED)
    # By the order in which jobs ended, whatever the clocks said: its one rule is SQL.
    jobs = snapshot.sql(_JOBS, [series_id]).with_row_index("ended").lazy()
    newest_last = rows.join(jobs, on="job_id").sort("ended")
    return collected(newest_last.unique("group_id", keep="last"))


def empty_rows(groups: pl.DataFrame) -> pl.DataFrame:
    """Rows of `credit_groups` that say of groups that they have no episodes any more."""
    counts = [
        column.name
        for column in TABLES["credit_groups"].columns
        if column.required and column.name not in ("group_id", "job_id", "series_id", "write_id", "is_dead", "findings")
    ]
    return groups.with_columns(
        pl.lit(value=False).alias("is_dead"), pl.lit("").alias("findings"), *(pl.lit(0).alias(name) for name in counts)
    )


def summary_of(groups: pl.DataFrame) -> CreditDiagnosis:
    """The figures of a job, from one row of `credit_groups` for each of its groups."""
    return diagnose(groups.lazy().filter(pl.col("steps") > 0))


def newest_job_of(groups: pl.DataFrame) -> int:
    """The newest job among those that computed some groups."""
    return int(groups.sort("ended")["job_id"][-1])
