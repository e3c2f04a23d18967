"""Erasure: `forget` removes episodes from every table and from the disk, the one operation that deletes facts.

1. The episodes are retracted as `forgotten` in a job of its own: readers stop seeing them, and writers will not take
   them again (the tombstone). What the same write attempts brought for others (a shared blob, the retraction of a
   predecessor) is accepted by that job too, so it outlives them.
2. Every table that names episodes is rewritten without them, and blobs to which no episode refers are taken out. A
   judge's answer that told something of several episodes (`responses`) goes with the first of them, rows of the others
   included; these go first, as the rows of the forgotten episode tell which they are.
3. Every file that is no longer live and holds such rows is deleted, whoever pinned it. What took its place in step 2,
   or else a copy without those rows, is recorded as its replacement first (`Replacements`): snapshots taken
   before show the rest of what they held. Killed at any point, it is run again and goes on.

Saved views go first of all: those whose address names a forgotten episode, or its group or task if no other episode
has it. What lies outside of the lake (files that were ingested or exported, spools of recorders) is not reached.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from lake import ids
from lake.care.compaction import ordered_rows
from lake.care.pins import Pins
from lake.care.saved_views import drop_view, saved_views, words_of
from lake.care.vacuum import unfinished_jobs, versions_read
from lake.errors import LakeAccessError
from lake.read.parquet import collected, scan
from lake.read.snapshot import Snapshot
from lake.read.versions import own_versions
from lake.search import place
from lake.storage import local_cache
from lake.storage.commits import revoke, until_committed
from lake.storage.data_files import FileEntry, Replacement, Written
from lake.storage.objects import Found
from lake.storage.store import Store
from lake.tables import TABLES
from lake.write.jobs import Job
from lake.write.writer import known_episodes, write_retractions

_TRIES = 50
_KEEPS = "retractions"
"""The table that keeps the tombstones."""


@dataclass(slots=True)
class Forgotten:
    """What erasure removed."""

    episodes: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """Rows by table, of the newest versions."""
    deleted_files: int = 0
    views: list[str] = field(default_factory=list)
    """Saved views that named what was erased; deleted."""
    unreadable: list[str] = field(default_factory=list)
    """Files of no table that cannot be read: half-written ones of killed or running writers. Only these may still
    hold something; `vacuum` removes them when they are old enough."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What erasure takes from an earlier snapshot that somebody keeps."""

    kind: str
    """snapshot (named), lease (of a running reader) or job (interrupted: it can be resumed)."""
    name: str
    episodes: int
    """That it shows now."""
    forgotten: int
    """Those of them that go."""


def cuts(store: Store, episode_ids: Sequence[int]) -> list[Cut]:
    """Snapshots, readers and interrupted jobs that would lose episodes. Raises LakeAccessError: a damaged pin."""
    pins = Pins(store).active()
    kept = [("snapshot" if pin.expires_at is None else "lease", pin.name, pin.versions) for pin in pins]
    leased = [versions for kind, _, versions in kept if kind == "lease"]
    for row in unfinished_jobs(Snapshot(store), store.clock()).iter_rows(named=True):
        if (versions := own_versions(versions_read(row))) not in leased:
            kept.append(("job", f"{row['kind']} {ids.to_text(row['job_id'])}", versions))
    found = []
    for kind, name, versions in kept:
        if not versions:
            continue
        # Unreadable already: nothing of it can be lost.
        with suppress(LakeAccessError):
            shown = collected(Snapshot(store, versions).scan("episodes").select("episode_id"))["episode_id"]
            if forgotten := len(set(shown) & set(episode_ids)):
                found.append(Cut(kind, name, len(shown), forgotten))
    return found


def tombstones(job: Job, snapshot: Snapshot, episode_ids: Sequence[int], reason: str | None) -> None:
    """First step: gone for readers, barred for writers. Raises UsageError: no ids, or ids the lake does not hold."""
    known = _known_or_forgotten(snapshot, episode_ids)
    write_retractions(job, known["episode_id"].to_list(), "forgotten", reason)
    job.accept(known["write_id"].drop_nulls().unique().to_list())


