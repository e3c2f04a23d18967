"""Whether stored actions can carry importance weights, and rows of the table `ratios`.

The behaviour policy must have been able to do whatever the target does, with probabilities of these very tokens. A row
of `ratios` holds a checkpoint's log-probabilities, and their distance from what the engine recorded.

The distance is known where both are of one distribution: log-probabilities were recorded, at a temperature above 0, of
the distribution sampled from (processed, or temperature 1), without truncation and without a grammar. Elsewhere
`log_ratio` is NULL.
"""

from collections.abc import Callable
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
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
        scored: of `trainer.evaluation.scoring.score`.

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


_KEYS = ("episode_id", "step_index")
_COLUMNS = (
    "provenance",
    "n_trained",
    "has_logprobs",
    "policy_version",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logprobs_mode",
)
_INSTEAD = "an off-policy estimate would not mean anything; play the target policy and count: trajlake eval"


class _Fault(NamedTuple):
    test: Callable[[], pl.Expr]
    message: str
    of_stored: bool = False
    """It matters only where the recorded log-probabilities are used."""


_FAULTS = (
    _Fault(lambda: pl.col("provenance") == "rendered", "hold tokens rendered from text: no policy sampled these ids"),
    _Fault(lambda: pl.col("temperature") <= 0, "were decoded greedily: every other action had probability 0"),
    _Fault(lambda: pl.col("temperature").is_null(), "do not say at which temperature they were sampled"),
    _Fault(lambda: ~untruncated(), "were sampled from a truncated distribution (top_p, top_k or min_p)"),
    _Fault(lambda: pl.col("constrained"), "hold tokens sampled under a grammar"),
    _Fault(lambda: ~pl.col("has_logprobs"), "have no recorded log-probabilities", of_stored=True),
    _Fault(lambda: ~processed(), "have log-probabilities of another distribution than was sampled", of_stored=True),
)


def token_facts(snapshot: Snapshot, episode_ids: pl.Series, scored: pl.DataFrame) -> pl.DataFrame:
    """What the stored actions say of how they were sampled.

    Args:
        scored: episode_id, step_index, encoding_id of scored actions: their encodings are meant, and of the other steps
            the engine's.

    Returns:
        One row per step and encoding: keys, encoding_id, sampling columns, constrained.
    """
    rows = snapshot.scan("tokens").filter(pl.col("episode_id").is_in(episode_ids.implode()))
    constrained = pl.col("constrained").list.any().fill_null(value=False)
    facts = collected(
        rows.select(*_KEYS, "encoding_id", *_COLUMNS, constrained=constrained).unique([*_KEYS, "encoding_id"])
    )
    chosen = facts.join(scored, on=[*_KEYS, "encoding_id"], how="semi")
    others = facts.filter(pl.col("provenance") == "engine").join(chosen, on=_KEYS, how="anti")
    return pl.concat([chosen, others])


def check_support(decided: pl.DataFrame, *, stored: bool) -> None:
    """Refuse actions that no importance weight can be taken of.

    Args:
        decided: `token_facts` of the policy's own actions.
        stored: the recorded log-probabilities are used.

    Raises:
        DataRefusedError: with counts, an example row and the alternative.
    """
    sampled = decided.filter(pl.col("n_trained") > 0)
    for fault in _FAULTS:
        if fault.of_stored and not stored:
            continue
        bad = sampled.filter(fault.test())
        if bad.height:
            row = bad.sort(_KEYS).row(0, named=True)
            raise DataRefusedError(
                f"refused: {bad.height} of {sampled.height} actions {fault.message} (for example "
                f"episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}); {_INSTEAD}"
            )
