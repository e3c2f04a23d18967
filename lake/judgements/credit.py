"""Resolving credit: which advantages count, now or as of an earlier job; and which score a reader uses.

A series is one estimator with one set of options, sources, filters and code. Its jobs compute the groups that changed.
For each group the rows of the newest job count. The current series is the one whose job ended last, even if that job
found nothing to do. So the last run of `trajlake credit` is the default of every reader (view `credit_series`).

A user names a series by its estimator (`gigpo`: the newest series of that estimator), or by the id of the series or of
a job, in full or by its beginning. A job means its series at the time the job ended: the groups that it computed, and
the unchanged groups of earlier jobs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.documents import parse_json_object
from lake.errors import DataRefusedError, UsageError
from lake.judgements.scores import ENV_RETURN, ChosenScore, find_version
from lake.read.snapshot import SnapshotReader
from lake.read.text_table import count_noun

_KEYS = ("episode_id", "step_index", "group_id")
_LISTED = 60
"""Characters of a series' options in a list."""
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
"""SQL: like `latest_advantages`, for one series and the jobs that ended before a version of `jobs`."""
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
"""SQL: like `_CHANGES`, by group."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A resolved choice of advantages."""

    series_id: int
    """Id of the estimator with its options, sources and filters."""
    estimator: str
    """Name of the estimator."""
    parameters: dict[str, Any] = field(hash=False)
    """Parameters of the series' newest job, or of the named job."""
    job_id: int | None = None
    """The named job; None means the current series."""
    before: int | None = None
    """Only jobs whose terminal row has a lower `sequence` count; None counts all jobs of the snapshot."""
    only_job: int | None = None
    """The only job of the series, whose rows need no comparison with others; None if there are several."""

    @property
    def text(self) -> str:
        """The choice as an id: of the named job, else of the series."""
        return ids.to_text(self.series_id if self.job_id is None else self.job_id)

    @property
    def title(self) -> str:
        """The choice for messages: `gigpo (omega 0.5, score judge@3f2a), series 0k3...`, or `..., as of job 0k3...`."""
        as_of = "" if self.job_id is None else f", as of job {ids.to_text(self.job_id)}"
        return f"{self._words(', '.join(_list_unusual(self.parameters)))}{as_of}"

    @property
    def listed(self) -> str:
        """The series for lists; long definitions are cut."""
        unusual = ", ".join(_list_unusual(self.parameters))
        return self._words(unusual if len(unusual) <= _LISTED else f"{unusual[: _LISTED - 3]}...")

    def _words(self, unusual: str) -> str:
        return f"{self.estimator}{f' ({unusual})' if unusual else ''}, series {ids.to_text(self.series_id)}"

    @property
    def score(self) -> str:
        """The episode score of the computation: env_return, or the name of a scorer or reward, @VERSION or not."""
        return str(self.parameters.get("score") or ENV_RETURN)

    @property
    def formula(self) -> str | None:
        """How the terms combine, with weights: `A = A_E + 0.5 A_S`; None for an estimator of one term."""
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
        """The rows of `advantages` for a FROM clause; it contains only integer ids, no user text."""
        if self.only_job is not None:
            return f"(SELECT * FROM advantages WHERE series_id = {self.series_id} AND job_id = {self.only_job})"
        if self.before is None:
            return f"(SELECT * FROM latest_advantages WHERE series_id = {self.series_id})"
        return f"({_AS_OF.format(series=self.series_id, before=self.before)})"

    def rows_of(self, lake: SnapshotReader, episode_ids: Iterable[int]) -> str:
        """Return `rows` for up to a few hundred episodes; the query reads no other rows."""
        condition = _in_list(episode_ids, "episode_id")
        if self.parameters.get("grouping") is None:
            # Their advantages are stored by the group they were collected in.
            groups = lake.sql(f"SELECT DISTINCT group_id FROM episodes WHERE {condition}")["group_id"]
            condition = f"{condition} AND {_in_list(groups)}"
        return f"(SELECT * FROM {self.rows} WHERE {condition})"


@dataclass(frozen=True, slots=True)
class Covering:
    """A series that has advantages of an episode or group."""

    credit: Credit
    is_current: bool
    """Whether the series is the default of readers."""
    ended_at: Any
    """When its newest job ended, a datetime in UTC."""


