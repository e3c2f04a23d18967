"""What the stored data cannot support, found before anything is trained.

A ratio loss compares the policy with the distribution that the stored tokens were sampled from. Where that distribution
is not known exactly, the ratio is wrong without looking wrong. Each refusal says how many steps it concerns, names one,
and offers the alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.snapshot import Snapshot
from trainer.losses import Loss

_ALTERNATIVE = "train with --loss awr or --loss sft, which need no log-probabilities"
_RECORD = "record the engine's token ids and log-probabilities while collecting"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a loss cannot be trained on some steps."""

    reason: str
    """Reason code."""
    message: str
    """What is wrong, with counts, an example row and the alternative."""
    steps: int
    """Steps concerned."""


def find_refusals(snapshot: Snapshot, members: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """What speaks against training a loss on a selection's trained steps.

    Args:
        snapshot: the data.
        members: of `Selection`.
        loss: which.

    Returns:
        Refusals, one per reason; none for likelihood losses.
    """
    if not loss.needs.behaviour_logprobs:
        return []
    trained = members.filter(pl.col("trained"))
    if trained.is_empty():
        return []
    if trained["provenance"].eq("rendered").any():
        # Rendered rows lack everything else too; one reason says it all.
        return _found(trained, loss, _CHECKS[:1])
    return _found(
        trained.join(_constrained(snapshot, trained), on=["episode_id", "step_index"], how="left"), loss, _CHECKS
    )


def refuse_text(episodes: pl.DataFrame, loss: Loss) -> Refusal:
    """The refusal of episodes that hold text only, before they are rendered in vain.

    Args:
        episodes: of `select_episodes`.
        loss: a ratio loss.
    """
    steps = int(episodes["num_steps"].sum())
    message = _message(loss, _CHECKS[0], f"{steps} of {steps}", (episodes["episode_id"][0], 0))
    return Refusal(_CHECKS[0].reason, message, steps)


def refuse(refusals: Sequence[Refusal]) -> None:
    """Raise if there is any refusal.

    Raises:
        DataRefusedError: with the message of each.
    """
    if refusals:
        raise DataRefusedError("; ".join(refusal.message for refusal in refusals))


class _Check(NamedTuple):
    reason: str
    test: pl.Expr
    fault: str
    instead: str


_CHECKS = (
    _Check(
        "rendered",
        pl.col("provenance") == "rendered",
        "hold text only, or tokens rendered from it afterwards: no policy is known to have sampled these ids with "
        "known probabilities, so there is no ratio to take",
        f"{_ALTERNATIVE}, or {_RECORD}",
    ),
    _Check(
        "no_logprobs",
        ~pl.col("has_logprobs"),
        "have no behaviour log-probabilities",
        f"{_ALTERNATIVE}, or {_RECORD}",
    ),
    _Check(
        "temperature_zero",
        pl.col("temperature") <= 0,
        "were decoded greedily (temperature 0): every other action had probability 0",
        f"{_ALTERNATIVE}, or collect at temperature 1",
    ),
    _Check(
        "temperature_unknown",
        pl.col("temperature").is_null(),
        "do not say at which temperature they were sampled",
        f"{_ALTERNATIVE}, or record `temperature`",
    ),
    _Check(
        "truncated_sampling",
        (pl.col("top_p") < 1) | (pl.col("top_k") > 0) | (pl.col("min_p") > 0),
        "were sampled from a truncated distribution (top_p, top_k or min_p) whose support is not stored, so every "
        "ratio would be off by the mass that was cut",
        f"{_ALTERNATIVE}, or collect with top_p 1, top_k 0, min_p 0",
    ),
    _Check(
        "raw_logprobs",
        (pl.col("temperature") != 1) & (pl.col("logprobs_mode").fill_null("raw") != "processed"),
        "were sampled at a temperature other than 1, but their log-probabilities were taken before it, or do not say",
        f"{_ALTERNATIVE}, or record processed log-probabilities (vLLM: --logprobs-mode processed_logprobs)",
    ),
    _Check(
        "constrained",
        pl.col("constrained").fill_null(value=False),
        "hold tokens sampled under a grammar, whose log-probabilities are of the restricted choice",
        _ALTERNATIVE,
    ),
)
"""Reason code, which steps, what is wrong with them, what to do instead."""


def _found(trained: pl.DataFrame, loss: Loss, checks: Sequence[_Check]) -> list[Refusal]:
    refusals = []
    for check in checks:
        bad = trained.filter(check.test)
        if bad.is_empty():
            continue
        example = bad.select("episode_id", "step_index").row(0)
        message = _message(loss, check, f"{bad.height} of {trained.height}", example)
        refusals.append(Refusal(check.reason, message, bad.height))
    return refusals


def _message(loss: Loss, check: _Check, count: str, example: tuple[int, int]) -> str:
    row = f"episode_id={ids.to_text(example[0])}, step_index={example[1]}"
    return f"{loss.name} refused: {count} steps {check.fault} (for example {row}); {check.instead}"


def _constrained(snapshot: Snapshot, trained: pl.DataFrame) -> pl.DataFrame:
    """episode_id, step_index, constrained: steps with a token that a grammar restricted."""
    rows = snapshot.scan("tokens").filter(
        (pl.col("encoding_id") == trained["encoding_id"][0]) & pl.col("constrained").list.any().fill_null(value=False)
    )
    keys = ("episode_id", "step_index")
    return rows.select(*keys, constrained=pl.lit(value=True)).unique(keys).collect()
