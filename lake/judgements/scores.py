"""What scorers say of episodes and steps, under which version.

Every version of a scorer keeps its scores. NAME means its current version, the one that ran last, also if it found
nothing left to score (view `scorer_versions`); NAME@VERSION means that one. For each episode the newest job of the
version counts (view `latest_scores`). `env_return` is what the environment recorded: a score without a scorer.

Whoever names no score takes the one that the current credit was computed from, and without credit `env_return` (view
`current_score`). Whoever names a credit takes that credit's score.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import polars as pl

from lake.errors import UsageError
from lake.read.query_views import quoted
from lake.read.snapshot import Reads

if TYPE_CHECKING:
    from lake.judgements.credit import Credit

ENV_RETURN = "env_return"
"""The return that the environment reported."""
_VERSION = """
SELECT any_value(scorer_version) AS version FROM scorer_versions
WHERE scorer = $scorer AND CASE WHEN $version IS NULL THEN is_current ELSE scorer_version = $version END
"""
_SCORERS = """
SELECT DISTINCT scorer FROM current_scores
WHERE step_index IS NULL AND value IS NOT NULL AND episode_id IN (SELECT unnest($ids::BIGINT[])) ORDER BY scorer
"""
_MINE = "FROM latest_scores WHERE scorer = $scorer AND scorer_version = $version"


@dataclass(frozen=True, slots=True)
class ChosenScore:
    """Which score a reader takes, and why."""

    name: str
    """env_return, a scorer or reward as NAME, or NAME@VERSION."""
    version: str | None = None
    """The version that is read; None of env_return, and of a scorer that scored nothing."""
    estimator: str | None = None
    """Of the credit that was computed from the score; None if the score was named, or if there is no credit."""

    @property
    def title(self) -> str:
        """The score in words: `booked@3f2a, as in the credit rloo`."""
        name = self.name.partition("@")[0]
        version = "" if self.version is None else f"@{self.version}"
        return f"{name}{version}{f', as in the credit {self.estimator}' if self.estimator else ''}"


@overload
def is_success(score: float, threshold: float) -> bool: ...
@overload
def is_success(score: pl.Expr, threshold: float) -> pl.Expr: ...
def is_success(score: float | pl.Expr, threshold: float) -> bool | pl.Expr:
    """Return whether a score (a number or a Polars column) is a success: it reaches the threshold.

    Evaluations, labels of trainers, exports and the viewer's SQL (`>=` there) all count a score on the threshold.
    """
    return score >= threshold


def find_score(lake: Reads, wanted: str | None = None, *, credit: "Credit | None" = None) -> ChosenScore:
    """The score that a reader takes: the one it names, or else that of a credit.

    Args:
        wanted: env_return, or a scorer or reward as NAME or NAME@VERSION; None takes the credit's.
        credit: whose score; None takes the current credit's, and without any credit `env_return`.
    """
    estimator = None
    if wanted is None and credit is not None:
        wanted, estimator = credit.score, credit.estimator
    elif wanted is None:
        wanted, estimator = lake.sql("SELECT score, estimator FROM current_score").row(0)
    return ChosenScore(wanted, None if wanted == ENV_RETURN else version_of(lake, wanted), estimator)


def current_versions(lake: Reads) -> dict[str, str]:
    """Scorer or reward -> the version of it that counts."""
    return dict(lake.sql("SELECT scorer, scorer_version FROM scorer_versions WHERE is_current").iter_rows())


def version_of(lake: Reads, scorer: str) -> str | None:
    """The version that NAME or NAME@VERSION means; None if it scored nothing."""
    name, at, wanted = scorer.partition("@")
    version: str | None = lake.sql(_VERSION, {"scorer": name, "version": wanted if at else None}).item()
    return version


def episode_scores(lake: Reads, score: str) -> pl.DataFrame:
    """Scores of whole episodes: episode_id and score (float64, NULL where it is not known).

    Args:
        score: env_return, or a scorer or reward as NAME or NAME@VERSION.

    Raises:
        UsageError: a scorer that scored no episode.
    """
    if score == ENV_RETURN:
        return lake.sql("SELECT episode_id, env_return AS score FROM episodes")
    values = _of_version(lake, score, "SELECT episode_id, value AS score", "AND step_index IS NULL")
    if values.is_empty():
        raise _unknown(lake, score, "episodes")
    return values


def episode_score_rows(lake: Reads, score: str) -> str:
    """The rows that a scorer's NAME or NAME@VERSION means for whole episodes, as something to select FROM."""
    name, at, version = score.partition("@")
    rows = f"latest_scores WHERE scorer_version = {quoted(version)} AND" if at else f"{current_rows(lake)} WHERE"
    return f"(SELECT * FROM {rows} scorer = {quoted(name)} AND step_index IS NULL)"


def scorers_with_values(lake: Reads, episode_ids: pl.Series) -> list[str]:
    """The scorers whose current version has a value for at least one of some episodes (int64 [E]), by name."""
    found = lake.sql(_SCORERS, {"ids": episode_ids.to_list()})
    return found["scorer"].to_list()


