"""Votes of agents in coordination spans, and who won."""

from typing import Literal

import polars as pl

VOTE_SPANS = ("step_index", "kind", "started_at", "attributes")
"""Columns of `spans` that `votes` reads."""
Winner = Literal["plurality", "extra"]


def votes(spans: pl.DataFrame) -> pl.DataFrame:
    """Votes: episode_id, step_index, voter, voted_for, is_final (the voter's last one). O(spans).

    Read from coordination spans with `action_type` `vote`; voter and voted_for (or agent_id and for_agent_id) are in
    `action_data`. Order: `coordination_round`, then the start.
    """
    attribute = pl.col("attributes").str.json_path_match
    voter = pl.coalesce(attribute("$.action_data.voter"), attribute("$.action_data.agent_id"))
    voted_for = pl.coalesce(attribute("$.action_data.voted_for"), attribute("$.action_data.for_agent_id"))
    return (
        spans.filter((pl.col("kind") == "coordination") & (attribute("$.action_type") == "vote"))
        .select(
            "episode_id",
            "step_index",
            "started_at",
            voter=voter,
            voted_for=voted_for,
            round=attribute("$.coordination_round").cast(pl.Float64, strict=False),
        )
        .sort("episode_id", "round", "started_at", maintain_order=True, nulls_last=False)
        .with_columns(
            is_final=pl.col("voter").is_null() | (pl.int_range(pl.len()) == pl.len() - 1).over("episode_id", "voter")
        )
        .select("episode_id", "step_index", "voter", "voted_for", "is_final")
    )


def winners(cast: pl.DataFrame, episodes: pl.DataFrame, winner: Winner, path: str) -> pl.DataFrame:
    """episode_id, winner, votes (final ones) and leading (votes of the winner), in the order of the episodes.

    Args:
        cast: from `votes`.
        episodes: episode_id, and extra if the winner is written there.
        winner: who has more final votes than anyone else (nobody, if tied), or what `extra` says.
        path: JSONPath in `extra`.
    """
    final = cast.filter(pl.col("is_final") & pl.col("voted_for").is_not_null())
    counts = final.group_by("episode_id", "voted_for").agg(n=pl.len())
    most = pl.col("n").max()
    summary = counts.group_by("episode_id").agg(
        winner=pl.when((pl.col("n") == most).sum() == 1).then(pl.col("voted_for").get(pl.col("n").arg_max())),
        votes=pl.col("n").sum(),
        leading=most,
    )
    found = episodes.join(summary, on="episode_id", how="left", maintain_order="left")
    if winner == "extra":
        found = found.with_columns(winner=pl.col("extra").str.json_path_match(path))
    return found.select("episode_id", "winner", pl.col("votes").fill_null(0), pl.col("leading").fill_null(0))
