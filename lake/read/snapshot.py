"""A snapshot: one consistent, reopenable view of all tables.

Tables are resolved in the reverse of the order in which writers commit (`RESOLUTION_ORDER`), so whatever a resolved
row refers to is there. A snapshot is a mapping table -> Delta version: printable, storable in a job or a checkpoint,
and reopened with `Lake.at`.

Of an earlier moment, only the tables that decide what is visible (and those that are visible as they are) are taken at
their old versions. The others are taken at their newest: facts are never rewritten, so the rows that were visible then
are in them now, and those that were not are told by their write_ids. So clocks that disagree between writers cannot
tear an episode from its steps, and only few old files have to be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lake import ids
from lake.documents import decode_document
from lake.errors import ContractError, UsageError
from lake.execution.held import held
from lake.read.versions import other_roots
from lake.read.visibility import DataFile, all_files, in_force, is_clean, visible_files
from lake.storage.commits import NOTE
from lake.storage.data_files import FileEntry, applied
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import EPISODES, JOBS, RESOLUTION_ORDER, TABLES
from lake.tables.columns import Table, Visibility

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from lake.read.kept import Kept
    from lake.read.query import Limits, Session

_log = logging.getLogger("trajlake")


class Reads(Protocol):
    """A consistent view of a lake that takes SELECTs: a `Snapshot`, or something that stands for one."""

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT."""

    def __hash__(self) -> int:
        """By identity: what is read from never changes."""