@dataclass(frozen=True, slots=True)
class _Removal:
    """Rows of a table that are to go."""

    table: str
    rows: pl.Expr
    """True for them."""
    others: str
    """True for all others, in SQL; empty where it takes a look at each file (blobs)."""
    reveals: pl.Expr | None = None
    """True for rows that tell which rows go: files that hold them are deleted after all others."""


_Replaced = dict[str, Written]
"""Path of a file that a rewrite took out of its table -> the one that it put there."""


def erase(store: Store, episode_ids: Sequence[int], *, job_id: int) -> Forgotten:
    """Second step: remove what the tombstones name. Raises ConflictError: tables are rewritten again and again."""
    done = Forgotten(episodes=len(set(episode_ids)))
    wanted = pl.Series("episode_id", sorted(set(episode_ids)), dtype=pl.Int64)
    # `episodes` first: from then on no writer counts on what was there.
    removals = {name: _of_episodes(name, wanted) for name, t in TABLES.items() if "episode_id" in t.names}
    del removals[_KEEPS]
    done.views = _drop_views(store, wanted)
    asked = _requests_about(store, wanted)
    before = [_of_others(asked, wanted)] if len(asked) else []
    replaced = _Replaced()
    for one in [removals["episodes"], *before, *removals.values()]:
        done.rows[one.table] = done.rows.get(one.table, 0) + _rewrite(store, one, job_id, replaced)
    unused = _erase_blobs(store, done, job_id, replaced)
    if len(asked):
        removals["responses"] = _of_requests(asked, reveals=removals["responses"].rows)
    for one in [*removals.values(), unused]:
        _replace_files(store, one, done, replaced)
    place.delete(store.root)
    local_cache.erase()
    return done


def _drop_views(store: Store, wanted: pl.Series) -> list[str]:
    """Delete the saved views whose address names what goes; return their names."""
    views = saved_views(store.objects)
    if not views:
        return []
    rows = Snapshot(store).scan_all("episodes").select("episode_id", "group_id", "task_id").collect()
    goes = pl.col("episode_id").is_in(wanted.implode())
    gone, rest = rows.filter(goes), rows.filter(~goes)
    words = set(gone["task_id"]) - set(rest["task_id"])
    for column in ("episode_id", "group_id"):
        words.update(map(ids.to_text, set(gone[column]) - set(rest[column])))
    named = [view.name for view in views if not words.isdisjoint(words_of(view))]
    for name in named:
        drop_view(store.objects, name)
    return named


def _erase_blobs(store: Store, done: Forgotten, job_id: int, replaced: _Replaced) -> _Removal:
    """Take out the payloads to which no episode refers any more, also of writes that are not accepted.

    Writers who are about to refer to one of these are made to write it again. Returns what goes from the disk too:
    payloads of writers who came later are not among it, as nobody knows yet which of them they will refer to.
    """
    snapshot = Snapshot(store)
    undecided = _write_ids(store, snapshot) - snapshot.accepted_write_ids
    if undecided:
        revoke(store.objects, undecided)
        store.fence("episodes")
        snapshot = Snapshot(store)
    used = _referred(snapshot)
    decided = pl.Series(sorted(undecided | snapshot.accepted_write_ids), dtype=pl.Int64)
    is_decided = pl.col("write_id").is_in(decided.implode())
    blobs = _stored(snapshot).join(used, on=["blob_id", "write_id"], how="anti")
    if len(gone := blobs.filter(is_decided)):
        done.rows["blobs"] = _rewrite(store, _of_blobs(gone), job_id, replaced)
    return _Removal("blobs", is_decided & ~_is_one_of(used), "")


def _write_ids(store: Store, snapshot: Snapshot) -> frozenset[int]:
    """The write attempts that have payloads in the table, or in files on the disk that no commit names (yet)."""
    entries = snapshot.entries("blobs")
    found = frozenset().union(*map(snapshot.write_ids, entries))
    live = {f"blobs/{entry.name}" for entry in entries}
    for file in store.objects.list("blobs", staging=True):
        if file.path.endswith(".parquet") and file.path not in live:
            rows = scan([store.objects.uri(file.path)], TABLES["blobs"], store.objects.polars_options)
            # A half-written file is reported when files are deleted.
            with suppress(OSError, pl.exceptions.PolarsError):
                found |= frozenset(rows.select(pl.col("write_id").unique()).collect()["write_id"])
    return found


