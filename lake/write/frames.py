"""Frames of any library as Polars has them, and frames of rollouts as episodes."""

import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from lake.errors import UsageError
from lake.formats import FORMATS, query
from lake.formats.shapes import shape_of
from lake.formats.source import Input
from lake.lake import Lake
from lake.write.ingest import Plan, Reading, Report, run_plan
from lake.write.sources import File


def as_polars(frame: Any) -> pl.DataFrame:
    """A frame of Polars or pandas, or an Arrow table, as a Polars frame. Raises UsageError: something else."""
    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    if isinstance(frame, pl.DataFrame):
        return frame
    kind = f"{type(frame).__module__.partition('.')[0]}.{type(frame).__name__}"
    if kind in ("pandas.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch"):
        made = pl.from_pandas(frame) if kind.startswith("pandas") else pl.from_arrow(frame)
        assert isinstance(made, pl.DataFrame)
        return made
    raise UsageError(f"{type(frame).__name__} is no frame; valid: a frame of Polars or pandas, or an Arrow table")


def ingest_frame(lake: Lake, frame: Any, *, shape: str | None = None, run_id: str | None = None) -> Report:
    """Take the rows of a frame as episodes, steps or messages; see `Lake.ingest_frame`."""
    rows = as_polars(frame)
    found = shape_of(rows.columns, shape)
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        # Through a file: what is read is the same for frames of all libraries, and it goes the way of all files.
        path = Path(folder, "frame.parquet")
        rows.write_parquet(path)
        source = Input(path, run_id or "frame", memory={"shape": found})
        reading = Reading(File(path, "frame"), FORMATS[query.FRAME], source)
        return run_plan(lake, Plan(Report("frame", query.FRAME, source.run_id), [reading]))
