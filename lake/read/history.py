"""The commits of a lake, newest first, each with the job that made it.

What changed between two snapshots: episodes that came and went, scores, advantages whose sign flipped.

Advantages are compared within a series (one estimator, one set of parameters, one code): what changed is the data.

The versions of all tables at an earlier moment, consistently.

Only the tables that decide what is visible (and those that are visible as they are) are taken at their old versions.
The others are taken at their newest: facts are never rewritten, so the rows that were visible then are in them now,
and those that were not are told by their write_ids. So clocks that disagree between writers cannot tear an episode
from its steps, and only few old files have to be kept.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from lake.storage.log_check import NOTE
from lake.storage.store import Store
from lake.tables import EPISODES, JOBS, RESOLUTION_ORDER, TABLES
from lake.tables.columns import Visibility

if TYPE_CHECKING:
    from lake.lake import Lake

_SCHEMA: dict[str, pl.DataType] = {
    "table": pl.String(),
    "version": pl.Int64(),
    "at": pl.Datetime("ms", "UTC"),
    "operation": pl.String(),
    "rows": pl.Int64(),
    "files_removed": pl.Int64(),
    "job_id": pl.Int64(),
    "kind": pl.String(),
    "run_id": pl.String(),
}


def commits(lake: "Lake", table: str | None, limit: int) -> pl.DataFrame:
    """Commits of one table or of all, newest first.

    Args:
        lake: whose.
        table: one table, or None for all.
        limit: commits a table.

    Returns:
        table, version, at, operation (append, compact, forget, ...), rows it wrote, files_removed, and the job that did
        it: job_id, kind, run_id. NULL where the commit does not say.

    Raises:
        UsageError: no such table.
    """
    if table is not None and table not in TABLES:
        msg = f"there is no table `{table}`; the tables are {', '.join(TABLES)}"
        raise UsageError(msg)
    rows = []
    for name in [table] if table else TABLES:
        for entry in lake.history(name, limit):
            note = entry["note"]
            at = note.get("at")
            rows.append(
                {
                    "table": name,
                    "version": entry.get("version"),
                    "at": datetime.fromisoformat(at) if at else datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
                    "operation": note.get("operation") or str(entry.get("operation", "")).lower(),
                    "rows": note.get("rows"),
                    "files_removed": note.get("removed"),
                    "job_id": ids.from_text(note["job"]) if "job" in note else None,
                }
            )
    schema = {name: dtype for name, dtype in _SCHEMA.items() if name not in ("kind", "run_id")}
    found = pl.DataFrame(rows, schema=schema)
    jobs = lake.sql("SELECT job_id, kind, run_id FROM job_runs").cast({"job_id": pl.Int64})
    return found.join(jobs, on="job_id", how="left").sort("at", descending=True, maintain_order=True).select(*_SCHEMA)


_ADVANTAGES = """
SELECT series_id, episode_id, step_index, group_id, run_id, advantage FROM latest_advantages
"""
_SCORES = """
SELECT series_id, scorer, scorer_version, episode_id, step_index, run_id, value FROM latest_scores
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Frames of what differs; empty where nothing does."""

    added: pl.DataFrame
    """Episodes only the second snapshot shows: episode_id, group_id, run_id, task_id, rollout_index, status."""
    removed: pl.DataFrame
    """Episodes only the first one shows (retracted or forgotten since), likewise."""
    scores: pl.DataFrame
    """Scores that are new, gone or other: series_id, scorer, episode_id, step_index, before, after, ..."""
    flips: pl.DataFrame
    """Advantages of both whose sign differs: series_id, episode_id, step_index, group_id, run_id, before, after."""

    def summary(self) -> pl.DataFrame:
        """One row a kind of change: change, rows."""
        return pl.DataFrame(
            {
                "change": ["episodes added", "episodes removed", "scores changed", "advantages whose sign flipped"],
                "rows": [len(self.added), len(self.removed), len(self.scores), len(self.flips)],
            }
        )


def difference(before: Snapshot, after: Snapshot) -> Difference:
    """Compare two snapshots of one lake."""
    columns = ["episode_id", "group_id", "run_id", "task_id", "rollout_index", "status"]
    old, new = (side.scan("episodes").select(columns) for side in (before, after))
    return Difference(
        added=new.join(old, on="episode_id", how="anti").sort(columns[1:3] + columns[:1]).collect(),
        removed=old.join(new, on="episode_id", how="anti").sort(columns[1:3] + columns[:1]).collect(),
        scores=_scores(before, after),
        flips=_flips(before, after),
    )


def _scores(before: Snapshot, after: Snapshot) -> pl.DataFrame:
    keys = ["series_id", "scorer", "scorer_version", "episode_id", "step_index", "run_id"]
    old, new = (side.sql(_SCORES) for side in (before, after))
    both = old.rename({"value": "before"}).join(
        new.rename({"value": "after"}), on=keys, how="full", coalesce=True, nulls_equal=True
    )
    return both.filter(pl.col("before").ne_missing(pl.col("after"))).sort(keys, nulls_last=True)


def _flips(before: Snapshot, after: Snapshot) -> pl.DataFrame:
    keys = ["series_id", "episode_id", "step_index"]
    old, new = (side.sql(_ADVANTAGES) for side in (before, after))
    both = old.select(*keys, pl.col("advantage").alias("before")).join(
        new.rename({"advantage": "after"}), on=keys, how="inner"
    )
    return both.filter(pl.col("before").sign() != pl.col("after").sign()).sort(keys)


def versions_at_time(store: Store, moment: datetime) -> dict[str, int]:
    """Table -> version, as of a moment.

    Raises:
        UsageError: before the lake was made.
    """
    versions = _versions(store, moment)
    if versions[EPISODES.name] == -1:
        made = committed_at(store, EPISODES.name, 0).isoformat()
        msg = f"{store.root} did not exist at {moment.isoformat()}; it was made at {made}"
        raise UsageError(msg)
    return versions


def versions_at_episodes(store: Store, version: int) -> dict[str, int]:
    """Table -> version, as of when `episodes` came to a version.

    Raises:
        UsageError: no such version.
    """
    newest = store.refresh(EPISODES.name)
    if not 0 <= version <= newest:
        msg = f"`episodes` has no version {version}; valid: 0 to {newest}"
        raise UsageError(msg)
    # Its own clock may have been behind the one that made the lake.
    versions = _versions(store, committed_at(store, EPISODES.name, version))
    return versions | {EPISODES.name: version}


def _versions(store: Store, moment: datetime) -> dict[str, int]:
    versions = {}
    for name in RESOLUTION_ORDER:
        decides = TABLES[name].visibility is Visibility.ALWAYS
        versions[name] = version_at(store, name, moment) if decides else store.refresh(name)
    return versions


def consistent(store: Store, versions: dict[str, int]) -> dict[str, int]:
    """The versions, with `jobs` no newer than `episodes`.

    A terminal row may name the writes that brought episodes: that of `forget` does, for what else these brought. If
    its clock was behind theirs, the row is there before they are: their steps would be seen without them.
    """

    def episodes_writes(version: int) -> frozenset[int]:
        return Snapshot(store, {EPISODES.name: version}).accepted_write_ids

    later = episodes_writes(store.refresh(EPISODES.name)) - episodes_writes(versions[EPISODES.name])

    def is_ahead(version: int) -> bool:
        deciding = {EPISODES.name: versions[EPISODES.name], JOBS.name: version}
        return not later.isdisjoint(Snapshot(store, deciding).accepted_write_ids)

    low, high = -1, versions[JOBS.name]
    if not later or not is_ahead(high):
        return versions
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_ahead(middle) else (middle, high)
    return versions | {JOBS.name: low}


def version_at(store: Store, name: str, moment: datetime) -> int:
    """The newest version of a table that was there at a moment; -1 before the table was."""
    low, high = -1, store.refresh(name)
    while low < high:
        middle = (low + high + 1) // 2
        if committed_at(store, name, middle) <= moment:
            low = middle
        else:
            high = middle - 1
    return low


def committed_at(store: Store, name: str, version: int) -> datetime:
    """When a version was committed, by its writer's clock."""
    data = store.objects.get(f"{name}/_delta_log/{version:020d}.json")
    for line in (data or b"").splitlines():
        info = msgspec.json.decode(line).get("commitInfo")
        if info is not None:
            at = (info.get(NOTE) or {}).get("at")
            return datetime.fromisoformat(at) if at else datetime.fromtimestamp(info["timestamp"] / 1000, UTC)
    # Its entry was cleaned up: older than anything that can be asked for.
    return datetime.min.replace(tzinfo=UTC)
