"""What training writes into tables and its readers interpret: metric names, names of online runs, limits on ratios.

An online run (`trajlake loop`) has a job of kind `LOOP`, whose parameter `train_job` names its training job. Its
rollouts have the run's name and one collection round per round. Its evaluations are a separate run.

In the formulas of ratio limits, r is the policy's probability of a token divided by the probability under the policy it
is compared with; rho is the same ratio in the off-policy correction. The functions accept any type with operators
(tensors, arrays, Polars expressions), all of one shape. Bounds come from the loss's options, as a training job stores
them in its parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

STALENESS_BUCKETS: tuple[tuple[str, float, float], ...] = (
    ("staleness_0", 0, 0),
    ("staleness_1", 1, 1),
    ("staleness_2_4", 2, 4),
    ("staleness_5_16", 5, 16),
    ("staleness_17_up", 17, float("inf")),
)
"""Name, first and last staleness (in policy versions) of each bucket."""
METRICS = {
    "loss": "The loss of the optimizer step, averaged as the configuration says (aggregation, unit).",
    "logprob": "Mean log-probability of the trained tokens, in nats.",
    "entropy": "Mean entropy of the next-token distribution at the trained tokens, in nats; low: a collapsed policy.",
    "value_loss": "Value head: mean squared error of the values of the trained steps, before its coefficient.",
    "value_target": "Value head: mean target, the lambda-return of the credit.",
    "explained_variance": "Value head: 1 - Var(target - value) / Var(target) over the trained steps; 1: values are "
    "exact, 0: no better than a constant. The first update of a round shows the values that its advantages come from.",
    "advantage": "Mean advantage over the trained tokens, as the loss got it.",
    "reward": "Mean score of the optimizer step's episodes with a known score: the score that advantages come "
    "from (`[loop.credit] score`, `trajlake credit --score`); without advantages `episodes.env_return`.",
    "env_return": "Mean `episodes.env_return` of those episodes, if the advantages come from another score.",
    "episode_logprob": "Mean over the optimizer step's episodes of the sum of their trained tokens' log-probabilities.",
    "episode_advantage": "Mean over the optimizer step's episodes of the mean advantage of their trained steps.",
    "episode_turns": "Mean number of turns (`episodes.num_steps`) of the optimizer step's episodes.",
    "grad_norm": "Norm of the gradient before clipping; NULL for a skipped update.",
    "loss_scale": "dtype float16: factor of the update's loss before its backward pass.",
    "skipped_updates": "dtype float16: 1 for an update that was skipped because its gradient was not finite; else 0.",
    "learning_rate": "Learning rate of the update.",
    "action_tokens": "Trained tokens.",
    "tokens": "Tokens of all sequences, context included.",
    "micro_batches": "Forward and backward passes.",
    "seconds": "Wall time of the update, including the wait for data.",
    "tokens_per_second": "Tokens of the update per second, context included.",
    "mfu": "Share of the device's peak arithmetic, see trainer.monitor.",
    "validation_nll": "Mean negative log-likelihood of the held-out episodes' action tokens, in nats.",
    "alarms": "Active alarms.",
    "weight": "awr, bc_exp: mean weight min(exp(A / beta), w_max).",
    "weight_clipped": "awr, bc_exp: share of tokens whose weight is at the limit.",
    "weight_ess": "awr, bc_exp: effective sample size of the weights, as a share of the tokens.",
    "ratio": "ratio losses: mean ratio pi_theta / behaviour per token, before any limit (as the five below).",
    "ratio_ess": "ratio losses: effective sample size of the ratios, as a share of the tokens.",
    "log_ratio_abs": "ratio losses: mean |log ratio|.",
    "kl_k3": "ratio losses: estimate of KL(behaviour || pi_theta) per token, ratio - 1 - log ratio.",
    "outside_half_two": "ratio losses: share of tokens whose ratio is outside [0.5, 2].",
    "logprobs_missing": "ratio losses: share of tokens whose stored log-probability is not finite; their ratio is 1.",
    **{
        metric: text
        for bucket, first, last in STALENESS_BUCKETS
        for upper in ["" if first == last else " or more" if math.isinf(last) else f" to {last:g}"]
        for metric, text in (
            (bucket, f"ratio losses: share of tokens {first:g}{upper} policy versions old."),
            (f"log_ratio_abs_{bucket}", f"ratio losses: mean |log ratio| of the tokens of {bucket}."),
        )
    },
    "clipped_high": "ratio losses: share of tokens clipped above (cispo: whose weight is; else positive advantage).",
    "clipped_low": "ratio losses: share of tokens clipped below (cispo: whose weight is; else negative advantage).",
    "clipped_dual": "ppo and its variants: share of tokens bounded by the dual clip.",
    "unit_ratio": "gspo: mean ratio of the token's unit, the geometric mean over its tokens.",
    "unit_ratio_ess": "gspo: effective sample size of those, as a share of the tokens.",
    "log_ratio_abs_proximal": "With decoupled: mean |log(pi_theta / proximal)|; 0 at its first update.",
    "correction_weight": "Mean weight of the off-policy correction, 0 where masked.",
    "correction_weight_ess": "Effective sample size of those weights, as a share of the tokens.",
    "correction_limited": "Share of tokens whose correction weight is truncated.",
    "correction_masked": "Share of tokens that the correction masks.",
    "kl_reference": "With a reference penalty: KL(policy || reference) per token, estimate k3, at most 10 per token.",
    "log_ratio_reference": "dpo, dmpo, kto: mean log(policy / reference) per token.",
    "pull": "dro: mean of beta/2 (lp - lp_b)^2.",
    "pairs": "dpo, dmpo: pairs of the optimizer step.",
    "margin": "dpo, dmpo: mean over pairs of beta (S_chosen - S_rejected).",
    "accuracy": "dpo, dmpo: share of pairs whose chosen side scores higher.",
    "desirable": "kto: desirable units of the optimizer step.",
    "undesirable": "kto: undesirable units of the optimizer step.",
    "reward_chosen": "dpo, dmpo, kto: mean beta S of the chosen or desirable units.",
    "reward_rejected": "dpo, dmpo, kto: mean beta S of the rejected or undesirable units.",
}
"""Every metric that a training step can write, with its meaning."""
ROUND_METRICS = {
    "loop/round": "The round, for `metrics.jsonl` and loggers, whose steps are updates.",
    "loop/episodes": "Rollouts that ended in the round.",
    "loop/carried": "Rollouts among them that an earlier round started.",
    "loop/failed": "Rollouts among them that failed.",
    "loop/left_out": "Rollouts that did not finish, or that a filter dropped (`selections` has the reason).",
    "loop/trained": "Rollouts that the round's updates consumed.",
    "loop/stale_steps": "Steps that `max_staleness` excluded.",
    "loop/score": "Mean score, if advantages come from another score than the return (`loop.credit.score`).",
    "loop/return": "Mean `env_return` of the rollouts with a known one.",
    "loop/tokens": "Tokens of the round, context included; budgets count them.",
    "loop/seconds": "Wall time of the round, from the push of the weights to the end of the update.",
    "loop/live_groups": "Groups whose siblings have different outcomes, and so a signal.",
    "loop/dead_groups": "Groups whose siblings have equal outcomes.",
    "loop/best_version": "The version with the best evaluation so far.",
    "eval/success": "Share of the held-out attempts that reach the threshold of success.",
    "eval/score": "Mean score of the held-out attempts.",
    "eval/attempts": "Held-out attempts with a score.",
    "eval/unscored": "Held-out attempts without a score; means exclude them.",
    "sync/seconds": "Longest time in which an engine loaded the weights.",
    "sync/failed": "Engines that did not load the weights.",
    "sync/logprob_diff_max": "Largest difference in nats between log-probabilities of an engine and of the trainer.",
    "sync/logprob_diff_mean": "Mean difference in nats between log-probabilities of an engine and of the trainer.",
}
"""Metrics of `trajlake loop` (one step per round) and of pushes (one step per version)."""


LOOP = "loop"
"""Kind of the job of an online run."""


def name_evaluation_run(run: str) -> str:
    """Return the name of the run of an online run's evaluations."""
    return f"{run}-eval"