class Snapshot:
    """All tables at fixed versions, with dead writes and retracted episodes left out.

    Args:
        versions: table -> Delta version; None takes the newest of each.
    """

    def __init__(self, store: Store, versions: Mapping[str, int] | None = None) -> None:
        self._store = store
        self._is_newest = versions is None
        self._entries: dict[str, list[FileEntry]] = {}
        self._files: dict[str, list[DataFile]] = {}
        self.versions: dict[str, int] = {}
        self.forgotten = 0
        """Episodes that were erased with `forget` since: an earlier snapshot shows the others."""
        self._emptied: frozenset[int] = frozenset()
        self._warned = False
        self.root = store.root
        if others := ", ".join(other_roots(versions or {})):
            raise UsageError(f"a snapshot of several lakes: open {store.root} and {others} together")
        if versions is not None and (unknown := set(versions) - set(TABLES)):
            raise ContractError(f"a snapshot names unknown tables {sorted(unknown)}; valid: {', '.join(TABLES)}")
        self._resolve(versions)
        while self._is_newest and self._forget_began():
            self._resolve(None)

    def __reduce__(self) -> tuple[Any, ...]:
        """By address and versions; a worker process opens it once for all parts that it is given."""
        opened = partial(Snapshot, self._store, self.versions)
        return held, (f"snapshot of {self.root}", tuple(self.versions.items()), opened)

    def _resolve(self, versions: Mapping[str, int] | None) -> None:
        known = {} if versions is None else self._store.replacements.known()
        for name in RESOLUTION_ORDER:
            wanted = None if versions is None else versions.get(name, -1)
            if wanted is not None and (not isinstance(wanted, int) or wanted < -1):
                raise ContractError(f"table `{name}` has no version {wanted!r}; valid: -1 (no table yet), 0, 1, 2, ...")
            self.versions[name], entries = self._store.logged(name, wanted)
            there, gone = applied(self.objects, name, entries, known)  # as they are since a `forget`
            if known and name == "episodes":
                self.forgotten = sum(entry.rows for entry in entries) - sum(entry.rows for entry in there)
                self._emptied = frozenset().union(*(entry.emptied for entry in (*there, *gone)))
            self._entries[name] = there

    def _forget_began(self) -> bool:
        """Whether a `forget` began while tables were resolved: the later ones may lack rows that the earlier refer to.

        Its first row in `jobs` comes after its tombstones were accepted and before it takes the first row away, and
        `jobs` is resolved before every table whose rows tombstones hide.
        """
        since, now = self.versions["jobs"], self._store.refresh("jobs")
        if now == since or not (added := [entry.path for entry in self._store.added("jobs", since, now)]):
            return False
        import polars as pl

        from lake.read.parquet import collected, scan

        rows = scan(added, JOBS, self.objects.polars_options)
        return "forget" in collected(rows.select(pl.col("kind").unique()))["kind"]

    def __repr__(self) -> str:
        """The mapping, as JSON."""
        return f"Snapshot({msgspec.json.encode(self.versions).decode()})"

    @property
    def objects(self) -> Objects:
        """Where the files lie."""
        return self._store.objects

    def newest(self) -> Snapshot:
        """The same lake as it is now."""
        return Snapshot(self._store)

    def entries(self, name: str) -> list[FileEntry]:
        """All files of a table, visible or not."""
        return self._entries[_table(name).name]

    def files(self, name: str) -> list[DataFile]:
        """Parquet files of a table that hold visible rows (retracted episodes among them).

        Raises:
            LakeAccessError: `steps` lacks rows of visible episodes. What jobs' tables lack is warned of.
        """
        table = _table(name)
        if name not in self._files:
            self._check_losses(table)
            entries = self._entries[name]

            def accepted() -> frozenset[int]:
                # As far as these files hold rows of them: `jobs` is read only if that matters.
                known = self._episode_write_ids
                return known if all(self.write_ids(one) <= known for one in entries) else self.accepted_write_ids

            self._files[name] = (
                visible_files(entries, accepted, self.versions, self.write_ids)
                if table.visibility is Visibility.ACCEPTED
                else all_files(entries)
            )
        return self._files[name]

    def _check_losses(self, table: Table) -> None:
        if self.versions[table.name] == -1 or table.visibility is Visibility.ALWAYS:
            return
        from lake.read.lost_rows import lost_jobs, require_steps

        if table.name == "steps":
            require_steps(self)
        elif not self._warned and table.name not in ("spans", "blobs", "retractions"):
            self._warned = True
            for job_id, kind, lost in lost_jobs(self, look=False).iter_rows():
                _log.warning(
                    "%s: the %s job %s succeeded, and rows of %d of its writes are gone: a commit of a log is lost. "
                    "Run it again, or restore the log from a backup",
                    *(self.root, kind, ids.to_text(job_id), lost),
                )

    @property
    def emptied(self) -> frozenset[int]:
        """Write attempts of which `forget` left no row in some file."""
        return frozenset().union(*(one.emptied for one in self._store.replacements.known().values()))

    def scan(self, name: str) -> pl.LazyFrame:
        """The table's visible rows, lazily, with the columns and types of its spec.

        A filter on `episode_id`, `group_id`, `run_id`, `job_id` or `series_id` skips files that cannot match.
        """
        frame = self.scan_all(name)
        if TABLES[name].hides_retracted and len(self.retracted):
            import polars as pl

            frame = frame.filter(~pl.col("episode_id").is_in(self.retracted.implode()))
        return frame

    def scan_all(self, name: str) -> pl.LazyFrame:
        """As `scan`, rows of retracted episodes included."""
        from lake.read.parquet import scan_pruned

        table = _table(name)
        frame = scan_pruned(self.files(name), table, self.objects.polars_options)
        if table.distinct:
            frame = frame.sort("write_id").unique(list(table.key), keep="first", maintain_order=True)
        return frame

    @cached_property
    def retracted(self) -> pl.Series:
        """Episodes that readers do not see: int64 [E], sorted."""
        from lake.read.parquet import collected

        hidden = collected(in_force(self.scan_all("retractions")).select("episode_id"))["episode_id"]
        if self._may_lack:
            hidden.append(self._forgotten)
        return hidden.unique().sort()

    @cached_property
    def _may_lack(self) -> bool:
        """Whether this shows an earlier moment, and something may have been forgotten since."""
        return not self._is_newest and self._store.refresh("retractions") != -1

    @cached_property
    def _forgotten(self) -> pl.Series:
        """What was forgotten by now: of an earlier moment it may be gone from some tables and not yet from others."""
        import polars as pl

        from lake.read.parquet import collected

        rows = Snapshot(self._store).scan_all("retractions").filter(pl.col("kind") == "forgotten")
        return collected(rows.select("episode_id"))["episode_id"]

    def hidden(self, _place: int = 0) -> pl.Series | None:
        """As `retracted`; None if nothing was ever retracted, which the log tells."""
        return self.retracted if self.files("retractions") or self._may_lack else None

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT (DuckDB), with parameters ? or $name, over every table by name and the shipped views.

        Raises QueryError: not one SELECT, or SQL that DuckDB refuses.
        """
        with self.session() as session:
            return session.query(query, params)

    def stream(
        self, query: str, params: list[Any] | dict[str, Any] | None = None, rows: int = 65_536
    ) -> pa.RecordBatchReader:
        """As `sql`, rows as they come, in bounded memory; what goes wrong later is raised while reading."""
        import pyarrow as pa

        session = self.session()
        reader = session.stream(query, params, rows)

        def batches() -> Iterator[pa.RecordBatch]:
            with session:
                yield from reader

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def session(
        self, limits: Limits | None = None, *, retracted_too: bool = False, kept: Kept | None = None
    ) -> Session:
        """A connection for several queries in a row; close it, or use it as a context."""
        from lake.read.query import Session

        return Session(self.files, self.objects, (lambda _: None) if retracted_too else self.hidden, limits, kept=kept)

    @cached_property
    def accepted_write_ids(self) -> frozenset[int]:
        """Write attempts whose rows exist: those of `episodes`, and those a succeeded job's terminal row names.

        Raises:
            LakeAccessError: a file of `episodes` or `jobs` is missing or damaged.
        """
        import polars as pl

        from lake.read.parquet import collected

        jobs = self.scan_all("jobs").filter(pl.col("event") == "succeeded").select("accepted_write_ids")
        of_jobs = collected(jobs)["accepted_write_ids"].explode(empty_as_null=False, keep_nulls=False).to_list()
        return self._episode_write_ids.union(of_jobs)

    @cached_property
    def _episode_write_ids(self) -> frozenset[int]:
        return frozenset().union(*map(self.write_ids, self._entries["episodes"]), self._emptied)

    @cached_property
    def dead_write_ids(self) -> frozenset[int]:
        """Write attempts that left rows nobody sees: of crashed writers, lost races and failed jobs."""
        inside = (
            self.write_ids(entry)
            for name, table in TABLES.items()
            if table.visibility is Visibility.ACCEPTED
            for entry in self._entries[name]
            if not is_clean(entry, self.versions)
        )
        return frozenset().union(*inside) - self.accepted_write_ids

    def write_ids(self, entry: FileEntry) -> frozenset[int]:
        """The write attempts in a file, from the log or else its column. Raises LakeAccessError: it cannot be read."""
        if entry.only_write_id is not None:
            return frozenset((entry.only_write_id,))
        return self._store.remembered(entry.path, lambda: self._look(entry.path))

    def _look(self, path: str) -> frozenset[int]:
        import polars as pl

        from lake.read.parquet import collected

        options = self.objects.polars_options
        return frozenset(
            collected(pl.scan_parquet(path, storage_options=options or None).select("write_id").unique())["write_id"]
        )

    def size(self, name: str) -> tuple[int, int, int]:
        """Files, rows (those of retracted episodes, and dead ones in shared files, counted) and bytes of a table."""
        files = self.files(name)
        return len(files), sum(f.rows for f in files), sum(f.bytes for f in files)

    def fingerprint(self, episodes: pl.DataFrame, **inputs: str | int | float | bool | None) -> int:
        """Hash of what a job reads: its episodes as written, and every other input by name.

        Built from episode_ids and write_ids, which survive compaction, never from files or versions.

        Args:
            episodes: rows with columns episode_id and write_id.
            inputs: for example the filter's text and the consumed series.
        """
        pairs_E2 = episodes.select("episode_id", "write_id").unique().sort("episode_id", "write_id").to_numpy()
        facts = ids.bytes_hash(pairs_E2.astype("<i8", order="C").tobytes())
        return ids.key_hash("fingerprint", facts, *(part for name in sorted(inputs) for part in (name, inputs[name])))


def _table(name: str) -> Table:
    if name not in TABLES:
        raise ContractError(f"there is no table `{name}`; the tables are {', '.join(TABLES)}")
    return TABLES[name]


def versions_at_time(store: Store, moment: datetime) -> dict[str, int]:
    """Table -> version, as of a moment. Raises UsageError: before the lake was made."""
    versions = _versions(store, moment)
    if versions[EPISODES.name] == -1:
        made = committed_at(store, EPISODES.name, 0).isoformat()
        raise UsageError(f"{store.root} did not exist at {moment.isoformat()}; it was made at {made}")
    return versions


def versions_at_episodes(store: Store, version: int) -> dict[str, int]:
    """Table -> version, as of when `episodes` came to a version. Raises UsageError: no such version."""
    newest = store.refresh(EPISODES.name)
    if not 0 <= version <= newest:
        raise UsageError(f"`episodes` has no version {version}; valid: 0 to {newest}")
    # Its own clock may have been behind the one that made the lake.
    versions = _versions(store, committed_at(store, EPISODES.name, version))
    return versions | {EPISODES.name: version}


def _versions(store: Store, moment: datetime) -> dict[str, int]:
    decides = {name for name, table in TABLES.items() if table.visibility is Visibility.ALWAYS}
    return {n: version_at(store, n, moment) if n in decides else store.refresh(n) for n in RESOLUTION_ORDER}


def consistent(store: Store, versions: dict[str, int]) -> dict[str, int]:
    """The versions, with `jobs` no newer than `episodes`.

    A terminal row may name the writes that brought episodes: that of `forget` does, for what else these brought. If
    its clock was behind theirs, the row is there before they are: their steps would be seen without them.
    """

    def episodes_writes(version: int) -> frozenset[int]:
        return Snapshot(store, {EPISODES.name: version}).accepted_write_ids

    later = episodes_writes(store.refresh(EPISODES.name)) - episodes_writes(versions.get(EPISODES.name, -1))

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
    path = f"{name}/_delta_log/{version:020d}.json"
    for line in (store.objects.get(path) or b"").splitlines():
        action = decode_document(line, dict[str, Any], store.objects.uri(path), "restore it from a backup")
        info = action.get("commitInfo")
        if info is not None:
            at = (info.get(NOTE) or {}).get("at")
            return datetime.fromisoformat(at) if at else datetime.fromtimestamp(info["timestamp"] / 1000, UTC)
    # Its entry was cleaned up: older than anything that can be asked for.
    return datetime.min.replace(tzinfo=UTC)
