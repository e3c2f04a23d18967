"""Which groups a credit job has to compute: those whose input is not the one their newest rows were computed from.

Every job leaves one row per group in `credit_groups`, with the hash of the group's input. The newest row of each group
of the series is the state that the next job compares with: exact whatever happened between, whether episodes came, were
retracted or scored again (and back), and whatever compaction did to the files. No step is read for it.

A group can end: its grouping was defined anew, or its last episode was retracted. A job that finds this for a group
that it or a job with the same filter answered for says so with a row without episodes, and the group's advantages no
longer count (`latest_advantages`).
"""

from dataclasses import dataclass

import msgspec
import polars as pl

from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import TABLES
from pipelines.credit.diagnosis import DIAGNOSED, CreditDiagnosis, diagnose

_STANDING = ("group_id", "run_id", "job_id", "input_fingerprint")


@dataclass(frozen=True, slots=True)
class Changes:
    """What a job of a series has to do.

    Attributes:
        changed: groups to compute: group_id, input_fingerprint, episodes, steps.
        kept: rows of `credit_groups` that stand for the other groups, as `standing_groups` reads them.
        ended: group_id and run_id of groups that have no episodes any more.
    """

    changed: pl.DataFrame
    kept: pl.DataFrame
    ended: pl.DataFrame

    @property
    def nothing(self) -> bool:
        """Whether everything stands."""
        return self.changed.is_empty() and self.ended.is_empty()


def find_changes(
    snapshot: Snapshot, series_id: int, groups: pl.DataFrame, *, where: str | None, force: bool = False
) -> Changes:
    """Compare groups with what the series holds.

    Args:
        snapshot: where to read.
        series_id: of the job.
        groups: of `group_fingerprints`, what there is now.
        where: the job's filter; without one it answers for all groups of the series.
        force: everything changed.
    """
    standing = standing_groups(snapshot, series_id)
    same = standing.join(groups, on=["group_id", "input_fingerprint"], how="semi")
    if force:
        same = same.clear()
    ended = standing.filter(pl.col("episodes") > 0).join(groups, on="group_id", how="anti")
    if where is not None:
        ended = ended.filter(pl.col("job_id").is_in(_jobs_with_filter(snapshot, series_id, where)))
    return Changes(
        changed=groups.join(same, on="group_id", how="anti", maintain_order="left"),
        kept=same,
        ended=ended.select("group_id", "run_id").sort("group_id"),
    )


def standing_groups(snapshot: Snapshot, series_id: int) -> pl.DataFrame:
    """The newest row of each group of a series: what comparing and diagnosing need, and `sequence` of its job."""
    rows = snapshot.scan("credit_groups").filter(pl.col("series_id") == series_id).select(*_STANDING, *DIAGNOSED)
    standing = rows.join(_jobs(snapshot, series_id).select("job_id", "sequence", "at"), on="job_id")
    newest_last = standing.sort("sequence", "at", "job_id", nulls_last=False)
    return collected(newest_last.unique("group_id", keep="last").drop("at"))


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
    """The newest job among those that groups stand by."""
    return int(groups.sort(pl.col("sequence").fill_null(-1), "job_id")["job_id"][-1])


def newer_series(snapshot: Snapshot, series_id: int) -> int | None:
    """The series of the newest succeeded credit job, which training takes by default; None if it is this one."""
    ended = snapshot.scan("jobs").filter((pl.col("kind") == "credit") & (pl.col("event") == "succeeded"))
    newest = collected(ended.sort("sequence", "at", "job_id", nulls_last=False).select("series_id").tail(1))[
        "series_id"
    ]
    return None if newest.is_empty() or newest[0] == series_id else int(newest[0])


def _jobs(snapshot: Snapshot, series_id: int) -> pl.LazyFrame:
    """Terminal rows of the succeeded jobs of a series."""
    return snapshot.scan("jobs").filter((pl.col("series_id") == series_id) & (pl.col("event") == "succeeded"))


def _jobs_with_filter(snapshot: Snapshot, series_id: int, where: str) -> list[int]:
    jobs = collected(_jobs(snapshot, series_id).select("job_id", "parameters"))
    return [job for job, text in jobs.iter_rows() if msgspec.json.decode(text or "{}").get("where") == where]
