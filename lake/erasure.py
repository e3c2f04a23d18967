"""Erasure: `forget` removes episodes from every table and from the disk, the one operation that deletes facts.

1. The episodes are retracted as `forgotten` in a job of its own: readers stop seeing them, and writers will not take
   them again (the tombstone). What the same write attempts brought for others (a shared blob, the retraction of a
   predecessor) is accepted by that job too, so it outlives them.
2. Every table that names episodes is rewritten without them, blobs that nobody else refers to included.
3. Every file that is no longer live and holds them is deleted, whoever pinned it: snapshots taken before are broken,
   and say so. Killed at any point, it is run again and goes on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from lake.data_files import FileEntry
from lake.errors import ConflictError
from lake.jobs import Job
from lake.reading import scan
from lake.retractions import known_episodes, write_retractions
from lake.snapshot import Snapshot
from lake.sorting import ordered_rows
from lake.store import CommitLostError, Store
from lake.tables import TABLES

_TRIES = 50
_KEEPS = "retractions"
"""The table that keeps the tombstones."""


@dataclass(slots=True)
class Forgotten:
    """What erasure removed."""

    episodes: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """Rows by table."""
    deleted_files: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Files of no table that cannot be read: half-written ones of killed or running writers. Only these may still
    hold something; `vacuum` removes them when they are old enough."""


def tombstones(job: Job, snapshot: Snapshot, episode_ids: Sequence[int], reason: str | None) -> None:
    """First step, a job of its own: the episodes are gone for readers and barred for writers.

    Raises:
        UsageError: no ids, or ids that the lake does not hold.
    """
    known = _known_or_forgotten(snapshot, episode_ids)
    write_retractions(job, known["episode_id"].to_list(), "forgotten", reason)
    job.accept(known["write_id"].drop_nulls().unique().to_list())


def erase(store: Store, episode_ids: Sequence[int], *, job_id: int) -> Forgotten:
    """Second step: remove what the tombstones name.

    Raises:
        ConflictError: other processes rewrote a table again and again; run it again.
    """
    done = Forgotten(episodes=len(set(episode_ids)))
    wanted = pl.Series("episode_id", sorted(set(episode_ids)), dtype=pl.Int64)
    blobs = _orphaned_blobs(Snapshot(store), wanted)
    for name in _tables():
        key, values = ("blob_id", blobs) if name == "blobs" else ("episode_id", wanted)
        done.rows[name] = _rewrite(store, name, key, values, job_id)
    for name in _tables():
        key, values = ("blob_id", blobs) if name == "blobs" else ("episode_id", wanted)
        _delete_files(store, name, key, values, done)
    return done


def _tables() -> list[str]:
    """Tables that name episodes, `episodes` first: from then on no writer can count on what was there."""
    return [name for name, table in TABLES.items() if "episode_id" in table.names and name != _KEEPS] + ["blobs"]


def _known_or_forgotten(snapshot: Snapshot, episode_ids: Sequence[int]) -> pl.DataFrame:
    """As `known_episodes`; ids that were forgotten before, perhaps not to the end, are known too."""
    stones = snapshot.scan_all("retractions").filter(pl.col("kind") == "forgotten").select("episode_id").collect()
    before = set(stones["episode_id"]) & set(episode_ids)
    still = (
        snapshot.scan_all("episodes")
        .select("episode_id", "write_id")
        .filter(pl.col("episode_id").is_in(pl.Series(sorted(before), dtype=pl.Int64).implode()))
    )
    rest = sorted(set(episode_ids) - before)
    found = [still.collect()]
    if rest or not before:
        found.append(known_episodes(snapshot, rest).select("episode_id", "write_id"))
    gone = sorted(before - set(found[0]["episode_id"]))
    schema = found[0].schema
    return pl.concat([*found, pl.DataFrame({"episode_id": gone, "write_id": [None] * len(gone)}, schema=schema)])


def _orphaned_blobs(snapshot: Snapshot, episode_ids: pl.Series) -> pl.Series:
    """Blobs that only these episodes refer to."""
    refers = snapshot.scan_all("episodes").filter(pl.col("blob_ids").list.len() > 0).select("episode_id", "blob_ids")
    rows = refers.collect().explode("blob_ids", empty_as_null=False, keep_nulls=False)
    theirs = pl.col("episode_id").is_in(episode_ids.implode())
    others = rows.filter(~theirs)["blob_ids"]
    return rows.filter(theirs & ~pl.col("blob_ids").is_in(others.implode()))["blob_ids"].unique().sort()


def _rewrite(store: Store, name: str, key: str, values: pl.Series, job_id: int) -> int:
    """Rewrite the files of a table that hold these keys; the rows that went."""
    if values.is_empty():
        return 0
    # Rows that name no episode (most rejects) stay.
    where = f"({key} IS NULL OR {key} NOT IN ({', '.join(map(str, values))}))"
    for _ in range(_TRIES):
        version, entries = store.files(name)
        holding = {entry.name: count for entry in entries if (count := _count(store, name, entry.path, key, values))}
        if not holding:
            return 0
        removed = [entry for entry in entries if entry.name in holding]
        try:
            for entry in removed:
                _rewrite_one(store, name, version, entry, where, job_id, whole=entry.rows == holding[entry.name])
                version = store.refresh(name)
        except CommitLostError:
            continue
        return sum(holding.values())
    msg = f"table `{name}` is rewritten by other processes again and again; run it again when they are done"
    raise ConflictError(msg)


def _rewrite_one(
    store: Store, name: str, version: int, entry: FileEntry, where: str, job_id: int, *, whole: bool
) -> None:
    rows: Iterable[pa.Table] = () if whole else ordered_rows(store.objects, [entry], TABLES[name], where=where)
    store.rewrite(
        name, version, [entry], rows, operation="forget", clean_since=entry.clean_since, erases=True, job_id=job_id
    )


def _delete_files(store: Store, name: str, key: str, values: pl.Series, done: Forgotten) -> None:
    """Delete files of earlier versions, and orphans, that hold these keys."""
    if values.is_empty():
        return
    live = {f"{name}/{entry.name}" for entry in store.files(name)[1]}
    for found in store.objects.list(name, staging=True):
        if not found.path.endswith(".parquet") or found.path in live:
            continue
        try:
            holds = _count(store, name, store.objects.uri(found.path), key, values) > 0
        except (OSError, pl.exceptions.PolarsError):
            done.unreadable.append(found.path)
            continue
        if holds:
            store.objects.delete([found.path])
            done.deleted_files += 1


def _count(store: Store, name: str, path: str, key: str, values: pl.Series) -> int:
    """Rows of a file with one of these keys; none if the file is not there (a dead write's that vacuum took)."""
    rows = scan([path], TABLES[name], store.objects.polars_options).filter(pl.col(key).is_in(values.implode()))
    try:
        return int(rows.select(pl.len()).collect().item())
    except FileNotFoundError:
        return 0
