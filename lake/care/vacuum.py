"""Vacuum: what nobody can see any more leaves the disk, and nothing else.

Kept are the files of the newest versions, of every version that was the newest within the retention, of every pinned
version, and of what unfinished jobs read. What remains and is older than the retention goes: files that compaction
replaced, and orphans of writers that were killed. Before that, rows of dead writes (committed, but never accepted) are
taken out of the tables.

A writer that was stopped in between loses nothing: the fences make its next compare-and-swap fail, and it looks again
at what is there (`lake.write.writer`, `Job`); a file of its own that is gone is written again (`Store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from lake import ids
from lake.care.pins import Pins
from lake.documents import Versions, decode_document
from lake.errors import LakeAccessError, UsageError
from lake.read.snapshot import Snapshot, version_at
from lake.storage.commits import log_faults, revoke
from lake.storage.data_files import FileEntry
from lake.storage.objects import Found
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.columns import Visibility

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

RETENTION = timedelta(days=7)
"""How long files stay after nobody refers to them, and dead writes after they were written."""
SHORTEST_RETENTION = timedelta(hours=1)
"""What running readers may need."""
_LONGEST_JOB = timedelta(days=30)
"""A job without a terminal row may still end or be resumed for so long: its rows and what it reads are kept."""


@dataclass(slots=True)
class Vacuumed:
    """What vacuum did to a table."""

    table: str
    dead_files: int = 0
    """Files with rows of dead writes that were taken out of the table."""
    deleted_files: int = 0
    deleted_bytes: int = 0
    kept_for_pins: int = 0
    """Files that only a named snapshot, a lease or an unfinished job still needs."""


def vacuum(store: Store, *, retention: timedelta = RETENTION, dry_run: bool = False) -> list[Vacuumed]:
    """Drop dead writes and files that nobody needs; see `Lake.vacuum`. Raises LakeAccessError: a damaged pin or log."""
    if retention < SHORTEST_RETENTION:
        msg = f"a retention of {retention} would take files from under running readers; valid: an hour or more"
        raise UsageError(msg)
    if faults := log_faults(store.objects, Snapshot(store).versions):
        raise LakeAccessError(
            f"{store.root}: {'; '.join(faults[:5])}: the log is damaged, and what it does not name would be deleted. "
            "Restore it from a backup first; nothing was changed"
        )
    cutoff = store.clock() - retention
    done = {name: Vacuumed(name) for name in TABLES}
    if not dry_run:
        for name, count in drop_dead(store, cutoff).items():
            done[name].dead_files = count
    pins = Pins(store)
    with pins.vacuuming() if not dry_run else nullcontext():
        # What interrupted training runs read stays, so that they can be resumed.
        jobs = unfinished_jobs(Snapshot(store), store.clock())
        needed = [pin.versions for pin in pins.active()]
        needed += [versions_read(job) for job in jobs.iter_rows(named=True)]
        for name in TABLES:
            _delete(store, done[name], cutoff, [versions.get(name, -1) for versions in needed], dry_run=dry_run)
    return list(done.values())


def drop_dead(store: Store, cutoff: datetime) -> dict[str, int]:
    """Take rows of dead writes out of the tables; files a table.

    The order is what makes it safe. First the write attempts that look dead are revoked in public. Then whoever is
    about to accept one of them is made to look again, and finds it revoked. Only then it is asked which were accepted
    before, and the others go.
    """
    before = Snapshot(store)
    running = frozenset(unfinished_jobs(before, store.clock())["job_id"])
    can_be_dead = [name for name, table in TABLES.items() if table.visibility is Visibility.ACCEPTED]
    # Old files that may hold rows nobody accepted, and that no running job is going to accept.
    suspects = {
        name: [
            entry
            for entry in store.files(name)[1]
            if entry.written_at < cutoff and entry.clean_since is None and entry.low.get("job_id") not in running
        ]
        for name in can_be_dead
    }
    looked = frozenset().union(*(before.write_ids(entry) for entries in suspects.values() for entry in entries))
    if looked <= before.accepted_write_ids:
        return {}
    revoke(store.objects, looked - before.accepted_write_ids)
    store.fence("episodes")
    store.fence("jobs")
    return _drop(store, suspects)


def _drop(store: Store, suspects: dict[str, list[FileEntry]]) -> dict[str, int]:
    snapshot = Snapshot(store)
    dropped = {}
    for name, suspected in suspects.items():
        dead = [entry for entry in suspected if snapshot.write_ids(entry) - snapshot.accepted_write_ids]
        version, entries = store.files(name)
        live = {entry.name for entry in entries}
        dead = [entry for entry in dead if entry.name in live]
        if dead:
            kept = store.put_aside(name, _survivors(store, snapshot, name, dead), None)
            store.swap(name, version, dead, kept, operation="drop dead writes")
            dropped[name] = len(dead)
    return dropped


def _survivors(store: Store, snapshot: Snapshot, name: str, entries: list[FileEntry]) -> Iterable[pa.Table]:
    """Accepted rows of files that hold dead ones too: only other tools than ours mix them."""
    mixed = [entry for entry in entries if snapshot.write_ids(entry) & snapshot.accepted_write_ids]
    if not mixed:
        return ()
    dead = frozenset().union(*map(snapshot.write_ids, mixed)) - snapshot.accepted_write_ids
    where = f"write_id NOT IN ({', '.join(map(str, sorted(dead)))})"
    from lake.care.compaction import ordered_rows

    return ordered_rows(store.objects, mixed, TABLES[name], where=where)


def versions_read(job: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions that a job reads. Raises LakeAccessError: its row holds something else."""
    where = f"jobs.input_snapshot of job {ids.to_text(job['job_id'])}"
    remedy = f"try again once the job is {_LONGEST_JOB.days} days old"
    return decode_document(job["input_snapshot"], Versions, where, remedy)


