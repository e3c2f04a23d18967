"""How old the policy was that took each step: versions behind the newest of its collecting run.

A version is the number of updates that the weights had seen. It is compared inside a collecting run only: another run's
count starts anew. Weights may change inside an action; the oldest version counts. Where tokens do not say, the step
does, then the episode, whose version is the one it began with.
"""

import polars as pl

from lake.reading import collected
from lake.snapshot import Snapshot

_SPANS = pl.List(pl.List(pl.Int64))
"""[[version, first token, last token], ...]."""
_KEYS = ["episode_id", "step_index"]


def staleness(snapshot: Snapshot, members: pl.DataFrame) -> pl.Series:
    """Versions behind.

    Args:
        snapshot: the data.
        members: token rows, with policy_version and version_spans.

    Returns:
        Int64 [M], 0 for the newest version among the members of the same collecting run; NULL where none is known.
    """
    spans = pl.col("version_spans").str.json_decode(_SPANS).list.eval(pl.element().list.first())
    rows = members.select(
        *_KEYS,
        version=pl.min_horizontal("policy_version", spans.list.min()),
        newest=pl.max_horizontal("policy_version", spans.list.max()),
    )
    episode_ids = rows["episode_id"].unique().implode()
    if rows["version"].null_count():
        steps = snapshot.scan("steps").filter(
            pl.col("episode_id").is_in(episode_ids) & pl.col("policy_version").is_not_null()
        )
        of_step = collected(steps.select(*_KEYS, of_step="policy_version"))
        rows = rows.join(of_step, on=_KEYS, how="left", maintain_order="left")
        rows = rows.with_columns(version=pl.coalesce("version", "of_step"))
    episodes = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(episode_ids))
    of_episode = collected(episodes.select("episode_id", "run_id", of_episode="policy_version"))
    rows = rows.join(of_episode, on="episode_id", how="left", maintain_order="left")
    version = pl.coalesce("version", "of_episode")
    newest = pl.max_horizontal("newest", version).max().over("run_id")
    return rows.select(staleness=newest - version)["staleness"].cast(pl.Int64)
