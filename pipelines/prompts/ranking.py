"""Ranking: candidates by their returns on the same starts, each against the first prompt.

The unit is the start: siblings of one start resemble each other, so a candidate's return there is their mean. Two
candidates are compared on the starts that both have a return for, start by start (`lake.statistics.paired`).

The p of each is that of one comparison. The best of many is the best partly by chance, and the more candidates there
are the more so: what it is worth is asked of held-out starts.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from lake.judgements.scores import ENV_RETURN, episode_scores
from lake.read.episodes import KEYS
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.statistics.paired import Comparison, compare_paired


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of one candidate came to."""

    returns: dict[str, float]
    """Start (its task id) -> mean return of its rollouts that finished."""
    unknown: int
    """Rollouts that failed, or that nothing rewarded."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a candidate stands."""

    rank: int
    candidate: str
    mean: float | None
    """Return, over its starts; None if none is known."""
    difference: float | None
    """Mean difference from the first prompt, on the starts of both."""
    low: float | None
    """Its 95 % interval."""
    high: float | None
    p: float | None
    """Two-sided, of the permutation test; of this comparison alone."""
    test: str | None
    """exact or sampled."""
    starts: int
    """Those of both."""
    unknown: int
    """Rollouts without a return."""


def read_outcomes(snapshot: Snapshot, run: str, score: str) -> pl.DataFrame:
    """A run's visible rollouts: columns of `episodes`, and `return`, by a score, NULL if it failed or is not scored.

    Args:
        snapshot: of the lake.
        run: a candidate's.
        score: env_return, or a scorer.

    Raises:
        UsageError: a scorer that scored no episode.
    """
    names = [*KEYS, "task_id", "seed", "rollout_index"]
    rows = snapshot.scan("episodes").filter(pl.col("run_id") == run)
    found = collected(rows.select(*dict.fromkeys(names), "status", "env_return"))
    value = pl.col("env_return")
    if score != ENV_RETURN:
        found, value = found.join(episode_scores(snapshot, score), on="episode_id", how="left"), pl.col("score")
    finished = pl.col("status").is_in(["completed", "truncated"])
    return found.select(*dict.fromkeys(names), pl.when(finished).then(value).alias("return"))


def read_played(snapshot: Snapshot, run: str, score: str) -> Played:
    """What a run's visible rollouts came to, by a score; see `read_outcomes`."""
    found = read_outcomes(snapshot, run, score)
    known = found.drop_nulls("return")
    means = known.group_by("task_id").agg(pl.col("return").mean()).sort("task_id")
    returns = dict(means.iter_rows())
    return Played(returns=returns, unknown=found.height - known.height)


def rank(played: Mapping[str, Played], first: str, *, seed: int) -> list[Standing]:
    """Candidates by their mean difference from the first, the highest first; equal ones as they came.

    Args:
        played: candidate -> what it came to, in the order in which they were made.
        first: the candidate that all are compared with.
        seed: of the sampled test, where there are too many starts for the exact one.
    """
    compared = {name: compared_with(one, played[first], seed=seed) for name, one in played.items()}
    is_known = {name: one.difference is not None for name, one in compared.items()}
    ordered = sorted(played, key=lambda name: (not is_known[name], -(compared[name].difference or 0.0)))
    return [
        _standing(place, name, played[name], compared[name], is_first=name == first)
        for place, name in enumerate(ordered, start=1)
    ]


def compared_with(one: Played, other: Played, *, seed: int, without: Sequence[str] = ()) -> Comparison:
    """Two candidates on the starts that both have returns for, but some."""
    shared = sorted((one.returns.keys() & other.returns.keys()) - set(without))
    pairs_P2 = np.array([(one.returns[start], other.returns[start]) for start in shared], np.float64).reshape(-1, 2)
    return compare_paired(pairs_P2, seed=seed)


def _standing(place: int, name: str, played: Played, found: Comparison, *, is_first: bool) -> Standing:
    values = list(played.returns.values())
    return Standing(
        rank=place,
        candidate=name,
        mean=float(np.mean(values)) if values else None,
        difference=found.difference,
        low=None if is_first else found.low,
        high=None if is_first else found.high,
        p=None if is_first else found.p,
        test=None if is_first else found.test,
        starts=found.tasks,
        unknown=played.unknown,
    )
