"""Which checkpoints have scored stored actions, and which of them a name means. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from lake.errors import UsageError
from lake.read.snapshot import Snapshot

KIND = "rescore"
STORED = "stored"
"""The behaviour policy as the engine recorded it: no checkpoint is called that."""
KEYS = ("episode_id", "step_index", "encoding_id")
"""What one series has at most one row of `ratios` for."""
_SHORTEST_HASH = 6
_NAMES = """
SELECT
    j.series_id,
    any_value(j.parameters->>'$.checkpoint') AS checkpoint,
    any_value(j.parameters->>'$.weights_sha256') AS weights_sha256,
    list(DISTINCT j.parameters->>'$.spelled') AS spelled,
    list(DISTINCT j.parameters->>'$.path') AS paths,
    any_value(j.code_hash) AS code_hash,
    max(j.sequence) AS sequence
FROM jobs AS j
WHERE j.kind = 'rescore' AND j.event = 'succeeded'
GROUP BY j.series_id
ORDER BY sequence DESC
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """A checkpoint that has scored actions."""

    series_id: int
    """Its rows in `ratios`."""
    checkpoint: str
    """Its name there."""
    code_hash: str
    """Of the code that scored."""


def names_of(snapshot: Snapshot) -> pl.DataFrame:
    """One row per series, the newest first: series_id, checkpoint, weights_sha256, spelled, paths, code_hash."""
    return snapshot.sql(_NAMES)


def find_scored(snapshot: Snapshot, text: str) -> Scored:
    """The newest series of a checkpoint.

    Args:
        text: its name in `ratios`, what `trajlake rescore` was given, its folder, or the beginning of its sha256.

    Raises:
        UsageError: no such checkpoint has scored anything, or several sets of weights are meant.
    """
    rows = names_of(snapshot)
    by_name = rows.filter(pl.col("checkpoint") == text)
    place = str(Path(text).resolve())
    is_hash = len(text) >= _SHORTEST_HASH
    found = (
        by_name
        if by_name.height
        else rows.filter(
            pl.col("spelled").list.contains(text)
            | pl.col("paths").list.contains(place)
            | (pl.col("weights_sha256").str.starts_with(text.lower()) & is_hash)
        )
    )
    weights = found.unique("weights_sha256", keep="first", maintain_order=True)
    if weights.height != 1:
        names = ", ".join((weights if weights.height else rows)["checkpoint"].unique(maintain_order=True))
        fault = "means several checkpoints" if weights.height else "has scored nothing"
        advice = f"name one of: {names}" if names else "there is none"
        raise UsageError(f"checkpoint {text!r} {fault}; {advice}. Score with one: trajlake rescore CHECKPOINT")
    row = found.row(0, named=True)
    return Scored(row["series_id"], row["checkpoint"], row["code_hash"])
