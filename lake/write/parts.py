"""Rows of a running job that are written elsewhere: by another thread, process or machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.execution.held import held
from lake.read.parquet import collected, scan
from lake.read.snapshot import Snapshot
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES, WRITTEN_BY_JOBS
from lake.tables.contracts import conform


@dataclass(frozen=True, slots=True)
class Written:
    """What one append of a job put into a table."""

    table: str
    write_id: int
    file: str
    """Name of the data file below the table's folder."""
    rows: int


class JobPart:
    """The right to write rows of a running job from another thread or process, where it opens the lake again.

    A part appends under a fresh write_id of its own, so a part that is lost (its process was killed, or its answer was)
    leaves rows that nobody sees, and is simply run again: only what `Job.take` got is accepted with the job.
    """

    def __init__(self, store: Store, stamps: Mapping[str, int], versions: Mapping[str, int]) -> None:
        self._store = store
        self._stamps = dict(stamps)
        self._versions = dict(versions)

    def __reduce__(self) -> tuple[Any, ...]:
        """By the lake's address and the versions that the job reads, not by open handles."""
        return _reopen, (self._store.objects, self._stamps, self._versions)

    @property
    def snapshot(self) -> Snapshot:
        """The tables as the job reads them; a process of an executor opens them once for all its parts."""
        key = (self._store.root, *sorted(self._versions.items()))
        return held("snapshot", key, lambda: Snapshot(self._store, self._versions))

    @property
    def objects(self) -> Objects:
        """Where the lake lies."""
        return self._store.objects

    def write(self, name: str, frame: pl.DataFrame) -> Written | None:
        """Append rows to a table under a fresh write_id, stamped with the job; None where there are none.

        Args:
            name: a judgement or lineage table, or `tokens`.
            frame: the table's columns without write_id, job_id, series_id and attempt, which are filled in.

        Raises:
            ContractError: the frame breaks the table's contract, or the table is not written this way.
        """
        if name not in WRITTEN_BY_JOBS:
            valid = ", ".join(WRITTEN_BY_JOBS)
            raise ContractError(f"`write` has no table `{name}`; valid: {valid}. Episodes are written by `record`")
        if frame.is_empty():
            return None
        table = TABLES[name]
        stamps = {"write_id": ids.fresh_id(), **self._stamps}
        stamped = frame.with_columns(pl.lit(v).alias(k) for k, v in stamps.items() if k in table.names)
        file = self._store.append(name, conform(stamped, table), job_id=stamps["job_id"])
        return Written(name, stamps["write_id"], file, frame.height)


def read_back(objects: Objects, written: Written) -> pl.DataFrame:
    """The rows of an append, without the stamps. FileNotFoundError: `forget` has put another file in its place."""
    place = f"{written.table}/{written.file}"
    if not objects.exists(place):
        raise FileNotFoundError(place)
    rows = collected(scan([objects.uri(place)], TABLES[written.table], objects.polars_options))
    return rows.drop("write_id", "job_id", "series_id", "attempt", strict=False)


def _reopen(objects: Objects, stamps: Mapping[str, int], versions: Mapping[str, int]) -> JobPart:
    return JobPart(Store(objects), stamps, versions)
