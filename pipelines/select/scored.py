"""The score of an episode as filters see it: the environment's return, a scorer's or a reward's value."""

import polars as pl

from lake import ids
from lake.judgements.scores import ENV_RETURN, episode_scores
from lake.snapshot import Snapshot


def with_scores(snapshot: Snapshot, episodes: pl.DataFrame, score: str) -> pl.DataFrame:
    """Episodes with `score` (float64, NULL = unscored) in place of `env_return`.

    Args:
        snapshot: where to read.
        episodes: rows with episode_id and env_return.
        score: `env_return`, or a scorer or reward as NAME (its current version) or NAME@VERSION.

    Raises:
        UsageError: nothing of that name scored an episode.
    """
    if score == ENV_RETURN:
        return episodes.rename({ENV_RETURN: "score"})
    values = episode_scores(snapshot, score)
    return episodes.drop(ENV_RETURN).join(values, on="episode_id", how="left", maintain_order="left")


def scores_hash(episodes: pl.DataFrame) -> int:
    """Hash of the scores that were read: other scores, other result."""
    return ids.bytes_hash(episodes.select("episode_id", "score").sort("episode_id").write_csv().encode())
