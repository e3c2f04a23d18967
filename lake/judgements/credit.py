"""Which advantages count: a credit series, as of now or as of one of its jobs.

A series is one estimator with one set of options, sources, filters and code. Its jobs compute the groups that changed;
for each group the rows of the newest job count. The current series is the one whose job ended last, also where that job
found nothing to do: what `trajlake credit` ran last is what everybody takes who names nothing (view `credit_series`).

People name a series by its estimator (`gigpo`: the newest series of that name), or by the id of the series or of a job,
whole or its beginning. A job means its series as it was when the job ended: the groups that the job computed, and those
that earlier ones had, unchanged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.documents import json_object
from lake.errors import DataRefusedError, UsageError
from lake.judgements.scores import ENV_RETURN, version_of
from lake.read.snapshot import Reads
from lake.read.text_table import counted

_KEYS = ("episode_id", "step_index", "group_id")
_LISTED = 60
"""Characters of a series' options where it stands in a list."""
_JOBS = """
SELECT job_id, series_id, coalesce(sequence, -1) AS sequence, ended_at, parameters,
       json_extract_string(parameters, '$.estimator') AS estimator
FROM job_runs WHERE kind = 'credit' AND status = 'succeeded' AND ($before IS NULL OR coalesce(sequence, -1) < $before)
ORDER BY ended_order(sequence, ended_at, job_id) DESC
"""
_AS_OF = """
SELECT a.* FROM advantages AS a JOIN (
    SELECT g.group_id, arg_max(g.job_id, ended_order(r.sequence, r.ended_at, g.job_id)) AS job_id
    FROM (
        SELECT DISTINCT group_id, job_id FROM advantages WHERE series_id = {series}
        UNION ALL
        SELECT group_id, job_id FROM credit_groups WHERE episodes = 0 AND series_id = {series}
    ) AS g
    JOIN job_runs AS r USING (job_id)
    WHERE coalesce(r.sequence, -1) < {before}
    GROUP BY g.group_id
) AS newest USING (group_id, job_id)
"""
"""SQL: as `latest_advantages`, of one series and of the jobs that had ended by then."""
_SERIES = """
SELECT series_id, estimator, parameters, job_id, ended_at, is_current, jobs FROM credit_series
ORDER BY ended_order(sequence, ended_at, job_id) DESC
"""


_CHANGES = """
WITH mine AS MATERIALIZED (
    SELECT group_id, job_id, episode_id, count(advantage) AS defined FROM {rows}
    WHERE {condition}
    GROUP BY ALL
)
SELECT
    (SELECT count(*) FROM (SELECT group_id, job_id, sum(defined) AS shown FROM mine GROUP BY ALL)
     JOIN (FROM credit_groups WHERE {condition}) USING (group_id, job_id) WHERE shown < defined_steps) AS lost,
    (SELECT count(*) FROM episodes WHERE $is_whole AND num_steps > 0 AND {condition}
     AND group_id IN (SELECT group_id FROM mine) AND episode_id NOT IN (SELECT episode_id FROM mine)
     AND ($with_all OR episode_id NOT IN (SELECT episode_id FROM left_out_siblings))) AS joined
"""


