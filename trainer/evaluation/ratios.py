"""The table `ratios`: its checkpoints, its rows, and the check whether actions support importance weights.

A row holds a checkpoint's log-probabilities of an action, and their distance from the recorded ones. The distance is
known if both belong to the same distribution. That requires recorded log-probabilities of the distribution sampled from
(processed, or temperature 1), a temperature above 0, no truncation and no grammar. Elsewhere `log_ratio` is NULL.
Importance weights require more: the behaviour policy must give a probability above 0 to everything that the target
does, and the log-probabilities must be those of exactly these tokens. This module does not load torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot

KIND = "rescore"
STORED = "stored"
"""Name of the behaviour policy as the engine recorded it; no checkpoint may have it."""
KEYS = ("episode_id", "step_index", "encoding_id")
"""Key of a row of `ratios` within a series."""
_SHORTEST_HASH = 6
_NAMES = """
SELECT
    j.series_id,
    any_value(j.parameters->>'$.checkpoint') AS checkpoint,
    any_value(j.parameters->>'$.weights_sha256') AS weights_sha256,
    list(DISTINCT j.parameters->>'$.spelled') AS spelled,
    list(DISTINCT j.parameters->>'$.path') AS paths,
    any_value(j.code_hash) AS code_hash,
    max(j.sequence) AS sequence
