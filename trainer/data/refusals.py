"""Refusals: what the stored data cannot support, found before anything is trained.

A ratio loss compares the policy with the distribution from which the stored tokens were sampled. If that distribution
is not known exactly, the ratio is wrong without looking wrong. A loss on whole units takes one advantage for each unit.
A loss on preferences takes pairs or both labels. Each refusal counts the steps concerned, names one, and offers an
alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.formats.chat.completions import LOGPROBS_LEFT_OUT
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from trainer.data.token_rows import filter_rows
from trainer.losses import Loss, Unit


class Drop(StrEnum):
    """Why a step carries no loss, in order of precedence."""

    NO_TOKENS = "no_tokens"
    """It has no token row in the encoding that is trained."""
    DEAD_GROUP = "dead_group"
    """All its siblings have the same score (or it has none), so its group has no signal; dropped by `live_only`."""
    NO_ADVANTAGE = "no_advantage"
    """The credit job gave it no advantage: unscored, excluded, or not covered."""
    INACTIVE = "inactive"
    """Padding after the end of the episode."""
    COPIED_CONTEXT = "copied_context"
    """Repeated from an earlier episode, where it was trained."""
    FILTERED = "filtered"
    """The `selection` dropped this step but kept its episode."""
    NOT_TRAINABLE = "not_trainable"
    """Another policy took this decision."""
    STALE = "stale"
    """It was sampled more than `max_staleness` policy versions before the newest one. `unknown_staleness` decides about
    steps of unknown version."""
    NO_ACTION_TOKENS = "no_action_tokens"
    """No token of the action was sampled by the policy."""
    NO_CONTEXT = "no_context"
    """Its action opens a sequence, so nothing predicts its first token."""
    OVER_LENGTH = "over_length"
    """It ends after `max_length` tokens of its sequence."""
    UNPAIRED = "unpaired"
    """It, or its episode, is in no pair; the rows `preferences` of --plan count what each condition left."""
    UNLABELLED = "unlabelled"
    """The outcome of its episode is neutral or unknown."""


_ALTERNATIVE = "train with --loss awr or --loss sft, which need no log-probabilities"
_RECORD = "record the engine's token ids and log-probabilities while collecting"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a loss cannot be trained on some steps."""

    reason: str
    message: str
    """Fault, counts, an example row and the alternative."""
    steps: int