_CHANGED_GROUPS = """
WITH mine AS MATERIALIZED (
    SELECT group_id, job_id, episode_id, count(advantage) AS defined FROM {rows} GROUP BY ALL
),
computed AS (
    SELECT m.group_id, max(g.episodes) - count(DISTINCT m.episode_id) AS missing,
           sum(m.defined) < max(g.defined_steps) AS has_lost
    FROM mine AS m JOIN credit_groups AS g USING (group_id, job_id) GROUP BY m.group_id, m.job_id
),
joined AS (
    SELECT group_id, count(*) AS joined, count(*) FILTER (episode_id IN (
        SELECT superseded_by FROM retractions WHERE kind = 'superseded'
    )) AS replacing
    FROM episodes WHERE $is_whole AND num_steps > 0 AND group_id IN (SELECT group_id FROM mine)
    AND episode_id NOT IN (SELECT episode_id FROM mine)
    AND ($with_all OR episode_id NOT IN (SELECT episode_id FROM left_out_siblings)) GROUP BY group_id
)
SELECT group_id, CASE WHEN has_lost THEN missing ELSE 0 END AS lost, coalesce(joined, 0) AS joined,
       coalesce(replacing, 0) AS replacing
FROM (SELECT group_id, max(missing) AS missing, bool_or(has_lost) AS has_lost FROM computed GROUP BY group_id)
LEFT JOIN joined USING (group_id)
WHERE has_lost OR joined > 0 ORDER BY lost DESC, joined DESC, group_id LIMIT $limit
"""
"""SQL: as `_CHANGES`, by group."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A resolved choice of advantages."""

    series_id: int
    """The estimator with its options, sources and filters."""
    estimator: str
    """Its name."""
    parameters: dict[str, Any]
    """Of the series' newest job, or of the job that was named."""
    job_id: int | None = None
    """The job that was named; None takes the series as it is now."""
    before: int | None = None
    """Only jobs whose terminal row has a lower `sequence` count; None takes all that the snapshot shows."""
    only_job: int | None = None
    """The one job whose rows count, where the series has no other: no rows need be compared then."""

    @property
    def text(self) -> str:
        """The choice as an id: of the job that was named, else of the series."""
        return ids.to_text(self.series_id if self.job_id is None else self.job_id)

    @property
    def title(self) -> str:
        """The choice in words: `gigpo (omega 0.5, score judge@3f2a), series 0k3...`, or `..., as of job 0k3...`."""
        as_of = "" if self.job_id is None else f", as of job {ids.to_text(self.job_id)}"
        return f"{self._words(', '.join(_unusual(self.parameters)))}{as_of}"

    @property
    def listed(self) -> str:
        """The series in words, as one of several: long definitions are cut."""
        unusual = ", ".join(_unusual(self.parameters))
        return self._words(unusual if len(unusual) <= _LISTED else f"{unusual[: _LISTED - 3]}...")

    def _words(self, unusual: str) -> str:
        return f"{self.estimator}{f' ({unusual})' if unusual else ''}, series {ids.to_text(self.series_id)}"

    @property
    def score(self) -> str:
        """The episode score that it was computed from: env_return, or a scorer or reward, @VERSION or not."""
        return str(self.parameters.get("score") or ENV_RETURN)

    @property
    def formula(self) -> str | None:
        """How its terms make an advantage, weights included: `A = A_E + 0.5 A_S`; None of an estimator of one term."""
        config = self.parameters.get("config", {})
        omega = config.get("omega")
        if omega is None:
            return None
        weights = (omega, 1 - omega) if config.get("combination") == "convex" else (1, omega)
        terms = [
            f"{'' if weight == 1 else f'{weight:g} '}{name}"
            for weight, name in zip(weights, ("A_E", "A_S"), strict=True)
            if weight
        ]
        return f"A = {' + '.join(terms)}"

    @property
    def rows(self) -> str:
        """The rows of `advantages` as something to select FROM; ids are integers, no text of a user's is in it."""
        if self.only_job is not None:
            return f"(SELECT * FROM advantages WHERE series_id = {self.series_id} AND job_id = {self.only_job})"
        if self.before is None:
            return f"(SELECT * FROM latest_advantages WHERE series_id = {self.series_id})"
        return f"({_AS_OF.format(series=self.series_id, before=self.before)})"

    def rows_of(self, lake: Reads, episode_ids: Iterable[int]) -> str:
        """As `rows`, of some episodes, a few hundred at most; no others are gone through."""
        wanted = _among(episode_ids, "episode_id")
        if self.parameters.get("grouping") is None:
            # They lie by the group they were collected in.
            groups = lake.sql(f"SELECT DISTINCT group_id FROM episodes WHERE {wanted}")["group_id"]
            wanted = f"{wanted} AND {_among(groups)}"
        return f"(SELECT * FROM {self.rows} WHERE {wanted})"


@dataclass(frozen=True, slots=True)
class Covering:
    """A series that covers something."""

    credit: Credit
    is_current: bool
    """It is what readers take by default."""
    ended_at: Any
    """When its newest job ended, a datetime in UTC."""