def find_credit(
    lake: SnapshotReader, name: str | None = None, *, before: int | None = None, option: str = "--credit"
) -> Credit:
    """Return the advantages that a name means; None means the current series.

    Args:
        name: an estimator, or the id of a series or job, or the beginning of an id.
        before: only jobs that ended below this version of `jobs` count, as if it were the newest version.
        option: name of the option in messages.

    Raises:
        UsageError: no such estimator, series or job, or several match.
        DataRefusedError: there is no succeeded credit job.
    """
    jobs = lake.sql(_JOBS, {"before": before})
    if jobs.is_empty():
        raise DataRefusedError("the lake holds no advantages; compute them first: `trajlake credit gigpo`")
    if name is None:
        return _build_credit(jobs.row(0, named=True), jobs, before)
    of_estimator = jobs.filter(pl.col("estimator") == name.strip())
    if of_estimator.height:
        return _build_credit(of_estimator.row(0, named=True), jobs, before)
    prefix = name.strip().lower()
    matches = {
        column: [value for value in jobs[column].unique(maintain_order=True) if ids.to_text(value).startswith(prefix)]
        for column in ("job_id", "series_id")
    }
    if not prefix or len(matches["job_id"]) + len(matches["series_id"]) != 1:
        several = prefix and (matches["job_id"] or matches["series_id"])
        fault = "is the beginning of several ids" if several else "names no estimator, series or job with advantages"
        newest = jobs.unique("series_id", keep="first", maintain_order=True).head(5)
        listed = "; ".join(Credit(**_parse_row(row)).listed for row in newest.iter_rows(named=True))
        raise UsageError(
            f"{option} {name!r} {fault}; the newest: {listed}. Write an estimator's name, or the id of a series or "
            "of a credit job, or its beginning"
        )
    if matches["series_id"]:
        return _build_credit(jobs.filter(series_id=matches["series_id"][0]).row(0, named=True), jobs, before)
    row = jobs.filter(job_id=matches["job_id"][0]).row(0, named=True)
    return _build_credit(row, jobs, int(row["sequence"]) + 1, job_id=row["job_id"])


def find_current_series(lake: SnapshotReader) -> int | None:
    """Return the current credit series; None if there is no succeeded credit job."""
    series = lake.sql("SELECT series_id FROM credit_series WHERE is_current")
    return None if series.is_empty() else int(series.item())


def find_covering(
    lake: SnapshotReader, *, episode_id: int | None = None, group_id: int | None = None
) -> list[Covering]:
    """Return the series that have advantages of an episode, or of a group, the newest first."""
    condition = f"group_id = {group_id}"
    if episode_id is not None:
        # Advantages are stored by group, and an episode's groups are quicker to find than its advantages.
        groups = "SELECT group_id FROM {} WHERE episode_id = $episode"
        query = " UNION ".join(map(groups.format, ("episodes", "groupings")))
        group_ids = lake.sql(query, {"episode": episode_id})["group_id"]
        condition = f"episode_id = {episode_id} AND {_in_list(group_ids)}"
    series = lake.sql(f"SELECT DISTINCT series_id FROM advantages WHERE {condition}")["series_id"]
    series_rows = lake.sql(_SERIES).filter(pl.col("series_id").is_in(series.implode()))
    if (series_rows["jobs"] > 1).any():
        # Rows that a later job of the series withdrew do not count.
        latest = lake.sql(f"SELECT DISTINCT series_id FROM latest_advantages WHERE {condition}")["series_id"]
        series_rows = series_rows.filter(pl.col("series_id").is_in(latest.implode()))
    return [
        Covering(
            Credit(**_parse_row(row), only_job=row["job_id"] if row["jobs"] == 1 else None),
            row["is_current"],
            row["ended_at"],
        )
        for row in series_rows.iter_rows(named=True)
    ]


def describe_outdated(
    lake: SnapshotReader, credit: Credit, *, episode_id: int | None = None, group_id: int | None = None
) -> str | None:
    """Describe what changed since advantages were computed, with advice; None if nothing did, or for a named job.

    Retracted or new siblings, and a new version of a score, change the result of the same command.

    Args:
        episode_id: check only the group of this episode.
        group_id: check only this group.
    """
    if credit.before is not None:
        return None
    parameters = credit.parameters
    is_whole = parameters.get("where") is None and parameters.get("grouping") is None
    condition = "true"
    if episode_id is not None:
        query = f"SELECT DISTINCT group_id FROM {credit.rows_of(lake, [episode_id])}"
        condition = _in_list(lake.sql(query)["group_id"])
    elif group_id is not None:
        condition = f"group_id = {group_id}"
    changes = _CHANGES.format(rows=credit.rows, condition=condition)
    lost, joined = lake.sql(changes, {"is_whole": is_whole, "with_all": parameters.get("siblings") == "all"}).row(0)
    reasons = [f"{count_noun(lost, 'group')} lost episodes"] if lost else []
    reasons += [f"{count_noun(joined, 'episode')} joined a group"] if joined else []
    for scorer, read in (parameters.get("scorer_versions") or {}).items():
        if (now := find_version(lake, scorer)) not in (None, read):
            reasons.append(f"score {scorer.partition('@')[0]} is at version {now} (they read {read})")
    if not reasons:
        return None
    again = f"run the same `trajlake credit {credit.estimator} ...` again to bring them up to date"
    return f"these advantages are older than the data: {', '.join(reasons)}; {again}"


