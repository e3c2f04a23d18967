"""The Lake: open it, read it through snapshots, write it through jobs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from lake.errors import LakeAccessError, NotALakeError, TrajlakeError, UsageError
from lake.jobs import Code, Job
from lake.snapshot import Snapshot
from lake.store import Store
from lake.writer import EpisodeWriter

_UNSTORABLE = re.compile(r"[\[\]|^\\\x00-\x1f\x7f\ud800-\udfff]|%[0-9a-fA-F]{2}")
"""What delta-rs cannot have in a folder's path: it reads the path as a URL."""


class Lake:
    """A folder of Delta tables that hold trajectories and what was made of them.

    Get one from `lake.open`. Reading goes through snapshots, writing through jobs.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = EpisodeWriter(store)

    @property
    def uri(self) -> str:
        """The lake's folder."""
        return self._store.root

    def __repr__(self) -> str:
        return f"Lake({self.uri!r})"

    def snapshot(self) -> Snapshot:
        """All tables at their newest versions, consistently."""
        return Snapshot(self._store)

    def at(self, versions: dict[str, int]) -> Snapshot:
        """All tables at stored versions (`Snapshot.versions` of an earlier time).

        Raises:
            ContractError: an unknown table.
            LakeAccessError: a version that is no longer there.
        """
        return Snapshot(self._store, versions)

    def sql(self, query: str, params: list[Any] | dict[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one SELECT over a fresh snapshot; see `Snapshot.sql`."""
        return self.snapshot().sql(query, params)

    def scan(self, name: str) -> pl.LazyFrame:
        """A table's visible rows on a fresh snapshot; see `Snapshot.scan`."""
        return self.snapshot().scan(name)

    def history(self, name: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits of a table, newest first."""
        return self._store.history(name, limit)

    def job(
        self,
        *,
        kind: str,
        parameters: dict[str, Any] | None = None,
        series: dict[str, Any] | None = None,
        run_id: str | None = None,
        code: Sequence[Code] = (),
        fingerprint: int | None = None,
        snapshot: Snapshot | None = None,
        job_id: int | None = None,
        attempt: int = 0,
    ) -> Job:
        """A job that writes to this lake; see `lake.jobs.Job`."""
        return Job(
            self._store,
            self._writer,
            kind=kind,
            parameters=parameters,
            series=series,
            run_id=run_id,
            code=code,
            fingerprint=fingerprint,
            snapshot=None if snapshot is None else snapshot.versions,
            job_id=job_id,
            attempt=attempt,
        )

    def find_job(self, kind: str, series_id: int, fingerprint: int) -> int | None:
        """The newest succeeded job with that series and input, if there is one: its result stands."""
        jobs = self.scan("jobs").filter(
            (pl.col("event") == "succeeded")
            & (pl.col("kind") == kind)
            & (pl.col("series_id") == series_id)
            & (pl.col("input_fingerprint") == fingerprint)
        )
        found = jobs.sort("at", descending=True).select("job_id").head(1).collect()["job_id"]
        return int(found[0]) if len(found) else None


def open(uri: str | Path, *, create: bool = False) -> Lake:  # noqa: A001 - `lake.open` is the name people guess
    """Open a lake.

    Args:
        uri: its folder.
        create: make the tables if the folder is missing or empty.

    Raises:
        NotALakeError: nothing there, or something that is not a lake.
        LakeVersionError: a lake of a newer format.
        LakeAccessError: no permission, damaged tables.
        UsageError: a URI scheme that is not supported, or no usable path.
    """
    path = _folder(uri)
    store = Store(str(path))
    try:
        if not store.exists():
            _refuse(path, create=create)
            path.mkdir(parents=True, exist_ok=True)
            store.create()
    except TrajlakeError:
        raise
    except OSError as error:
        msg = f"{path}: {error.strerror or error}; choose another --lake or change the folder's permissions"
        raise LakeAccessError(msg) from error
    store.check_format()
    if create:
        store.create()
    return Lake(store)


def _folder(uri: str | Path) -> Path:
    """The folder a URI names, absolute."""
    if "://" in str(uri):
        msg = f"{uri}: only local folders are supported as lakes; give a path"
        raise UsageError(msg)
    if not str(uri).strip():
        msg = "the lake's path is empty; give --lake FOLDER"
        raise UsageError(msg)
    try:
        path = Path(uri).expanduser().resolve()
    except (RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a NUL
        msg = f"{str(uri)!r} is no usable path: {error}; choose another --lake"
        raise UsageError(msg) from error
    if found := _UNSTORABLE.search(str(path)):
        msg = f"{str(path)!r}: Delta tables cannot lie under a name with {found[0]!r}; choose another --lake"
        raise UsageError(msg)
    return path


def _refuse(path: Path, *, create: bool) -> None:
    """Raise unless a lake may be made at the path."""
    advice = "`trajlake ingest FILE --lake URI` or `trajlake demo` makes one"
    if not path.exists():
        if not create:
            msg = f"{path} does not exist; {advice}"
            raise NotALakeError(msg)
    elif not path.is_dir():
        msg = f"{path} is a file, and a lake is a folder; {advice}"
        raise NotALakeError(msg)
    elif not create:
        msg = f"{path} is not a lake: it holds no `episodes` table; {advice}"
        raise NotALakeError(msg)
    elif any(path.iterdir()) and not _half_made(path):
        msg = f"{path} is not a lake and not empty; name a new or an empty folder"
        raise NotALakeError(msg)


def _half_made(path: Path) -> bool:
    """A lake whose creation was interrupted, or is under way in another process, holds table folders only."""
    from lake.tables import TABLES

    return all(child.name in TABLES for child in path.iterdir())