def find_credit(
    lake: Reads, wanted: str | None = None, *, before: int | None = None, place: str = "--credit"
) -> Credit:
    """The advantages that a text names; the current series for None.

    Args:
        wanted: an estimator's name, or a series' or job's id or its beginning; None takes the current series.
        before: look at the jobs that ended below this version of `jobs` only: what was current then.

    Raises:
        UsageError: no such estimator, series or job, or several begin like that.
        DataRefusedError: there is no succeeded credit job.
    """
    jobs = lake.sql(_JOBS, {"before": before})
    if jobs.is_empty():
        raise DataRefusedError("the lake holds no advantages; compute them first: `trajlake credit gigpo`")
    if wanted is None:
        return _credit(jobs.row(0, named=True), jobs, before)
    named = jobs.filter(pl.col("estimator") == wanted.strip())
    if named.height:
        return _credit(named.row(0, named=True), jobs, before)
    prefix = wanted.strip().lower()
    found = {
        column: [value for value in jobs[column].unique(maintain_order=True) if ids.to_text(value).startswith(prefix)]
        for column in ("job_id", "series_id")
    }
    if not prefix or len(found["job_id"]) + len(found["series_id"]) != 1:
        raise _no_such(jobs, wanted, place, several=bool(prefix and (found["job_id"] or found["series_id"])))
    if found["series_id"]:
        return _credit(jobs.filter(series_id=found["series_id"][0]).row(0, named=True), jobs, before)
    row = jobs.filter(job_id=found["job_id"][0]).row(0, named=True)
    return _credit(row, jobs, int(row["sequence"]) + 1, job_id=row["job_id"])


def current_series(lake: Reads) -> int | None:
    """The current credit series; None if there is no succeeded credit job."""
    found = lake.sql("SELECT series_id FROM credit_series WHERE is_current")
    return None if found.is_empty() else int(found.item())


def covering(lake: Reads, *, episode_id: int | None = None, group_id: int | None = None) -> list[Covering]:
    """The series that have advantages of an episode, or of a group as they compared it, the newest first."""
    condition = f"group_id = {group_id}"
    if episode_id is not None:
        # Advantages lie by group, and an episode's groups are quicker to find than its advantages.
        groups = "SELECT group_id FROM {} WHERE episode_id = $episode"
        query = " UNION ".join(map(groups.format, ("episodes", "groupings")))
        found = lake.sql(query, {"episode": episode_id})["group_id"]
        condition = f"episode_id = {episode_id} AND {_among(found)}"
    found = lake.sql(f"SELECT DISTINCT series_id FROM advantages WHERE {condition}")["series_id"]
    listed = lake.sql(_SERIES).filter(pl.col("series_id").is_in(found.implode()))
    if (listed["jobs"] > 1).any():
        # What a later job of a series took back does not count.
        latest = lake.sql(f"SELECT DISTINCT series_id FROM latest_advantages WHERE {condition}")["series_id"]
        listed = listed.filter(pl.col("series_id").is_in(latest.implode()))
    return [
        Covering(
            Credit(**_named(row), only_job=row["job_id"] if row["jobs"] == 1 else None),
            row["is_current"],
            row["ended_at"],
        )
        for row in listed.iter_rows(named=True)
    ]


def outdated(lake: Reads, credit: Credit, *, episode_id: int | None = None, group_id: int | None = None) -> str | None:
    """What changed since advantages were computed, and what to do; None if nothing did, or if a job was named.

    Siblings that were retracted or joined, and another version of a score, change what the same command would compute.

    Args:
        episode_id: look at the group of this episode only.
        group_id: look at this group only.
    """
    if credit.before is not None:
        return None
    given = credit.parameters
    is_whole = given.get("where") is None and given.get("grouping") is None
    condition = "true"
    if episode_id is not None:
        named = f"SELECT DISTINCT group_id FROM {credit.rows_of(lake, [episode_id])}"
        condition = _among(lake.sql(named)["group_id"])
    elif group_id is not None:
        condition = f"group_id = {group_id}"
    changes = _CHANGES.format(rows=credit.rows, condition=condition)
    lost, joined = lake.sql(changes, {"is_whole": is_whole, "with_all": _with_all_siblings(given)}).row(0)
    found = [f"{counted(lost, 'group')} lost episodes"] if lost else []
    found += [f"{counted(joined, 'episode')} joined a group"] if joined else []
    for scorer, read in (given.get("scorer_versions") or {}).items():
        if (now := version_of(lake, scorer)) not in (None, read):
            found.append(f"score {scorer.partition('@')[0]} is at version {now} (they read {read})")
    if not found:
        return None
    again = f"run the same `trajlake credit {credit.estimator} ...` again to bring them up to date"
    return f"these advantages are older than the data: {', '.join(found)}; {again}"