def find_changed_groups(lake: SnapshotReader, credit: Credit, limit: int = 100) -> pl.DataFrame:
    """Return the groups that `describe_outdated` counts, those that lost most first; empty for a named job.

    Columns: group_id, lost (episodes), joined, replacing (joined as retries).
    """
    parameters = credit.parameters
    is_whole = parameters.get("where") is None and parameters.get("grouping") is None
    inputs = {"is_whole": is_whole, "with_all": parameters.get("siblings") == "all", "limit": limit}
    groups = lake.sql(_CHANGED_GROUPS.format(rows=credit.rows), inputs)
    return groups if credit.before is None else groups.clear()


def find_jobs(lake: SnapshotReader, credit: Credit) -> tuple[int, ...]:
    """Return the jobs whose rows a choice uses, sorted."""
    return tuple(lake.sql(f"SELECT DISTINCT job_id FROM {credit.rows} ORDER BY job_id")["job_id"].to_list())


def read_advantages(
    lake: SnapshotReader,
    credit: Credit,
    episode_ids: pl.Series | None = None,
    columns: Sequence[str] = ("advantage", "flags"),
) -> pl.DataFrame:
    """Read advantages of some episodes (int64 [E]; None reads all), one row per step, in any order.

    Columns: episode_id, step_index, group_id and the requested ones. Unknown values are NULL.
    """
    frame = lake.sql(f"SELECT {', '.join((*_KEYS, *columns))} FROM {credit.rows}")
    if episode_ids is not None:
        frame = frame.filter(pl.col("episode_id").is_in(episode_ids.implode()))
    return frame


def _in_list(values: Iterable[int], column: str = "group_id") -> str:
    return f"{column} IN ({', '.join(map(str, sorted(set(values)))) or 'NULL'})"


def _build_credit(row: dict[str, Any], jobs: pl.DataFrame, before: int | None, *, job_id: int | None = None) -> Credit:
    """Build the credit of a row of `_JOBS`, counting only jobs below a version of `jobs`."""
    mine = jobs.filter(series_id=row["series_id"])
    if before is not None:
        mine = mine.filter(pl.col("sequence") < before)
    only_job = mine["job_id"][0] if mine.height == 1 else None
    return Credit(**_parse_row(row), job_id=job_id, before=before, only_job=only_job)


def _parse_row(row: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = parse_json_object(row["parameters"])
    return {
        "series_id": row["series_id"],
        "estimator": row["estimator"] or "unnamed estimator",
        "parameters": parameters,
    }


def _list_unusual(parameters: dict[str, Any]) -> list[str]:
    """List the non-default settings of a series: the estimator's options, then the sources."""
    versions: dict[str, str] = parameters.get("scorer_versions") or {}
    # `options` names the non-default options, `config` has their values in the form of --set.
    options = {n: (parameters.get("config") or {}).get(n, v) for n, v in (parameters.get("options") or {}).items()}
    definition = [f"{n} {v if isinstance(v, str) else msgspec.json.encode(v).decode()}" for n, v in options.items()]
    usual = {"score": ENV_RETURN, "rewards": "env_reward", "grouping": None, "siblings": "kept", "where": None}
    for name, expected in usual.items():
        setting = parameters.get(name)
        if setting in (None, expected):
            continue
        version = versions.get(setting)
        definition.append(f"{name} {setting.partition('@')[0]}@{version}" if version else f"{name} {setting}")
    return definition


def find_score(lake: SnapshotReader, name: str | None = None, *, credit: "Credit | None" = None) -> ChosenScore:
    """Return the score that a reader uses: the named one, or else the score of a credit.

    Args:
        name: env_return, or a scorer or reward as NAME or NAME@VERSION; None uses the credit's score.
        credit: the credit; None uses the current credit, and without any credit `env_return`.
    """
    estimator = None
    if name is None and credit is not None:
        name, estimator = credit.score, credit.estimator
    elif name is None:
        name, estimator = lake.sql("SELECT score, estimator FROM current_score").row(0)
    return ChosenScore(name, None if name == ENV_RETURN else find_version(lake, name), estimator)