def step_score_jobs(lake: Reads, scorer: str) -> pl.DataFrame:
    """The jobs whose scores of steps count: episode_id and job_id, a row for each episode that the version scored.

    Args:
        scorer: NAME or NAME@VERSION.

    Raises:
        UsageError: a scorer that scored no step.
    """
    jobs = _of_version(lake, scorer, "SELECT episode_id, job_id, count(step_index) AS steps", "GROUP BY ALL")
    if not jobs["steps"].sum():
        raise _unknown(lake, scorer, "steps")
    return jobs.drop("steps")


def current_scorers(lake: Reads) -> pl.DataFrame:
    """Each scorer's version that counts, by name.

    scorer, scorer_version, of_episodes (it has scores of whole episodes), job_id (of its first job), jobs (how many).
    """
    # What only `scores` says is asked alone: a reader who remembers answers has it until something is scored.
    query = """
        SELECT scorer, scorer_version, bool_or(step_index IS NULL) AS of_episodes, min(job_id) AS job_id,
               count(DISTINCT job_id) AS jobs
        FROM scores GROUP BY scorer, scorer_version
        """
    return lake.sql(query).join(_current(lake), on=["scorer", "scorer_version"], how="semi").sort("scorer")


def current_rows(lake: Reads) -> str:
    """The rows of `current_scores` as something to select FROM.

    Where one job computed each current version no rows are compared, which is cheap and usual.
    """
    found = current_scorers(lake)
    if found.is_empty() or (found["jobs"] > 1).any():
        return "current_scores"
    each = (
        f"(scorer = {quoted(scorer)} AND scorer_version = {quoted(version)} AND job_id = {job_id})"
        for scorer, version, job_id in found.select("scorer", "scorer_version", "job_id").iter_rows()
    )
    return f"(SELECT * FROM scores WHERE {' OR '.join(each)})"


def scores_of(lake: Reads, episode_ids: Iterable[int], columns: Sequence[str] = ("value",)) -> pl.DataFrame:
    """The rows of `current_scores` of a few hundred episodes at most; all scores are gone through only if need be.

    Columns: episode_id, step_index, scorer, job_id and those asked for (of `scores`), in any order.
    """
    wanted = f"episode_id IN ({', '.join(map(str, episode_ids)) or 'NULL'})"
    shown = list(dict.fromkeys(("episode_id", "step_index", "scorer", "job_id", *columns)))
    read = dict.fromkeys(("scorer_version", *shown))
    found = lake.sql(f"SELECT {', '.join(read)} FROM scores WHERE {wanted}")
    found = found.join(_current(lake), on=["scorer", "scorer_version"], how="semi")
    if (found.group_by("episode_id", "scorer").agg(pl.col("job_id").n_unique())["job_id"] > 1).any():
        # Which of several jobs counts is for the view to say.
        found = lake.sql(f"SELECT {', '.join(shown)} FROM current_scores WHERE {wanted}")
    return found.select(shown)


def reasons(lake: Reads, scorer: str, version: str) -> pl.DataFrame:
    """Why a version gave no value: episode_id and why (error, or else reason; NULL if neither) of whole episodes."""
    why = "coalesce(error, reason) AS why"
    return lake.sql(f"SELECT episode_id, {why} {_MINE} AND step_index IS NULL", {"scorer": scorer, "version": version})


def other_versions(lake: Reads, scorer: str, version: str) -> list[str]:
    """Versions of a scorer beside one, the newest first."""
    query = """
        SELECT scorer_version FROM scorer_versions WHERE scorer = $scorer AND scorer_version <> $version
        ORDER BY ended_order(sequence, ended_at, job_id) DESC, scorer_version
        """
    return lake.sql(query, {"scorer": scorer, "version": version})["scorer_version"].to_list()


def _current(lake: Reads) -> pl.DataFrame:
    schema = {"scorer": pl.String, "scorer_version": pl.String}
    return pl.DataFrame(list(current_versions(lake).items()), schema, orient="row")


def _of_version(lake: Reads, scorer: str, select: str, rest: str) -> pl.DataFrame:
    params = {"scorer": scorer.partition("@")[0], "version": version_of(lake, scorer)}
    return lake.sql(f"{select} {_MINE} {rest}", params)


def _unknown(lake: Reads, scorer: str, level: str) -> UsageError:
    """What to say of a scorer without a value at the level that is asked for."""
    condition = "step_index IS NULL" if level == "episodes" else "step_index IS NOT NULL"
    known = lake.sql(f"SELECT DISTINCT scorer, scorer_version FROM scores WHERE {condition} ORDER BY ALL")
    name = scorer.partition("@")[0]
    versions = known.filter(scorer=name)["scorer_version"].to_list()
    recorded = ENV_RETURN if level == "episodes" else "env_reward"
    valid: Sequence[str] = [f"{name}@{v}" for v in versions] or [recorded, *known["scorer"].to_list()]
    return UsageError(f"no scores of {scorer!r} for {level}; valid: {', '.join(dict.fromkeys(valid))}")
