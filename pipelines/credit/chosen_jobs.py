"""Which credit rows people mean: a job by its id or its beginning, or a whole series at its newest state.

`0k3...` is a job; so is `0k3`, if no other credit job begins like that. A job computes only groups that had changed; it
stands for its series as it was then: the groups that it computed, and those that stood, from earlier jobs.
`SERIES@latest` takes, for each group, the newest job of the series: what an estimator says by now.
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
_AS_OF = """
SELECT a.* FROM advantages AS a JOIN (
    SELECT g.group_id, arg_max(g.job_id, (coalesce(r.sequence, -1), r.ended_at, g.job_id)) AS job_id
    FROM (
        SELECT DISTINCT group_id, job_id FROM advantages WHERE job_id IN ({jobs})
        UNION ALL
        SELECT group_id, job_id FROM credit_groups WHERE episodes = 0 AND job_id IN ({jobs})
    ) AS g
    JOIN job_runs AS r USING (job_id)
    GROUP BY g.group_id
) AS newest USING (group_id, job_id)
"""
"""SQL: as `latest_advantages`, of some jobs of one series."""
_JOBS = """
SELECT job_id, series_id, parameters, ended_at, counts FROM job_runs
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
    stood: int = 0
    """Groups that the job did not compute because they had not changed; earlier jobs hold their rows."""

    @property
    def text(self) -> str:
        """The choice as people write it."""
        return f"{self._series}{_LATEST}" if self.job_id is None else ids.to_text(self.job_id)

    @property
    def title(self) -> str:
        """The choice with what it was computed by: `0k3... (gigpo, score env_return)`."""
        told: dict[str, Any] = {name: self.parameters.get(name) for name in ("estimator", "score", "grouping")}
        versions: dict[str, str] = self.parameters.get("scorer_versions") or {}
        if version := versions.get(told["score"]):
            told["score"] = f"{told['score'].partition('@')[0]}@{version}"
        words = [str(told["estimator"] or "unknown estimator")]
        words += [f"{name} {told[name]}" for name in ("score", "grouping") if told[name]]
        return f"{self.text} ({', '.join(words)})"

    @property
    def note(self) -> str:
        """What people may not expect of a job; empty if there is nothing."""
        if not self.stood:
            return ""
        return f"with {self.stood} groups that had not changed, as earlier jobs of series {self._series} computed them"

    @property
    def _series(self) -> str:
        return ids.to_text(self.series_id)

    @property
    def source(self) -> str:
        """The rows as something to select FROM; ids are integers, nothing of a user's text is in it."""
        if self.job_id is None:
            return f"(SELECT * FROM latest_advantages WHERE series_id = {self.series_id})"
        if self.stood:
            return f"({_AS_OF.format(jobs=', '.join(map(str, self.jobs)))})"
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
        what += "s" if several and prefix and not is_series else ""
        msg = (
            f"{wanted!r} {told} {what}; the newest: {known or 'none, run trajlake credit first'}. "
            "Write a job's id or its beginning, or SERIES@latest"
        )
        raise UsageError(msg)
    newest = found.row(0, named=True)
    stood = 0 if is_series else msgspec.json.decode(newest["counts"] or "{}").get("groups_kept", 0)
    if stood:
        place = jobs["job_id"].to_list().index(newest["job_id"])
        found = jobs[place:].filter(pl.col("series_id") == newest["series_id"])
    return CreditRows(
        series_id=newest["series_id"],
        job_id=None if is_series else newest["job_id"],
        jobs=tuple(sorted(found["job_id"].to_list())),
        parameters=msgspec.json.decode(newest["parameters"]),
        stood=stood,
    )
