"""What the stored data cannot support, found before anything is trained.

A ratio loss compares the policy with the distribution that the stored tokens were sampled from. Where that distribution
is not known exactly, the ratio is wrong without looking wrong. A loss of whole units takes one advantage for each, a
loss on preferences takes pairs or both labels. Each refusal says how many steps it concerns, names one, and offers the
alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.formats.chat.chat_completions import LOGPROBS_LEFT_OUT
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.data.select.portions import only
from trainer.losses import Loss, Unit


class Drop(StrEnum):
    """Why a step carries no loss, in order of precedence."""

    NO_TOKENS = "no_tokens"
    """It has no token row in the encoding that is trained on."""
    DEAD_GROUP = "dead_group"
    """All its siblings scored the same (or it has none), so its group says nothing; left out by --live-only."""
    NO_ADVANTAGE = "no_advantage"
    """The credit job gave it no advantage: unscored, excluded, or not covered."""
    INACTIVE = "inactive"
    """Padding after the end of the episode."""
    COPIED_CONTEXT = "copied_context"
    """Repeated from an earlier episode, where it was trained."""
    FILTERED = "filtered"
    """The selection of --selection dropped this step out of an episode that it kept."""
    NOT_TRAINABLE = "not_trainable"
    """Another policy took this decision."""
    STALE = "stale"
    """It was sampled more than `max_staleness` policy versions before the newest one; `unknown_staleness` says what
    becomes of steps of unknown version."""
    NO_ACTION_TOKENS = "no_action_tokens"
    """No token of the action was sampled by the policy."""
    NO_CONTEXT = "no_context"
    """Its action opens a sequence, so nothing predicts its first token."""
    OVER_LENGTH = "over_length"
    """It ends after --max-length tokens of its sequence."""
    UNPAIRED = "unpaired"
    """It, or its episode, is in no pair; the rows `preferences` of --plan say what each condition left."""
    UNLABELLED = "unlabelled"
    """Its episode came out neither well nor badly, or nobody knows how."""


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
    """What speaks against training a loss on a selection's trained steps, by reason; nothing for likelihood losses."""
    trained = only(members, pl.col("trained"))
    if trained.is_empty():
        return []
    return [*_distribution(snapshot, trained, loss), *_advantages(trained, loss), *_preferences(trained, loss)]


def assumptions(members: pl.DataFrame, loss: Loss) -> list[str]:
    """What a ratio takes on trust, as sentences for the user."""
    trained = only(members, pl.col("trained"))
    silent = trained.filter(pl.col("top_p").is_null() | pl.col("top_k").is_null()).height
    if not loss.needs.behaviour_logprobs or not silent:
        return []
    return [
        f"{silent} of {trained.height} steps do not say whether top_p or top_k cut the distribution they were sampled "
        f"from; taken as whole. Engines have defaults of their own (vLLM: generation_config.json): record what was used"
    ]


def refuse_step_advantages(credit: pl.DataFrame, source: str) -> None:
    """Refuse (DataRefusedError) credit of which no step has a step advantage A_S.

    Every step would be dropped, and nobody would know why.
    """
    if credit.is_empty() or credit["a_step"].null_count() < credit.height:
        return
    example = credit.select("episode_id", "step_index").sort("episode_id", "step_index").row(0)
    raise DataRefusedError(
        f"this loss weighs by the step advantage A_S, and {credit.height} of {credit.height} steps of {source} have "
        f"none (for example {_row(example)}); compute them with `trajlake credit gigpo`, choose such a job with "
        f"--advantages, or train with --loss awr, which takes any advantage"
    )


def refuse_text(episodes: pl.DataFrame, loss: Loss) -> Refusal:
    """The refusal of episodes that hold text only, before they are rendered in vain."""
    steps = int(episodes["num_steps"].sum())
    message = _message(loss, _CHECKS[0], f"{steps} of {steps}", (episodes["episode_id"][0], 0))
    return Refusal(_CHECKS[0].reason, message, steps)


def refuse(refusals: Sequence[Refusal]) -> None:
    """Raise a DataRefusedError with the message of each refusal, if there is any."""
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
        "wrong_logprobs",
        pl.col("is_wrong").fill_null(value=False),
        f"have no behaviour log-probabilities, because their engine told some that are none (steps.extra: "
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
"""Reason code, which steps, what is wrong with them, what to do instead."""
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
"""Columns that name a unit."""


def _distribution(snapshot: Snapshot, trained: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Steps whose sampling distribution is not known exactly, where a ratio is taken to it."""
    if not loss.needs.behaviour_logprobs:
        return []
    if trained["provenance"].eq("rendered").any():
        # Rendered rows lack everything else too; one reason says it all.
        return _found(trained, loss, _CHECKS[:1])
    known = trained.join(_constrained(snapshot, trained), on=_ROW, how="left")
    return _found(known.join(_wrong(snapshot, trained), on=_ROW, how="left"), loss, _CHECKS)


def _advantages(trained: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Units whose steps have different advantages, where one ratio stands for the unit and nobody said that it may."""
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
    row = _row((example["episode_id"], example["step_index"]))
    message = (
        f"{loss.name} refused: {bad.height} of {units.height} {unit}s hold steps with different advantages, and one "
        f"ratio for the whole {unit} cannot tell them apart (for example {row}: from {example['low']:.4g} to "
        f"{example['high']:.4g}); set loss.unit to turn, inside which they cannot differ, set loss.unit to {unit} to "
        f"insist, or train on an episode-level estimator (`trajlake credit grpo`)"
    )
    return [Refusal("advantages_vary", message, int(bad["steps"].sum()))]


def _preferences(trained: pl.DataFrame, loss: Loss) -> list[Refusal]:
    """Nothing is preferred to anything."""
    example = trained.select("episode_id", "step_index").row(0)
    count = f"{trained.height} of {trained.height}"
    if loss.needs.labels and ("sign" not in trained.columns or trained["sign"].drop_nulls().n_unique() < 2):
        return [Refusal(_ONE_LABEL.reason, _message(loss, _ONE_LABEL, count, example), trained.height)]
    return []


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
    return f"{loss.name} refused: {count} steps {check.fault} (for example {_row(example)}); {check.instead}"


def _row(example: tuple[int, int]) -> str:
    return f"episode_id={ids.to_text(example[0])}, step_index={example[1]}"


def _wrong(snapshot: Snapshot, trained: pl.DataFrame) -> pl.DataFrame:
    """episode_id, step_index, is_wrong: steps whose engine told log-probabilities that are none."""
    bare = trained.filter(~pl.col("has_logprobs")).select(_ROW)
    if bare.is_empty():
        return bare.with_columns(is_wrong=pl.lit(value=True))
    said = pl.col("extra").str.contains(f'"{LOGPROBS_LEFT_OUT}":', literal=True)
    rows = snapshot.scan("steps").filter(said).select(*_ROW, is_wrong=pl.lit(value=True))
    return collected(rows).join(bare, on=_ROW, how="semi").unique(_ROW)


def _constrained(snapshot: Snapshot, trained: pl.DataFrame) -> pl.DataFrame:
    """episode_id, step_index, constrained: steps with a token that a grammar restricted."""
    rows = snapshot.scan("tokens").filter(
        (pl.col("encoding_id") == trained["encoding_id"][0]) & pl.col("constrained").list.any().fill_null(value=False)
    )
    keys = ("episode_id", "step_index")
    return collected(rows.select(*keys, constrained=pl.lit(value=True)).unique(keys))