def _of_episodes(name: str, wanted: pl.Series) -> _Removal:
    # Rows that name no episode (most rejects) stay.
    others = f"(episode_id IS NULL OR episode_id NOT IN ({', '.join(map(str, wanted))}))"
    return _Removal(name, pl.col("episode_id").is_in(wanted.implode()), others)


def _requests_about(store: Store, wanted: pl.Series) -> pl.Series:
    """Requests (int64) whose answers concern some episodes, as all files say, dead and old ones too."""
    found = [pl.Series("request_id", [], dtype=pl.Int64)]
    for file in store.objects.list("responses", staging=True):
        if not file.path.endswith(".parquet"):
            continue
        rows = scan([store.objects.uri(file.path)], TABLES["responses"], store.objects.polars_options)
        about = rows.filter(pl.col("episode_id").is_in(wanted.implode())).select(pl.col("request_id").unique())
        # A half-written file is not of any use here; it is reported when files are deleted.
        with suppress(OSError, pl.exceptions.PolarsError):
            found.append(about.collect()["request_id"])
    return pl.concat(found).unique().sort()


def _of_others(asked: pl.Series, wanted: pl.Series) -> _Removal:
    """The answers' rows of other episodes."""
    is_wanted = pl.col("episode_id").is_in(wanted.implode())
    requests, episodes = ", ".join(map(str, asked)), ", ".join(map(str, wanted))
    others = f"(request_id NOT IN ({requests}) OR episode_id IN ({episodes}))"
    return _Removal("responses", pl.col("request_id").is_in(asked.implode()) & ~is_wanted, others)


def _of_requests(asked: pl.Series, reveals: pl.Expr) -> _Removal:
    """The answers' rows of all episodes."""
    others = f"request_id NOT IN ({', '.join(map(str, asked))})"
    return _Removal("responses", pl.col("request_id").is_in(asked.implode()), others, reveals=reveals)


def _of_blobs(pairs: pl.DataFrame) -> _Removal:
    spelled = ", ".join(f"({blob_id}, {write_id})" for blob_id, write_id in pairs.iter_rows())
    return _Removal("blobs", _is_one_of(pairs), f"(blob_id, write_id) NOT IN ({spelled})")


def _is_one_of(pairs: pl.DataFrame) -> pl.Expr:
    pair = pl.concat_str("blob_id", "write_id", separator=" ")
    return pair.is_in(pairs.select(pair).to_series().implode())


def _stored(snapshot: Snapshot) -> pl.DataFrame:
    """Blobs (blob_id, write_id) in the table, visible or not."""
    paths = [entry.path for entry in snapshot.entries("blobs")]
    if not paths:
        return pl.DataFrame(schema={"blob_id": pl.Int64, "write_id": pl.Int64})
    rows = scan(paths, TABLES["blobs"], snapshot.objects.polars_options)
    return collected(rows.select("blob_id", "write_id").unique())


def _referred(snapshot: Snapshot) -> pl.DataFrame:
    """Blobs (blob_id, write_id) that episodes need: a blob is there for the episodes of its own write attempt."""
    refers = snapshot.scan_all("episodes").filter(pl.col("blob_ids").list.len() > 0).select("blob_ids", "write_id")
    rows = collected(refers).explode("blob_ids", empty_as_null=False, keep_nulls=False)
    return rows.rename({"blob_ids": "blob_id"}).select("blob_id", "write_id").unique()


def _known_or_forgotten(snapshot: Snapshot, episode_ids: Sequence[int]) -> pl.DataFrame:
    """As `known_episodes`; ids that were forgotten before, perhaps not to the end, are known too."""
    stones = snapshot.scan_all("retractions").filter(pl.col("kind") == "forgotten").select("episode_id").collect()
    before = set(stones["episode_id"]) & set(episode_ids)
    is_before = pl.col("episode_id").is_in(pl.Series(sorted(before), dtype=pl.Int64).implode())
    rest = sorted(set(episode_ids) - before)
    found = [snapshot.scan_all("episodes").select("episode_id", "write_id").filter(is_before).collect()]
    if rest or not before:
        found.append(known_episodes(snapshot, rest).select("episode_id", "write_id"))
    gone = sorted(before - set(found[0]["episode_id"]))
    schema = found[0].schema
    return pl.concat([*found, pl.DataFrame({"episode_id": gone, "write_id": [None] * len(gone)}, schema=schema)])