def changed_groups(lake: Reads, credit: Credit, limit: int = 100) -> pl.DataFrame:
    """The groups that `outdated` counts: group_id, lost (episodes), joined, replacing (joined, in place of others).

    Those that lost most come first; empty if a job was named.
    """
    given = credit.parameters
    is_whole = given.get("where") is None and given.get("grouping") is None
    inputs = {"is_whole": is_whole, "with_all": _with_all_siblings(given), "limit": limit}
    found = lake.sql(_CHANGED_GROUPS.format(rows=credit.rows), inputs)
    return found if credit.before is None else found.clear()


def _with_all_siblings(parameters: dict[str, Any]) -> bool:
    """Whether a series compares siblings that their collection left out as well."""
    return parameters.get("siblings") == "all"


def jobs_of(lake: Reads, credit: Credit) -> tuple[int, ...]:
    """The jobs whose rows a choice is made of, sorted."""
    return tuple(lake.sql(f"SELECT DISTINCT job_id FROM {credit.rows} ORDER BY job_id")["job_id"].to_list())


def read_advantages(
    lake: Reads,
    credit: Credit,
    episode_ids: pl.Series | None = None,
    columns: Sequence[str] = ("advantage", "flags"),
) -> pl.DataFrame:
    """Advantages of some episodes (int64 [E]; None takes all), one row per step, in any order.

    Columns: episode_id, step_index, group_id and those asked for. What is not known is NULL.
    """
    frame = lake.sql(f"SELECT {', '.join((*_KEYS, *columns))} FROM {credit.rows}")
    if episode_ids is not None:
        frame = frame.filter(pl.col("episode_id").is_in(episode_ids.implode()))
    return frame


def _among(values: Iterable[int], column: str = "group_id") -> str:
    return f"{column} IN ({', '.join(map(str, sorted(set(values)))) or 'NULL'})"


def _credit(row: dict[str, Any], jobs: pl.DataFrame, before: int | None, *, job_id: int | None = None) -> Credit:
    """The series of a row of `_JOBS`, of which these are all rows, as of its jobs below a version of `jobs`."""
    mine = jobs.filter(series_id=row["series_id"])
    if before is not None:
        mine = mine.filter(pl.col("sequence") < before)
    only_job = mine["job_id"][0] if mine.height == 1 else None
    return Credit(**_named(row), job_id=job_id, before=before, only_job=only_job)


def _named(row: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = json_object(row["parameters"])
    return {
        "series_id": row["series_id"],
        "estimator": row["estimator"] or "unnamed estimator",
        "parameters": parameters,
    }


def _unusual(parameters: dict[str, Any]) -> list[str]:
    """How a series was computed, as far as it is not the usual: the estimator's options, then the sources."""
    versions: dict[str, str] = parameters.get("scorer_versions") or {}
    # `options` says which differ from the usual, `config` holds them whole: as --set takes them.
    options = {n: (parameters.get("config") or {}).get(n, v) for n, v in (parameters.get("options") or {}).items()}
    parts = [f"{n} {v if isinstance(v, str) else msgspec.json.encode(v).decode()}" for n, v in options.items()]
    usual = {"score": ENV_RETURN, "rewards": "env_reward", "grouping": None, "siblings": "kept", "where": None}
    for name, expected in usual.items():
        value = parameters.get(name)
        if value in (None, expected):
            continue
        version = versions.get(value)
        parts.append(f"{name} {value.partition('@')[0]}@{version}" if version else f"{name} {value}")
    return parts


def _no_such(jobs: pl.DataFrame, wanted: str, place: str, *, several: bool) -> UsageError:
    newest = jobs.unique("series_id", keep="first", maintain_order=True).head(5)
    known = "; ".join(Credit(**_named(row)).listed for row in newest.iter_rows(named=True))
    fault = "begins several ids" if several else "names no estimator, series or job with advantages"
    return UsageError(
        f"{place} {wanted!r} {fault}; the newest: {known}. Write an estimator's name, or the id of a series or of a "
        "credit job, or its beginning"
    )
