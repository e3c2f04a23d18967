"""Frames of any library as Polars has them, and frames of rollouts as episodes."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from lake.errors import UsageError
from lake.formats import FORMATS, query
from lake.formats.base.source import Input
from lake.formats.shapes import shape_of
from lake.write.ingest import Plan, Reading, Report, run_plan
from lake.write.sources import File

if TYPE_CHECKING:
    from lake.lake import Lake


def as_polars(frame: Any) -> pl.DataFrame:
    """A frame of Polars or pandas, or an Arrow table, as a Polars frame. What pandas calls missing is NULL.

    Raises:
        UsageError: something else; columns that no table can have.
    """
    import pyarrow as pa

    kind = f"{type(frame).__module__.partition('.')[0]}.{type(frame).__name__}"
    try:
        if isinstance(frame, pl.LazyFrame):
            return frame.collect()
        if isinstance(frame, pl.DataFrame):
            return frame
        if kind == "pandas.DataFrame":
            return _of_pandas(frame)
        if kind in ("pyarrow.Table", "pyarrow.RecordBatch"):
            return pl.DataFrame(frame)
    except (pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise UsageError(f"the frame cannot be read: {str(error).splitlines()[0]}") from error
    raise UsageError(f"{type(frame).__name__} is no frame; valid: a frame of Polars or pandas, or an Arrow table")


def _of_pandas(frame: Any) -> pl.DataFrame:
    import pyarrow as pa

    names = [str(name) for name in frame.columns]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"the frame has the column {min(twice)!r} twice; name each of them")
    columns = []
    for place, name in enumerate(names):
        cells = frame.iloc[:, place]
        try:
            columns.append(pl.Series(name, pl.from_pandas(cells)))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            columns.append(_of_any(name, cells))
    return pl.DataFrame(columns)


def _of_any(name: str, cells: Any) -> pl.Series:
    """Cells of different types: texts as they are, all others as JSON."""
    texts: list[str | None] = []
    for row, (cell, is_missing) in enumerate(zip(cells, cells.isna(), strict=True)):
        try:
            is_text = is_missing or isinstance(cell, str)
            texts.append((None if is_missing else cell) if is_text else msgspec.json.encode(cell).decode())
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the frame's row {row}: `{name}` is {type(cell).__name__}: {error}") from error
    return pl.Series(name, texts, dtype=pl.String)


def ingest_frame(lake: "Lake", frame: Any, *, shape: str | None = None, run_id: str | None = None) -> Report:
    """Take the rows of a frame as episodes, steps or messages; see `Lake.ingest_frame`."""
    rows = as_polars(frame)
    found = shape_of(rows.columns, shape)
    if run_id is not None and not run_id.strip():
        raise UsageError("the run's name is empty; leave it out, or name one")
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        # Through a file: what is read is the same for frames of all libraries, and it goes the way of all files.
        path = Path(folder, "frame.parquet")
        try:
            rows.write_parquet(path)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"the frame cannot be stored: {str(error).splitlines()[0]}") from error
        source = Input(path, run_id or "frame", memory={"shape": found})
        reading = Reading(File(path, "frame"), FORMATS[query.FRAME], source)
        return run_plan(lake, Plan(Report("frame", query.FRAME, source.run_id), [reading]))
