"""What anchor definitions were measured to give, kept in the lake: a job of kind `anchors`, which the viewer shows.

The figures are the job's counts, as they are a few rows of one measurement and no facts about episodes.
"""

from collections.abc import Mapping

import polars as pl

from lake.lake import Lake
from lake.read.snapshot import Snapshot
from pipelines.credit.anchors import Anchors, measures

KIND = "anchors"


def keep(
    lake: Lake, snapshot: Snapshot, *, definitions: Mapping[str, Anchors], measured: pl.DataFrame, **sample: str | int
) -> int:
    """Keep a measurement; returns the job's id.

    Args:
        snapshot: what was measured.
        definitions: by the name that `measured` has them under.
        measured: of `measures.measure`.
        sample: what of the lake was measured: `where`, `groups`.
    """
    spelled = {name: definition.model_dump(mode="json") for name, definition in definitions.items()}
    with lake.job(
        kind=KIND, parameters=dict(sample) | {"definitions": spelled}, snapshot=snapshot, code=[measures]
    ) as job:
        job.counts |= {"rows_in": int(measured["steps"].max() or 0), "rows_out": 0, "definitions": measured.to_dicts()}  # type: ignore[arg-type]
    return job.job_id
