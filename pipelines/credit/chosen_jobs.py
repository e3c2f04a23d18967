"""Which credit rows people mean: a job by its id or its beginning, or a whole series at its newest state.

`0k3...` is a job; so is `0k3`, if no other credit job begins like that. `SERIES@latest` takes, for each group, the
newest job of the series: what an estimator says by now, however many incremental jobs it took.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.snapshot import Snapshot

STATE = """
CASE
    WHEN max(group_size) IS NULL THEN 'absent'
    WHEN bool_or(group_size >= 2 AND NOT contains(',' || flags || ',', ',dead_group,')) THEN 'live'
    WHEN max(group_size) >= 2 THEN 'dead'
    WHEN max(group_size) = 1 THEN 'singleton'
    ELSE 'unscored'
END
"""
"""SQL: whether a group has a signal, by its rows of `advantages`. live: two or more scored siblings that differ."""
_LATEST = "@latest"
_JOBS = """
SELECT job_id, series_id, parameters, ended_at FROM job_runs
WHERE kind = 'credit' AND status = 'succeeded' ORDER BY coalesce(sequence, -1) DESC, ended_at DESC, job_id DESC
"""


@dataclass(frozen=True, slots=True)
class CreditRows:
    """A resolved choice of rows of `advantages`."""

    series_id: int
    job_id: int | None
    """The one job; None takes the series at its newest state."""
    jobs: tuple[int, ...]
    """Every job whose rows may be among them, sorted."""
    parameters: dict[str, Any]
    """Of the job, or of the newest one of the series."""

    @property
    def text(self) -> str:
        """The choice as people write it."""
        return f"{ids.to_text(self.series_id)}{_LATEST}" if self.job_id is None else ids.to_text(self.job_id)

    @property
    def title(self) -> str:
        """The choice with what it was computed by: `0k3... (gigpo, score env_return)`."""
        told = {name: self.parameters.get(name) for name in ("estimator", "score", "grouping")}
        words = [str(told["estimator"] or "unknown estimator")]
        words += [f"{name} {told[name]}" for name in ("score", "grouping") if told[name]]
        return f"{self.text} ({', '.join(words)})"

    @property
    def source(self) -> str:
        """The rows as something to select FROM; ids are integers, nothing of a user's text is in it."""
        if self.job_id is None:
            return f"(SELECT * FROM latest_advantages WHERE series_id = {self.series_id})"
        return f"(SELECT * FROM advantages WHERE job_id = {self.job_id})"


def choose(snapshot: Snapshot, wanted: str) -> CreditRows:
    """The credit rows that a text names.

    Args:
        snapshot: where to look.
        wanted: a job's id or the beginning of one, or `SERIES@latest` with a series' id or the beginning of one.

    Raises:
        UsageError: no such job or series, or several.
    """
    jobs = snapshot.sql(_JOBS)
    prefix = wanted.strip().lower().removesuffix(_LATEST)
    is_series = wanted.strip().lower().endswith(_LATEST)
    column = "series_id" if is_series else "job_id"
    found = jobs.filter(pl.Series(map(ids.to_text, jobs[column]), dtype=pl.String).str.starts_with(prefix))
    several = found[column].n_unique() > 1
    if not prefix or found.is_empty() or several:
        told = "begins several" if several and prefix else "names no"
        what = "credit series" if is_series else "succeeded credit job"
        known = ", ".join(
            map(ids.to_text, (found if prefix and several else jobs)[column].unique(maintain_order=True)[:5])
        )
        msg = (
            f"{wanted!r} {told} {what}; the newest: {known or 'none, run trajlake credit first'}. "
            "Write a job's id or its beginning, or SERIES@latest"
        )
        raise UsageError(msg)
    newest = found.row(0, named=True)
    return CreditRows(
        series_id=newest["series_id"],
        job_id=None if is_series else newest["job_id"],
        jobs=tuple(sorted(found["job_id"].to_list())),
        parameters=msgspec.json.decode(newest["parameters"]),
    )
