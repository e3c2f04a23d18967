"""Rows of the table `ratios`: a checkpoint's log-probabilities, and their distance from what the engine recorded.

The distance is known where both are of one distribution: log-probabilities were recorded, at a temperature above 0, of
the distribution sampled from (processed, or temperature 1), without truncation and without a grammar. Elsewhere
`log_ratio` is NULL.
"""

import polars as pl

from lake.reading import collected
from lake.snapshot import Snapshot
from trainer.evaluation.scored import KEYS

_RECORDED = ("action_logprobs", "action_mask", "constrained", "has_logprobs")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logprobs_mode")


def untruncated() -> pl.Expr:
    """Nothing was cut from the distribution, by `tokens` (unknown limits count as none, as for the losses)."""
    cut = (pl.col("top_p") < 1) | (pl.col("top_k") > 0) | (pl.col("min_p") > 0)
    return ~cut.fill_null(value=False)


def processed() -> pl.Expr:
    """The recorded log-probabilities are of the distribution sampled from, by `tokens`."""
    return ((pl.col("temperature") == 1) | (pl.col("logprobs_mode") == "processed")).fill_null(value=False)


def ratio_rows(snapshot: Snapshot, scored: pl.DataFrame, checkpoint: str, policy_version: int | None) -> pl.DataFrame:
    """Scored actions as rows of `ratios`.

    Args:
        snapshot: where tokens and episodes are read.
        scored: of `trainer.evaluation.scoring.score`.
        checkpoint: name of the checkpoint.
        policy_version: of its weights, if known.

    Returns:
        The table's columns without those that a job fills in.
    """
    here = pl.col("episode_id").is_in(scored["episode_id"].unique().implode())
    tokens = snapshot.scan("tokens").filter(here, pl.col("encoding_id").is_in(scored["encoding_id"].unique().implode()))
    recorded = collected(tokens.select(*KEYS, *_RECORDED, *_SAMPLING).unique(KEYS))
    recorded = recorded.filter(
        "has_logprobs",
        pl.col("temperature") > 0,
        untruncated(),
        processed(),
        ~pl.col("constrained").list.any().fill_null(value=False),
    )
    both = scored.select(*KEYS, "logprobs").join(recorded.select(*KEYS, "action_logprobs", "action_mask"), on=KEYS)
    ratios = (
        both.explode("logprobs", "action_logprobs", "action_mask")
        .filter("action_mask")
        .group_by(KEYS)
        .agg(log_ratio=(pl.col("logprobs").cast(pl.Float64) - pl.col("action_logprobs")).sum())
    )
    groups = collected(snapshot.scan("episodes").filter(here).select("episode_id", "group_id", "run_id"))
    return (
        scored.join(ratios, on=KEYS, how="left", maintain_order="left")
        .join(groups, on="episode_id", maintain_order="left")
        .with_columns(
            pl.col("log_ratio").fill_nan(None),
            checkpoint=pl.lit(checkpoint),
            policy_version=pl.lit(policy_version, pl.Int64),
        )
    )
