"""What other definitions of the same state would give, as `trajlake anchors --keep` measured and kept it."""

import json
import shlex
from dataclasses import dataclass
from datetime import datetime

import polars as pl

from lake.documents import json_object
from viewer.queries import Reads, count, only_row

_SHARES = ("known", "shared", "singleton", "errors", "ways_in")


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement."""

    job_id: int
    ended_at: datetime
    options: str
    """What of the lake was measured, as options of the command."""
    is_outdated: bool
    """Whether episodes were recorded since."""
    figures: pl.DataFrame
    """A row for each definition: anchors (its name), definition (as JSON), steps (measured), states, and the shares of
    the steps that are known, shared and singleton, errors (of the shared steps) and ways_in; NULL: cannot be known."""


def measured(lake: Reads) -> Measured | None:
    """The newest measurement; None if none was kept."""
    query = """
        SELECT job_id, ended_at, parameters, counts FROM job_runs WHERE kind = 'anchors' AND status = 'succeeded'
        ORDER BY ended_at DESC, job_id LIMIT 1
        """
    row = only_row(lake.sql(query))
    if row is None:
        return None
    asked = json_object(row["parameters"])
    definitions, shares = asked.pop("definitions", None), json_object(row["counts"]).get("definitions")
    if not isinstance(definitions, dict) or not isinstance(shares, list):
        return None
    spelled = {name: json.dumps(value, separators=(",", ":")) for name, value in definitions.items()}
    options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in sorted(asked.items()))
    types: dict[str, type[pl.DataType]] = {"anchors": pl.String, "steps": pl.Int64, "states": pl.Int64}
    figures = pl.DataFrame(shares, strict=False, schema=types | dict.fromkeys(_SHARES, pl.Float64))
    later = """
        SELECT count(*) FROM job_runs WHERE kind IN ('collect', 'ingest') AND rows_out > 0 AND started_at > $since
        """
    return Measured(
        row["job_id"],
        row["ended_at"],
        options,
        count(lake, later, {"since": row["ended_at"]}) > 0,
        figures.with_columns(
            definition=pl.col("anchors").replace_strict(spelled, default=None, return_dtype=pl.String)
        ),
    )