def find_refusals(snapshot: Snapshot, members: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Return the reasons against training a loss on a selection's trained steps; nothing for likelihood losses."""
    trained = filter_rows(members, pl.col("trained"))
    if trained.is_empty():
        return []
    return [
        *_check_distribution(snapshot, trained, loss),
        *_check_advantages(trained, loss),
        *_check_labels(trained, loss),
    ]


def list_assumptions(members: pl.DataFrame, loss: Loss) -> list[str]:
    """List the assumptions of a ratio that the data cannot confirm, as sentences for the user."""
    trained = filter_rows(members, pl.col("trained"))
    silent = trained.filter(pl.col("top_p").is_null() | pl.col("top_k").is_null()).height
    if not loss.needs.behaviour_logprobs or not silent:
        return []
    return [
        f"{silent} of {trained.height} steps do not record top_p or top_k; training assumes that their sampling "
        f"distribution was not truncated. Engines have defaults (vLLM: generation_config.json): record these settings"
    ]


def refuse_step_advantages(credit: pl.DataFrame, source: str) -> None:
    """Refuse credit without any step advantage A_S, because every step would be dropped without explanation.

    Raises:
        DataRefusedError: no step has one.
    """
    if credit.is_empty() or credit["a_step"].null_count() < credit.height:
        return
    example = credit.select("episode_id", "step_index").sort("episode_id", "step_index").row(0)
    raise DataRefusedError(
        f"this loss weighs by the step advantage A_S, and {credit.height} of {credit.height} steps of {source} have "
        f"none (for example {_format_row(*example)}); compute them with `trajlake credit gigpo`, choose such a job "
        f"with --set advantages=JOB, or train with --loss awr, which takes any advantage"
    )


def build_text_refusal(episodes: pl.DataFrame, loss: Loss) -> Refusal:
    """Build the refusal of text-only episodes, before they are rendered in vain."""
    steps = int(episodes["num_steps"].sum())
    message = _format_message(loss, _CHECKS[0], f"{steps} of {steps}", (episodes["episode_id"][0], 0))
    return Refusal(_CHECKS[0].reason, message, steps)


def refuse(refusals: Sequence[Refusal]) -> None:
    """Raise a DataRefusedError with the message of each refusal, if there is any."""
    if refusals:
        raise DataRefusedError("; ".join(refusal.message for refusal in refusals))


class _Check(NamedTuple):
    reason: str
    test: pl.Expr
    fault: str
    alternative: str


_CHECKS = (
    _Check(
        "rendered",
        pl.col("provenance") == "rendered",
        "hold text only, or tokens rendered from it afterwards: no policy is known to have sampled these ids with "
        "known probabilities, so there is no ratio to take",
        f"{_ALTERNATIVE}, or {_RECORD}",
    ),
    _Check(
        "wrong_logprobs",
        pl.col("is_wrong").fill_null(value=False),
        f"have no behaviour log-probabilities, because their engine reported invalid ones (steps.extra: "
        f"{LOGPROBS_LEFT_OUT})",
        f"{_ALTERNATIVE}, or collect from an engine whose log-probabilities are at most 0",
    ),
    _Check(
        "no_logprobs",
        ~pl.col("has_logprobs") & ~pl.col("is_wrong").fill_null(value=False),
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
"""Reason code, affected steps, fault, and alternative."""
_ONE_LABEL = _Check(
    "one_label",
    pl.lit(value=True),
    "are all desirable or all undesirable, or not labelled",
    "select good and bad episodes, or train with --loss sft on the good ones",
)


_ROW = ["episode_id", "step_index"]
_KEYS = {
    Unit.TURN: _ROW,
    Unit.SEQUENCE: ["episode_id", "sequence"],
    Unit.EPISODE: ["episode_id"],
}
"""Columns that identify a unit."""


def _check_distribution(snapshot: Snapshot, trained: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Find steps whose sampling distribution is not known exactly, if the loss takes a ratio to it."""
    if not loss.needs.behaviour_logprobs:
        return []
    if trained["provenance"].eq("rendered").any():
        # Rendered rows fail the other checks too; one reason is enough.
        return _apply_checks(trained, loss, _CHECKS[:1])
    in_encoding = pl.col("encoding_id") == trained["encoding_id"][0]
    under_grammar = snapshot.scan("tokens").filter(
        in_encoding & pl.col("constrained").list.any().fill_null(value=False)
    )
    constrained = collect_rows(under_grammar.select(*_ROW, constrained=pl.lit(value=True)).unique(_ROW))
    wrong = _find_wrong_logprobs(snapshot, trained)
    flagged = trained.join(constrained, on=_ROW, how="left").join(wrong, on=_ROW, how="left")
    return _apply_checks(flagged, loss, _CHECKS)


def _check_advantages(trained: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Find units whose steps have different advantages, if the loss takes one ratio per unit by default."""
    if not loss.needs.unit_advantages or loss.needs.unit not in _KEYS:
        return []
    keys, advantage = _KEYS[loss.needs.unit], pl.col("advantage")
    units = trained.group_by(keys, maintain_order=True).agg(
        varies=advantage.min() != advantage.max(),
        steps=pl.len(),
        step_index=pl.col("step_index").first(),
        low=advantage.min(),
        high=advantage.max(),
    )
    bad = units.filter("varies")
    if bad.is_empty():
        return []
    example = bad.row(0, named=True)
    unit = loss.needs.unit
    row = _format_row(example["episode_id"], example["step_index"])
    message = (
        f"{loss.name} refused: {bad.height} of {units.height} {unit}s hold steps with different advantages, and one "
        f"ratio for the whole {unit} cannot tell them apart (for example {row}: from {example['low']:.4g} to "
        f"{example['high']:.4g}); set loss.unit to turn, inside which they cannot differ, set loss.unit to {unit} to "
        f"insist, or train on an episode-level estimator (`trajlake credit grpo`)"
    )
    return [Refusal("advantages_vary", message, int(bad["steps"].sum()))]


def _check_labels(trained: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Refuse data without both labels, if the loss needs labels."""
    example = trained.select("episode_id", "step_index").row(0)
    count = f"{trained.height} of {trained.height}"
    if loss.needs.labels and ("sign" not in trained.columns or trained["sign"].drop_nulls().n_unique() < 2):
        return [Refusal(_ONE_LABEL.reason, _format_message(loss, _ONE_LABEL, count, example), trained.height)]
    return []


def _apply_checks(trained: pl.DataFrame, loss: Loss, checks: Sequence[_Check]) -> list[Refusal]:
    refusals = []
    for check in checks:
        bad = trained.filter(check.test)
        if bad.is_empty():
            continue
        example = bad.select("episode_id", "step_index").row(0)
        message = _format_message(loss, check, f"{bad.height} of {trained.height}", example)
        refusals.append(Refusal(check.reason, message, bad.height))
    return refusals


def _format_message(loss: Loss, check: _Check, count: str, example: tuple[int, int]) -> str:
    return (
        f"{loss.name} refused: {count} steps {check.fault} (for example {_format_row(*example)}); {check.alternative}"
    )


def _format_row(episode_id: int, step_index: int) -> str:
    return f"episode_id={ids.to_text(episode_id)}, step_index={step_index}"


def _find_wrong_logprobs(snapshot: Snapshot, trained: pl.DataFrame) -> pl.DataFrame:
    """Return episode_id, step_index, is_wrong: steps whose engine reported invalid log-probabilities."""
    bare = trained.filter(~pl.col("has_logprobs")).select(_ROW)
    if bare.is_empty():
        return bare.with_columns(is_wrong=pl.lit(value=True))
    reports_wrong = pl.col("extra").str.contains(f'"{LOGPROBS_LEFT_OUT}":', literal=True)
    rows = snapshot.scan("steps").filter(reports_wrong).select(*_ROW, is_wrong=pl.lit(value=True))
    return collect_rows(rows).join(bare, on=_ROW, how="semi").unique(_ROW)
