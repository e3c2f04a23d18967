"""The table `ratios`: which checkpoints have scored actions, its rows, and whether they can carry importance weights.

A row holds a checkpoint's log-probabilities of an action, and their distance from what the engine recorded. The
distance is known where both are of one distribution: log-probabilities were recorded, at a temperature above 0, of the
distribution sampled from (processed, or temperature 1), without truncation and without a grammar. Elsewhere `log_ratio`
is NULL. Importance weights take more: the behaviour policy must have been able to do whatever the target does, with
probabilities of these very tokens. Nothing here needs torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot

KIND = "rescore"
STORED = "stored"
"""The behaviour policy as the engine recorded it: no checkpoint is called that."""
KEYS = ("episode_id", "step_index", "encoding_id")
"""What one series has at most one row of `ratios` for."""
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


@dataclass(frozen=True, slots=True)
class Scored:
    """A checkpoint that has scored actions."""

    series_id: int
    """Its rows in `ratios`."""
    checkpoint: str
    """Its name there."""
    code_hash: str
    """Of the code that scored."""


def names_of(snapshot: Snapshot) -> pl.DataFrame:
    """One row per series, the newest first: series_id, checkpoint, weights_sha256, spelled, paths, code_hash."""
    return snapshot.sql(_NAMES)


def find_scored(snapshot: Snapshot, text: str) -> Scored:
    """The newest series of a checkpoint.

    Args:
        text: its name in `ratios`, what `trajlake rescore` was given, its folder, or the beginning of its sha256.

    Raises:
        UsageError: no such checkpoint has scored anything, or several sets of weights are meant.
    """
    rows = names_of(snapshot)
    by_name = rows.filter(pl.col("checkpoint") == text)
    place = str(Path(text).resolve())
    is_hash = len(text) >= _SHORTEST_HASH
    found = (
        by_name
        if by_name.height
        else rows.filter(
            pl.col("spelled").list.contains(text)
            | pl.col("paths").list.contains(place)
            | (pl.col("weights_sha256").str.starts_with(text.lower()) & is_hash)
        )
    )
    weights = found.unique("weights_sha256", keep="first", maintain_order=True)
    if weights.height != 1:
        names = ", ".join((weights if weights.height else rows)["checkpoint"].unique(maintain_order=True))
        fault = "means several checkpoints" if weights.height else "has scored nothing"
        advice = f"name one of: {names}" if names else "there is none"
        raise UsageError(f"checkpoint {text!r} {fault}; {advice}. Score with one: `trajlake rescore CHECKPOINT`")
    row = found.row(0, named=True)
    return Scored(row["series_id"], row["checkpoint"], row["code_hash"])


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
    """Scored actions (of `scoring.score`) as rows of `ratios`, without the columns that a job fills in."""
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
            # A logit of minus infinity leaves none.
            entropies=pl.when(pl.col("entropies").list.eval(pl.element().is_finite()).list.all()).then("entropies"),
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
_INSTEAD = "an off-policy estimate would not mean anything; play the target policy and count: `trajlake eval`"


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
    """How stored actions were sampled: per step and encoding its keys, encoding_id, sampling columns, constrained.

    Steps among `scored` (episode_id, step_index, encoding_id) have the encodings named there, others the engine's.
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
    """Refuse actions (`token_facts`) that no importance weight can be taken of.

    Args:
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