def round_predicate(run: str, number: int) -> str:
    """Return a predicate over `episodes` that selects a round."""
    quoted = run.replace("'", "''")
    return f"run_id = '{quoted}' AND collection_round = {number}"


CORRECTION_LIMITS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_truncate": (None, 2.0),
    "token_mask": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_truncate": (None, 5.0),
    "sequence_mask": (None, 3.0),
    "geometric_mask": (0.999, 1.001),
}
"""Default low and high bound of each correction method; None if the method has no such bound."""


def is_clipped_above(ratio: Any, advantages: Any, clip_high: float) -> Any:
    """Return where the clip stops the gradient that would make a good token likelier: A > 0 and r > 1 + clip_high."""
    return (advantages > 0) & (ratio > 1 + clip_high)


def is_clipped_below(ratio: Any, advantages: Any, clip_low: float) -> Any:
    """Return where the clip stops the gradient that would make a bad token rarer: A < 0 and r < 1 - clip_low."""
    return (advantages < 0) & (ratio < 1 - clip_low)


def is_clipped_dual(ratio: Any, advantages: Any, dual_clip: float) -> Any:
    """Return where the dual clip stops the gradient of a bad, much likelier token: A < 0 and r > dual_clip."""
    return (advantages < 0) & (ratio > dual_clip)


