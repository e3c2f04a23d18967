"""Rows of a job that another thread or process writes: a part goes out, what it wrote comes back and is accepted.

A part appends under a fresh write_id of its own, so a part that is lost (its process was killed, or its answer was)
leaves rows that nobody sees, and is simply run again. Nothing is visible before the job's terminal row names the
write_ids of the answers that arrived (`Job.take`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.contracts import conform

WRITTEN_OTHERWISE = {"episodes", "steps", "blobs", "jobs"}
"""Exactly once by `Job.record`, and by the job's start and end."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one append of a job put into a table."""

    table: str
    write_id: int
    file: str
    """Name of the data file below the table's folder."""
    rows: int


class JobPart:
    """The right to write rows of a running job. Pickles: in another process it opens the lake again."""

    def __init__(self, store: Store, stamps: Mapping[str, int]) -> None:
        self._store = store
        self._stamps = dict(stamps)

    def __reduce__(self) -> tuple[Any, ...]:
        """By the lake's address, not by open handles."""
        return _reopened, (self._store.objects, self._stamps)

    @property
    def objects(self) -> Objects:
        """Where the lake lies."""
        return self._store.objects

    def write(self, name: str, frame: pl.DataFrame) -> Written | None:
        """Append rows to a table under a fresh write_id, stamped with the job; they count once the job has taken them.

        Args:
            name: a judgement or lineage table, or `tokens`.
            frame: the table's columns without write_id, job_id, series_id and attempt, which are filled in.

        Raises:
            ContractError: the frame breaks the table's contract, or the table is not written this way.
        """
        if name not in TABLES or name in WRITTEN_OTHERWISE:
            valid = ", ".join(other for other in TABLES if other not in WRITTEN_OTHERWISE)
            raise ContractError(f"`write` has no table `{name}`; valid: {valid}. Episodes are written by `record`")
        if frame.is_empty():
            return None
        table = TABLES[name]
        stamps = {"write_id": ids.fresh_id(), **self._stamps}
        stamped = frame.with_columns(pl.lit(v).alias(k) for k, v in stamps.items() if k in table.names)
        file = self._store.append(name, conform(stamped, table), job_id=stamps["job_id"])
        return Written(name, stamps["write_id"], file, frame.height)


def _reopened(objects: Objects, stamps: Mapping[str, int]) -> JobPart:
    return JobPart(Store(objects), stamps)
