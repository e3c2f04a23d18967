"""Rows of a running job that are written elsewhere: by another thread, process or machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO

import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.read.parquet import collected, scan
from lake.storage.data_files import Staged
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES, WRITTEN_BY_JOBS
from lake.tables.contracts import conform
from lake.write.secret_columns import without_keys_in


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

    def __init__(self, store: Store, stamps: Mapping[str, int]) -> None:
        self._store = store
        self._stamps = dict(stamps)

    @property
    def store(self) -> Store:
        """The lake's tables."""
        return self._store

    @property
    def objects(self) -> Objects:
        """Where the lake lies."""
        return self._store.objects

    @property
    def job_id(self) -> int:
        """The job's."""
        return self._stamps["job_id"]

    def now(self) -> datetime:
        """The time by the lake's clock."""
        return self._store.clock()

    def write(self, name: str, frame: pl.DataFrame) -> Written | None:
        """Append rows to a table under a fresh write_id, stamped with the job; None where there are none.

        Args:
            name: a judgement or lineage table, or `tokens`.
            frame: the table's columns without write_id, job_id, series_id and attempt, which are filled in.

        Raises:
            ContractError: the frame breaks the table's contract, or the table is not written this way.
        """
        if (found := self.stage(name, frame)) is None:
            return None
        write_id, staged = found
        return self.commit(name, write_id, staged)

    def stage(self, name: str, frame: pl.DataFrame) -> tuple[int, Staged] | None:
        """The first half of `write`: the write_id, and the rows in a file that no commit names yet."""
        if name not in WRITTEN_BY_JOBS:
            valid = ", ".join(WRITTEN_BY_JOBS)
            raise ContractError(f"`write` has no table `{name}`; valid: {valid}. Episodes are written by `record`")
        if frame.is_empty():
            return None
        table = TABLES[name]
        stamps = {"write_id": ids.fresh_id(), **self._stamps}
        stamped = frame.with_columns(pl.lit(v).alias(k) for k, v in stamps.items() if k in table.names)
        return stamps["write_id"], self._store.stage(
            name, without_keys_in(name, conform(stamped, table)), job_id=self.job_id
        )

    def commit(self, name: str, write_id: int, staged: Staged) -> Written:
        """The second half of `write`, here or in another process."""
        self._store.append_staged(name, [staged])
        return Written(name, write_id, staged.written.add.path, staged.written.rows)


def put_aside(objects: Objects, table: str, rows: pl.DataFrame) -> str | None:
    """Write rows for the job's own process to `take_back`, and return where they are; None where there are none.

    No commit names the file: no reader sees it, and `vacuum` removes what nobody took back.
    """
    if rows.is_empty():
        return None
    place, data = f"{table}/{ids.to_text(ids.fresh_id())}.parquet", BytesIO()
    rows.write_parquet(data)
    objects.put(place, data.getvalue())
    return place


def take_back(objects: Objects, place: str) -> pl.DataFrame:
    """The rows that were put aside, which are not kept. Raises FileNotFoundError: they waited for too long."""
    if (data := objects.get(place)) is None:
        raise FileNotFoundError(place)
    objects.delete([place])
    return pl.read_parquet(data)


def read_back(objects: Objects, written: Written) -> pl.DataFrame:
    """The rows of an append, without the stamps. FileNotFoundError: `forget` has put another file in its place."""
    place = f"{written.table}/{written.file}"
    if not objects.exists(place):
        raise FileNotFoundError(place)
    rows = collected(scan([objects.uri(place)], TABLES[written.table], objects.polars_options))
    return rows.drop("write_id", "job_id", "series_id", "attempt", strict=False)