def unfinished_jobs(snapshot: Snapshot, now: datetime) -> pl.DataFrame:
    """Jobs that may still end, or be resumed: no terminal row, and not too old. job_id, kind, input_snapshot."""
    import polars as pl

    jobs = snapshot.scan("jobs").select("job_id", "kind", "event", "at", "input_snapshot").collect()
    ended = jobs.filter(pl.col("event") != "started")["job_id"]
    young = jobs.filter((pl.col("event") == "started") & (pl.col("at") > now - _LONGEST_JOB))
    return young.filter(~pl.col("job_id").is_in(ended.implode())).select("job_id", "kind", "input_snapshot")


def _delete(store: Store, done: Vacuumed, cutoff: datetime, pinned: list[int], *, dry_run: bool) -> None:
    """Delete a table's files that are old and that nobody needs."""
    name = done.table
    found = [entry for entry in store.objects.list(name, staging=True) if "/_delta_log/" not in entry.path]
    found = [entry for entry in found if entry.modified < cutoff]
    if store.refresh(name) == -1:
        return
    old = _unneeded(store, name, cutoff, found)
    if old and not dry_run:
        # A rewrite that stood still for so long that its file looks like an orphan must not commit it any more.
        store.fence(name)
        old = _unneeded(store, name, cutoff, old)
    held = {f"{name}/{entry.name}" for v in set(pinned) for entry in store.files(name, v)[1]}
    gone = [entry for entry in old if entry.path not in held]
    done.kept_for_pins = len(old) - len(gone)
    done.deleted_files = len(gone)
    done.deleted_bytes = sum(entry.bytes for entry in gone)
    if not dry_run:
        store.objects.delete([entry.path for entry in gone])


def _unneeded(store: Store, name: str, cutoff: datetime, found: list[Found]) -> list[Found]:
    """Files that neither the newest version needs nor any since the cutoff."""
    _, newest = store.files(name)
    _, within = store.files(name, version_at(store, name, cutoff))
    needed = {f"{name}/{entry.name}" for entry in (*newest, *within)}
    return [entry for entry in found if entry.path not in needed]
