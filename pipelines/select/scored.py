"""The score of an episode as filters see it: the environment's return, a scorer's or a reward's newest value."""

import polars as pl

from lake import ids
from lake.snapshot import Snapshot
from pipelines.credit.inputs import ENV_RETURN, newest_scores


def with_scores(snapshot: Snapshot, episodes: pl.DataFrame, score: str) -> pl.DataFrame:
    """Episodes with `score` (float64, NULL = unscored) in place of `env_return`.

    Args:
        snapshot: where to read.
        episodes: rows with episode_id and env_return.
        score: `env_return`, or the name of a scorer or reward: its newest version, which siblings have in common.

    Raises:
        UsageError: nothing of that name scored an episode.
    """
    if score == ENV_RETURN:
        return episodes.rename({ENV_RETURN: "score"})
    values = newest_scores(snapshot, score).rename({"value": "score"})
    return episodes.drop(ENV_RETURN).join(values, on="episode_id", how="left", maintain_order="left")


def scores_hash(episodes: pl.DataFrame) -> int:
    """Hash of the scores that were read: other scores, other result."""
    return ids.bytes_hash(episodes.select("episode_id", "score").sort("episode_id").write_csv().encode())
