"""Whether stored actions can carry importance weights at all.

The behaviour policy must have been able to do whatever the target does, with probabilities of these very tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.reading import collected
from lake.snapshot import Snapshot
from trainer.evaluation.ratio_rows import processed, untruncated

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
        snapshot: the data.
        episode_ids: whose.
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
            msg = (
                f"refused: {bad.height} of {sampled.height} actions {fault.message} (for example "
                f"episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}); {_INSTEAD}"
            )
            raise DataRefusedError(msg)
