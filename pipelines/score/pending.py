"""Which episodes are still to be scored by one version of a scorer.

Pointwise and batch-wise functions score episodes; one that has a row of this version is done. Group-wise functions
score groups as they stand: a group is done if the newest job that scored it scored exactly the siblings there are now,
so one that has grown or lost a sibling is scored again, as a whole.

Which version of a scorer counts is decided by what ran last (view `scorer_versions`). Whoever takes an edit of a
function back and scores with it finds everything scored already: no row is written, but a job that says which version
it confirms.
"""

from dataclasses import dataclass
from typing import Any

import polars as pl

from lake.judgements.predicates import select_where
from lake.judgements.scores import version_of
from lake.lake import Lake
from lake.read.episodes import KEYS
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from pipelines.score.rows import SIBLINGS


def confirm(lake: Lake, scorer: str, version: str, **job: Any) -> bool:
    """Make a version current that scored something, if another is; whether that was done.

    `job` holds the arguments of `Lake.job`: kind, series, code, parameters.
    """
    snapshot = lake.snapshot()
    current = version_of(snapshot, scorer)
    if current in (None, version) or version_of(snapshot, f"{scorer}@{version}") is None:
        return False
    parameters = job.pop("parameters") | {"confirms": f"{scorer}@{version}"}
    with lake.job(parameters=parameters, snapshot=snapshot, **job) as written:
        written.counts |= {"rows_in": 0, "rows_out": 0}
    return True


COLUMNS = (*KEYS, "num_steps")


@dataclass(frozen=True)
class Pending:
    """What a score run has to do."""

    episodes: pl.DataFrame
    """run_id, group_id, episode_id, num_steps of the episodes to score."""
    selected: int
    """Episodes that were asked for; all siblings of theirs included, for a group-wise function."""
    jobs: frozenset[int]
    """Jobs whose scores were known when this was decided."""
    failed: int
    """Episodes that are left alone although they have an error, or a sibling in the same call has."""

    @property
    def present(self) -> int:
        """Episodes that have their score."""
        return self.selected - len(self.episodes)


def find_pending(
    snapshot: Snapshot,
    where: str | None,
    series_id: int,
    *,
    grouped: bool = False,
    retry_failed: bool = False,
    force: bool = False,
) -> Pending:
    """Episodes without a score of one series: one version of a scorer, with its options.

    `grouped`: the function scores whole groups. `retry_failed`: take the scored ones whose row has an error, and
    nothing else. `force`: take all. UsageError for a bad predicate, DataRefusedError if it selects nothing.
    """
    chosen = select_where(snapshot, COLUMNS, where)
    if grouped and where is not None:
        every = select_where(snapshot, COLUMNS, None)
        chosen = every.join(chosen.select("group_id").unique(), on="group_id", how="semi")
    rows = _scored(snapshot, series_id)
    jobs = frozenset(rows["job_id"].unique().to_list())
    if grouped:
        done, failed = _of_groups(rows, chosen)
        key = "group_id"
    else:
        newest = rows.sort("sequence").unique("episode_id", keep="last")
        done = newest.select("episode_id")
        failed = newest.filter("failed").select("episode_id")
        key = "episode_id"
    if retry_failed:
        todo = chosen.join(failed, on=key, how="semi")
    else:
        todo = chosen if force else chosen.join(done, on=key, how="anti")
    left = chosen.join(todo, on="episode_id", how="anti").join(failed, on=key, how="semi")
    return Pending(todo.sort(*KEYS), len(chosen), jobs, left.height)


def taken(snapshot: Snapshot, series_id: int, episode_ids: pl.Series, known: frozenset[int]) -> pl.Series:
    """Those of some episodes (int64 [E]) that a job has scored meanwhile: none of the known ones, nor of our own."""
    rows = snapshot.scan("scores").filter(
        pl.col("series_id") == series_id,
        pl.col("episode_id").is_in(episode_ids.implode()),
        ~pl.col("job_id").is_in(list(known)),
    )
    return collected(rows.select(pl.col("episode_id").unique()))["episode_id"]


def _scored(snapshot: Snapshot, series_id: int) -> pl.DataFrame:
    """A row per scored episode (retracted ones included) and job: both ids, group, sequence, failed, siblings."""
    with snapshot.session(retracted_too=True) as session:
        return session.query(
            "SELECT s.episode_id, any_value(s.group_id) AS group_id, s.job_id,"
            " any_value(coalesce(r.sequence, -1)) AS sequence, bool_or(s.error IS NOT NULL) AS failed,"
            f" max(json_extract(s.metrics, '$.{SIBLINGS}')::BIGINT) FILTER (s.step_index IS NULL) AS siblings"
            " FROM scores AS s JOIN job_runs AS r USING (job_id) WHERE s.series_id = ? GROUP BY s.episode_id, s.job_id",
            [series_id],
        )


def _of_groups(rows: pl.DataFrame, chosen: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Groups that stand as they were scored, and those of them with a failure."""
    newest = rows.select("group_id", "job_id", "sequence").sort("sequence").unique("group_id", keep="last")
    last = rows.join(newest, on=["group_id", "job_id"], how="semi")
    # Rows of retracted siblings are there, those of forgotten ones are not: the count tells.
    whole = last.group_by("group_id").agg(pl.col("episode_id").sort(), pl.col("failed").any(), pl.col("siblings").max())
    then = whole.filter(pl.col("episode_id").list.len() == pl.col("siblings"))
    now = chosen.group_by("group_id").agg(pl.col("episode_id").sort().alias("present"))
    same = now.join(then, on="group_id").filter(pl.col("present") == pl.col("episode_id"))
    return same.select("group_id"), same.filter("failed").select("group_id")