def is_outside(ratio: Any, low: float, high: float) -> Any:
    """Return where the ratio is outside [low, high], so that a mask drops the token."""
    return (ratio < low) | (ratio > high)


def get_correction_bounds(method: str, low: float | None, high: float | None) -> tuple[float, float]:
    """Return low and high of a method: the given bounds, or its defaults; 0 and infinity where it has no bound."""
    default_low, default_high = CORRECTION_LIMITS[method]
    low, high = default_low if low is None else low, default_high if high is None else high
    return 0.0 if low is None else low, float("inf") if high is None else high


class ClipFlag(StrEnum):
    """What happens to a token's policy gradient; the first flag that applies counts."""

    MASKED = "masked by the correction"
    ABOVE = "clipped above"
    BELOW = "clipped below"
    DUAL = "stopped by the dual clip"
    LIMITED = "weight limited"
    """The token counts, with its weight at a limit."""
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """Limits of a loss on a token's ratio to the behaviour policy."""

    clip_low: float | None = None
    clip_high: float | None = None
    """Clip of `is_clipped_above` and `is_clipped_below`; None without a clip."""
    dual_clip: float | None = None
    weight: tuple[float, float] | None = None
    """Inside these bounds the token's weight is its ratio; outside it is the nearest bound."""
    mask: tuple[float, float] | None = None
    """Outside these bounds the token carries no loss."""
    unit: str = "token"
    """Unit whose ratio is clipped: token, turn, sequence or episode. Its ratio is the geometric mean over tokens."""

    def clip_flags(self, ratio: Any, unit_ratio: Any, advantages: Any) -> list[tuple[ClipFlag, Any]]:
        """Return the tokens of each flag, in order of precedence; all other tokens are `KEPT`.

        Args:
            ratio: ratio of each token.
            unit_ratio: ratio of the token's unit; equals `ratio` if the unit is the token.
            advantages: advantages as the loss received them.
        """
        flags = []
        if self.mask is not None:
            flags.append((ClipFlag.MASKED, is_outside(ratio, *self.mask)))
        if self.clip_high is not None:
            flags.append((ClipFlag.ABOVE, is_clipped_above(unit_ratio, advantages, self.clip_high)))
        if self.clip_low is not None:
            flags.append((ClipFlag.BELOW, is_clipped_below(unit_ratio, advantages, self.clip_low)))
        if self.dual_clip is not None:
            flags.append((ClipFlag.DUAL, is_clipped_dual(unit_ratio, advantages, self.dual_clip)))
        if self.weight is not None:
            flags.append((ClipFlag.LIMITED, is_outside(ratio, *self.weight)))
        return flags


def read_limits(loss: Any) -> RatioLimits | str:
    """Return a loss's limits, from the options in a job's parameters, or the reason why tokens have no own limits."""
    if not isinstance(loss, Mapping):
        return "its parameters are from a version in which losses did not own their options"
    correction = loss.get("correction") or {}
    method = correction.get("method", "none")
    if correction.get("decoupled"):
        return (
            "its ratio is to the proximal policy, the weights of some updates before, which stored no log-probabilities"
        )
    if method not in CORRECTION_LIMITS or method.startswith(("sequence", "geometric")):
        return f"its correction ({method}) applies to whole units"
    bounds = get_correction_bounds(method, correction.get("low"), correction.get("high"))
    weight = bounds if method == "token_truncate" else None
    if "max_ratio" in loss:
        weight = (float(loss["min_ratio"]), float(loss["max_ratio"]))
    return RatioLimits(
        clip_low=loss.get("clip_low"),
        clip_high=loss.get("clip_high"),
        dual_clip=loss.get("dual_clip"),
        weight=weight,
        mask=bounds if method in {"token_mask", "icepop"} else None,
        # Only this loss uses the ratio of a unit.
        unit=(loss.get("unit") or "episode") if loss.get("name") == "gspo" else "token",
    )