FROM jobs AS j
WHERE j.kind = 'rescore' AND j.event = 'succeeded'
GROUP BY j.series_id
ORDER BY sequence DESC
"""
_RECORDED = ("action_logprobs", "action_mask", "constrained", "has_logprobs")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logprobs_mode")
_TRUNCATED = ((pl.col("top_p") < 1) | (pl.col("top_k") > 0) | (pl.col("min_p") > 0)).fill_null(value=False)
"""By `tokens`: the distribution was truncated. NULL limits mean no limit, as in the losses."""
_PROCESSED = ((pl.col("temperature") == 1) | (pl.col("logprobs_mode") == "processed")).fill_null(value=False)
"""By `tokens`: the recorded log-probabilities are those of the distribution sampled from."""
_STEP_KEYS = ("episode_id", "step_index")
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
_ALTERNATIVE = "an off-policy estimate would not mean anything; play the target policy and count: `trajlake eval`"


class _SupportFault(NamedTuple):
    test: pl.Expr
    message: str
    needs_stored: bool = False
    """The test applies only if the recorded log-probabilities are used."""


_FAULTS = (
    _SupportFault(pl.col("provenance") == "rendered", "hold tokens rendered from text: no policy sampled these ids"),
    _SupportFault(pl.col("temperature") <= 0, "were decoded greedily: every other action had probability 0"),
    _SupportFault(pl.col("temperature").is_null(), "do not say at which temperature they were sampled"),
    _SupportFault(_TRUNCATED, "were sampled from a truncated distribution (top_p, top_k or min_p)"),
    _SupportFault(pl.col("constrained"), "hold tokens sampled under a grammar"),
    _SupportFault(~pl.col("has_logprobs"), "have no recorded log-probabilities", needs_stored=True),
    _SupportFault(~_PROCESSED, "have log-probabilities of another distribution than was sampled", needs_stored=True),
)


@dataclass(frozen=True, slots=True)
class RescoredCheckpoint:
    """A checkpoint with rows in `ratios`."""

    series_id: int
    """Series of its rows in `ratios`."""
    checkpoint: str
    """Name of the checkpoint in `ratios`."""
    code_hash: str
    """Hash of the code that scored."""


def read_series(snapshot: Snapshot) -> pl.DataFrame:
    """Return one row per series, the newest first: series_id, checkpoint, weights_sha256, spelled, paths, code_hash."""
    return snapshot.sql(_NAMES)


def find_rescored(snapshot: Snapshot, text: str) -> RescoredCheckpoint:
    """Find the newest series of a checkpoint.

    Args:
        text: its name in `ratios`, the argument of `trajlake rescore`, its folder, or a prefix of its sha256.

    Raises:
        UsageError: no such checkpoint has rescored anything, or several sets of weights match.
    """
    rows = read_series(snapshot)
    by_name = rows.filter(pl.col("checkpoint") == text)
    path = str(Path(text).resolve())
    is_hash = len(text) >= _SHORTEST_HASH
    series = (
        by_name
        if by_name.height
        else rows.filter(
            pl.col("spelled").list.contains(text)
            | pl.col("paths").list.contains(path)
            | (pl.col("weights_sha256").str.starts_with(text.lower()) & is_hash)
        )
    )
    weights = series.unique("weights_sha256", keep="first", maintain_order=True)
    if weights.height != 1:
        names = ", ".join((weights if weights.height else rows)["checkpoint"].unique(maintain_order=True))
        fault = "means several checkpoints" if weights.height else "has scored nothing"
        advice = f"name one of: {names}" if names else "no checkpoint is in `ratios`"
        raise UsageError(f"checkpoint {text!r} {fault}; {advice}. Score with one: `trajlake rescore CHECKPOINT`")
    row = series.row(0, named=True)
    return RescoredCheckpoint(row["series_id"], row["checkpoint"], row["code_hash"])


def build_ratio_rows(
    snapshot: Snapshot, scored: pl.DataFrame, checkpoint: str, policy_version: int | None
) -> pl.DataFrame:
    """Build rows of `ratios` from scored actions (`score_actions`), without the columns that a job fills in."""
    is_scored = pl.col("episode_id").is_in(scored["episode_id"].unique().implode())
    tokens = snapshot.scan("tokens").filter(
        is_scored, pl.col("encoding_id").is_in(scored["encoding_id"].unique().implode())
    )
    recorded = collect_rows(tokens.select(*KEYS, *_RECORDED, *_SAMPLING).unique(KEYS))
    recorded = recorded.filter(
        "has_logprobs",
        pl.col("temperature") > 0,
        ~_TRUNCATED,
        _PROCESSED,
        ~pl.col("constrained").list.any().fill_null(value=False),
    )
    pairs = scored.select(*KEYS, "logprobs").join(recorded.select(*KEYS, "action_logprobs", "action_mask"), on=KEYS)
    ratios = (
        pairs.explode("logprobs", "action_logprobs", "action_mask")
        .filter("action_mask")
        .group_by(KEYS)
        .agg(log_ratio=(pl.col("logprobs").cast(pl.Float64) - pl.col("action_logprobs")).sum())
    )
    groups = collect_rows(snapshot.scan("episodes").filter(is_scored).select("episode_id", "group_id", "run_id"))
    return (
        scored.join(ratios, on=KEYS, how="left", maintain_order="left")
        .join(groups, on="episode_id", maintain_order="left")
        .with_columns(
            pl.col("log_ratio").fill_nan(None),
            # The entropy is not finite if a logit is minus infinity.
            entropies=pl.when(pl.col("entropies").list.eval(pl.element().is_finite()).list.all()).then("entropies"),
            checkpoint=pl.lit(checkpoint),
            policy_version=pl.lit(policy_version, pl.Int64),
        )
    )


def read_sampling(snapshot: Snapshot, episode_ids: pl.Series, scored: pl.DataFrame) -> pl.DataFrame:
    """Return how stored actions were sampled: the keys, encoding_id, sampling columns and `constrained`.

    One row per step and encoding. Steps in `scored` (episode_id, step_index, encoding_id) have the encodings of that
    frame, and other steps have the engine's.
    """
    rows = snapshot.scan("tokens").filter(pl.col("episode_id").is_in(episode_ids.implode()))
    constrained = pl.col("constrained").list.any().fill_null(value=False)
    sampling = collect_rows(
        rows.select(*_STEP_KEYS, "encoding_id", *_COLUMNS, constrained=constrained).unique([*_STEP_KEYS, "encoding_id"])
    )
    in_scored = sampling.join(scored, on=[*_STEP_KEYS, "encoding_id"], how="semi")
    by_engine = sampling.filter(pl.col("provenance") == "engine").join(in_scored, on=_STEP_KEYS, how="anti")
    return pl.concat([in_scored, by_engine])


def check_support(decided: pl.DataFrame, *, stored: bool) -> None:
    """Refuse actions (rows of `read_sampling`) without valid importance weights.

    Args:
        stored: whether the recorded log-probabilities are used.

    Raises:
        DataRefusedError: some actions fail a test; the message has counts, an example row and the alternative.
    """
    sampled = decided.filter(pl.col("n_trained") > 0)
    for fault in _FAULTS:
        if fault.needs_stored and not stored:
            continue
        bad = sampled.filter(fault.test)
        if bad.height:
            row = bad.sort(_STEP_KEYS).row(0, named=True)
            raise DataRefusedError(
                f"refused: {bad.height} of {sampled.height} actions {fault.message} (for example "
                f"episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}); {_ALTERNATIVE}"
            )