def _rewrite(store: Store, removal: _Removal, job_id: int, replaced: _Replaced) -> int:
    """Rewrite the files of a table that hold such rows; how many went."""

    def commit() -> int:
        version, entries = store.files(removal.table)
        counts = [_count(store, removal.table, removal.rows, entry.path) for entry in entries]
        for entry, count in zip(entries, counts, strict=True):
            if not count:
                continue
            rows = _others(store, removal, entry, whole=entry.rows == count)
            written = store.put_aside(removal.table, rows, entry.clean_since)
            store.swap(removal.table, version, [entry], written, operation="forget", erases=True, job_id=job_id)
            replaced[f"{removal.table}/{entry.name}"] = written
            version = store.refresh(removal.table)
        return sum(counts)

    busy = f"table `{removal.table}` is rewritten by other processes again and again; run it again when they are done"
    return until_committed(commit, tries=_TRIES, busy=busy)


def _others(store: Store, removal: _Removal, entry: FileEntry, *, whole: bool) -> Iterable[pa.Table]:
    """The rows of a file that stay."""
    where = removal.others
    if not where and not whole:
        rows = scan([entry.path], TABLES["blobs"], store.objects.polars_options).filter(removal.rows)
        where = _of_blobs(collected(rows.select("blob_id", "write_id").unique())).others
    return () if whole else ordered_rows(store.objects, [entry], TABLES[removal.table], where=where)


def _replace_files(store: Store, removal: _Removal, done: Forgotten, replaced: _Replaced) -> None:
    """Delete files of earlier versions, and orphans, that hold such rows; record what holds their other rows."""
    name = removal.table
    live = {f"{name}/{entry.name}" for entry in store.files(name)[1]}
    first: list[str] = []
    last: list[str] = []
    records = []
    for found in store.objects.list(name, staging=True):
        if not found.path.endswith(".parquet") or found.path in live:
            continue
        path = store.objects.uri(found.path)
        try:
            if not _count(store, name, removal.rows, path):
                continue
            tells = removal.reveals is not None and _count(store, name, removal.reveals, path) > 0
            records.append(_record(store, removal, found, replaced))
        except (OSError, pl.exceptions.PolarsError):
            done.unreadable.append(found.path)
            continue
        (last if tells else first).append(found.path)
    store.replacements.publish(records)
    for paths in filter(None, (first, last)):
        store.objects.delete(paths)
    done.deleted_files += len(records)


def _record(store: Store, removal: _Removal, found: Found, replaced: _Replaced) -> Replacement:
    """What is read instead of a file from now on: what a rewrite made of it, or a copy without such rows."""
    name = found.path.rpartition("/")[2]
    entry = FileEntry(store.objects.uri(found.path), name, 0, found.bytes, found.modified, {}, {})
    rows = scan([entry.path], TABLES[removal.table], store.objects.polars_options)
    writes = rows.group_by("write_id").agg(gone=removal.rows.fill_null(value=False).all()).collect()
    written = replaced.get(found.path)
    if written is None and not writes["gone"].all():
        written = store.put_aside(removal.table, _others(store, removal, entry, whole=False), entry.clean_since)
    emptied = tuple(writes.filter("gone")["write_id"].drop_nulls())
    if written is None or not written.rows:
        return Replacement(old=found.path, new=None, rows=0, bytes=0, emptied=emptied)
    return Replacement(old=found.path, new=written.add.path, rows=written.rows, bytes=written.add.size, emptied=emptied)


def _count(store: Store, name: str, which: pl.Expr, path: str) -> int:
    """Such rows of a table's file; none if the file is not there (a dead write's that vacuum took)."""
    rows = scan([path], TABLES[name], store.objects.polars_options).filter(which)
    try:
        return int(rows.select(pl.len()).collect().item())
    except FileNotFoundError:
        return 0
