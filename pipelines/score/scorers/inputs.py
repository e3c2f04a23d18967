"""Read what a scorer needs of some episodes: those columns, those rows, nothing else."""

import polars as pl

from lake.blobs import inlined
from lake.columns import Type
from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import TABLES
from pipelines.score.scorers.protocol import Columns, ScorerInputs


def read_inputs(snapshot: Snapshot, episodes: pl.Series | pl.DataFrame, columns: Columns) -> ScorerInputs:
    """All rows of some episodes with the columns that a scorer reads, big payloads put back.

    Memory grows with the episodes given: pass them in batches.

    Args:
        snapshot: where to read.
        episodes: their ids, int64 [E]; or rows with episode_id, run_id and group_id. Files are sorted by run and group,
            so with these all others are skipped if a batch holds neighbours.
        columns: what the scorer reads.

    Raises:
        LakeAccessError: a file of the lake is missing or damaged.
    """
    frame = episodes.to_frame("episode_id") if isinstance(episodes, pl.Series) else episodes
    wanted = pl.col("episode_id").is_in(frame.get_column("episode_id").unique().sort().implode())
    if "run_id" in frame.columns and frame.height:
        wanted &= pl.col("run_id").is_in(frame.get_column("run_id").unique().to_list())
    if "group_id" in frame.columns and frame.height:
        groups = frame.get_column("group_id")
        wanted &= pl.col("group_id").is_between(groups.min(), groups.max())
    frames = {}
    for name, names in columns.tables().items():
        rows = collected(snapshot.scan(name).filter(wanted).select(names))
        texts = [column.name for column in TABLES[name].columns if column.type is Type.JSON and column.name in names]
        frames[name] = inlined(snapshot, rows, texts) if texts and name in ("episodes", "steps") else rows
    return ScorerInputs(**frames)
