"""Hiding episodes from readers, and bringing them back: both only add rows to `retractions`.

A restoration names the retractions that it takes back, by their write attempts. So no order of events decides, and no
clock. A retraction that another process writes meanwhile is not among those named: the episode stays hidden. Whoever
retracts the episode again writes a new retraction. What a retry replaced, or `forget` erased, comes back by neither:
those rows are never taken back (`lake.read.visibility.in_force`).

Old snapshots show what they showed: they read `retractions` as it was, or as far as it was accepted then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.read.visibility import in_force
from lake.tables import RETRACTIONS, TABLES
from lake.write.writer import known_episodes, write_retractions

if TYPE_CHECKING:
    from lake.lake import Lake

RETRACTED, SUPERSEDED, FORGOTTEN, RESTORED = "retracted", "superseded", "forgotten", "restored"
"""Kinds of rows of `retractions`."""
_COVERED = """
SELECT count(DISTINCT group_id) FROM current_advantages
WHERE group_id IN (SELECT group_id FROM episodes WHERE episode_id IN (SELECT unnest($ids::BIGINT[])))
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """What retracting or restoring some episodes comes to."""

    changed: tuple[int, ...]
    """The episodes that are hidden, or shown, by it; sorted."""
    unchanged: tuple[int, ...] = ()
    """Those that are hidden, or shown, already."""
    replaced: tuple[int, ...] = ()
    """Of a restoration: those that a later attempt of the rollout keeps hidden."""
    job_id: int | None = None
    """The job that did it; None where nothing was written."""


@dataclass(frozen=True, slots=True)
class Consequences:
    """What readers no longer see, or see again."""

    groups: int
    """That the episodes were collected in."""
    whole_groups: int
    """Of these, the ones that vanish as a whole, or come back."""
    rows: dict[str, int]
    """Table -> rows of the episodes; tables without any are left out."""
    credit: str | None
    """The estimator of the current credit; None without credit."""
    credit_groups: int
    """Groups of the current credit that have other members then."""


def retract(lake: "Lake", episode_ids: Iterable[int | str], reason: str | None, *, dry_run: bool = False) -> Choice:
    """Hide episodes from readers of later snapshots; see `Lake.retract`."""
    snapshot = lake.snapshot()
    known = known_episodes(snapshot, ids.as_ids(episode_ids))["episode_id"].unique().sort()
    is_hidden = known.is_in(snapshot.retracted.implode())
    fresh, unchanged = known.filter(~is_hidden).to_list(), tuple(known.filter(is_hidden))
    if dry_run or not fresh:
        return Choice(tuple(fresh), unchanged)
    with lake.job(kind="retract", parameters={"reason": reason}) as job:
        write_retractions(job, fresh, RETRACTED, reason)
        job.counts["rows_out"] = len(fresh)
    return Choice(tuple(fresh), unchanged, job_id=job.job_id)


def restore(lake: "Lake", episode_ids: Iterable[int | str], reason: str | None, *, dry_run: bool = False) -> Choice:
    """Show retracted episodes to readers of later snapshots again; see `Lake.restore`."""
    snapshot, wanted = lake.snapshot(), sorted(set(ids.as_ids(episode_ids)))
    rows = collected(in_force(snapshot.scan_all(RETRACTIONS.name)).select("episode_id", "write_id", "kind"))
    rows = rows.filter(pl.col("episode_id").is_in(wanted))
    _refuse_forgotten(rows)
    known = set(known_episodes(snapshot, wanted)["episode_id"])
    by_kind = {kind: part for (kind,), part in rows.group_by("kind")}
    replaced = set(by_kind.get(SUPERSEDED, rows.clear())["episode_id"])
    taken = by_kind.get(RETRACTED, rows.clear()).filter(~pl.col("episode_id").is_in(sorted(replaced)))
    back = taken.group_by("episode_id").agg(restores=pl.col("write_id").sort()).sort("episode_id")
    changed = tuple(back["episode_id"])
    choice = Choice(changed, tuple(sorted(known - replaced - set(changed))), tuple(sorted(replaced)))
    if dry_run or not changed:
        return choice
    with lake.job(kind="restore", parameters={"reason": reason}) as job:
        written = back.with_columns(kind=pl.lit(RESTORED), at=pl.lit(job.now()), reason=pl.lit(reason, pl.String))
        job.write(RETRACTIONS.name, written)
        job.counts["rows_out"] = len(changed)
    return Choice(choice.changed, choice.unchanged, choice.replaced, job.job_id)


def _refuse_forgotten(rows: pl.DataFrame) -> None:
    """Raise UsageError: some of the episodes were erased."""
    gone = rows.filter(pl.col("kind") == FORGOTTEN)["episode_id"].unique().sort()
    if len(gone):
        named = ", ".join(map(ids.to_text, gone.head(3)))
        more = f" (+{len(gone) - 3} more)" if len(gone) > 3 else ""
        raise UsageError(
            f"episode {named}{more} was erased with `trajlake forget`: the lake holds nothing of it that could be "
            "restored; nothing was changed"
        )


def retracted_by(snapshot: Snapshot, job_id: int) -> list[int]:
    """The episodes that a retract job hid. Raises UsageError: it hid none."""
    rows = snapshot.scan_all(RETRACTIONS.name).filter((pl.col("job_id") == job_id) & (pl.col("kind") == RETRACTED))
    found = collected(rows.select("episode_id"))["episode_id"].unique().sort().to_list()
    if not found:
        raise UsageError(
            f"job {ids.to_text(job_id)} retracted no episode; "
            "`trajlake sql \"SELECT id_text(job_id), reason, count(*) FROM retractions WHERE kind = 'retracted' GROUP "
            'BY ALL"` lists those that did'
        )
    return found


def consequences(snapshot: Snapshot, episode_ids: Sequence[int]) -> Consequences:
    """What hiding some shown episodes takes from readers, or showing some hidden ones gives back to them."""
    mine = pl.col("episode_id").is_in(sorted(set(episode_ids)))
    groups = collected(snapshot.scan_all("episodes").filter(mine).select("group_id"))["group_id"].unique()
    others = snapshot.scan("episodes").filter(pl.col("group_id").is_in(groups.implode()) & ~mine)
    rest = collected(others.select("group_id"))["group_id"].n_unique()
    counts = {
        name: collected(snapshot.scan_all(name).filter(mine).select(pl.len())).item()
        for name, table in TABLES.items()
        if table.hides_retracted
    }
    with snapshot.session(retracted_too=True) as session:
        current = session.query("SELECT estimator FROM credit_series WHERE is_current")
        covered = 0 if current.is_empty() else session.query(_COVERED, {"ids": list(episode_ids)}).item()
    return Consequences(
        groups=len(groups),
        whole_groups=len(groups) - rest,
        rows={name: count for name, count in counts.items() if count},
        credit=None if current.is_empty() else current.item(),
        credit_groups=covered,
    )
