"""What is indexed: slices of data files, so that a segment's memory does not depend on the size of a file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from lake import ids
from lake.read.parquet import collected, scan
from lake.read.snapshot import Snapshot
from lake.read.visibility import DataFile
from lake.search.segment import EPISODE
from lake.tables import TABLES
from lake.write.rows import inlined

ROWS = 50_000
"""Rows of a segment, at most."""
BYTES = 32 << 20
"""Bytes of the files of a segment, as they lie on the disk, about; texts take some five times as much."""
PLAIN = {"steps": ("state", "action", "reasoning"), "episodes": ("error",)}
"""Columns of texts, by table."""
DOCUMENTS = {"steps": ("context", "tool_calls"), "episodes": ("initial_messages", "final_observation")}
"""Columns of JSON documents. Not the ground truth: what an agent should have done would be found as if it had."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a data file of a table."""

    table: str
    file: DataFile
    first: int
    rows: int

    @property
    def key(self) -> int:
        """Names its visible rows: files never change, but a write in one may come to be accepted."""
        return ids.key_hash("piece", self.file.path, self.first, self.rows, *sorted(self.file.dead))

    @property
    def bytes(self) -> int:
        """Of the file that are its own, about."""
        return self.file.bytes * self.rows // max(self.file.rows, 1)


def pieces(snapshot: Snapshot) -> Iterator[Piece]:
    """Everything that there is to search."""
    for table in PLAIN:
        for file in snapshot.files(table):
            rows = max(1, min(ROWS, file.rows * BYTES // max(file.bytes, 1)))
            for first in range(0, file.rows, rows):
                yield Piece(table, file, first, min(rows, file.rows - first))


def together(found: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces of a table that make a segment: small ones together."""
    for table in PLAIN:
        batch: list[Piece] = []
        for piece in (piece for piece in found if piece.table == table):
            full = sum(p.rows for p in batch) + piece.rows > ROWS or sum(p.bytes for p in batch) + piece.bytes > BYTES
            if batch and full:
                yield batch
                batch = []
            batch.append(piece)
        if batch:
            yield batch


def read(snapshot: Snapshot, wanted: Sequence[Piece]) -> pl.DataFrame:
    """The visible rows of pieces of one table: episode_id, step_index and the columns with texts.

    Raises:
        LakeAccessError: a file is gone or damaged.
    """
    name = wanted[0].table
    columns = (*PLAIN[name], *DOCUMENTS[name])
    parts = []
    for piece in wanted:
        part = scan([piece.file.path], TABLES[name], snapshot.objects.polars_options).slice(piece.first, piece.rows)
        if piece.file.dead:
            part = part.filter(~pl.col("write_id").is_in(sorted(piece.file.dead)))
        step = pl.lit(EPISODE, pl.Int32).alias("step_index") if name == "episodes" else pl.col("step_index")
        parts.append(part.select("episode_id", step, *columns))
    return inlined(snapshot, collected(pl.concat(parts)), DOCUMENTS[name])
