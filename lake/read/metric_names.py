"""What the names in the table `metrics` mean: the trainer writes them, the viewer and the docs explain them."""

import math

STALENESS_BUCKETS: tuple[tuple[str, float, float], ...] = (
    ("staleness_0", 0, 0),
    ("staleness_1", 1, 1),
    ("staleness_2_4", 2, 4),
    ("staleness_5_16", 5, 16),
    ("staleness_17_up", 17, float("inf")),
)
"""Name, first and last number of policy versions of each bucket."""


def _versions(first: float, last: float) -> str:
    """Number of policy versions, in words."""
    if first == last:
        return f"{first:g}"
    return f"{first:g} or more" if math.isinf(last) else f"{first:g} to {last:g}"


METRICS = {
    "loss": "The loss of the optimizer step, averaged as the configuration says (aggregation, unit).",
    "logprob": "Mean log-probability of the trained tokens, in nats.",
    "entropy": "Mean entropy of the next-token distribution at the trained tokens, in nats; low: a collapsed policy.",
    "advantage": "Mean advantage over the trained tokens, as the loss got it.",
    "reward": "Mean score of the optimizer step's episodes, of those where it is known: the one that advantages come "
    "from (`[loop.credit] score`, `trajlake credit --score`); without advantages `episodes.env_return`.",
    "env_return": "Mean `episodes.env_return` of those episodes, where the advantages come from another score.",
    "episode_logprob": "Mean over the optimizer step's episodes of the sum of their trained tokens' log-probabilities.",
    "episode_advantage": "Mean over the optimizer step's episodes of the mean advantage of their trained steps.",
    "episode_turns": "Mean number of turns (`episodes.num_steps`) of the optimizer step's episodes.",
    "grad_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate of the update.",
    "action_tokens": "Trained tokens.",
    "tokens": "Tokens of all sequences, context included.",
    "micro_batches": "Forward and backward passes.",
    "seconds": "Wall time of the update, waiting for data included.",
    "tokens_per_second": "Tokens of the update per second, context included.",
    "mfu": "Share of the device's peak arithmetic, see trainer.monitor.watch.",
    "validation_nll": "Mean negative log-likelihood of the held-out episodes' action tokens, in nats.",
    "alarms": "Alarms that are active.",
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
        for metric, text in (
            (bucket, f"ratio losses: share of tokens {_versions(first, last)} policy versions old."),
            (f"log_ratio_abs_{bucket}", f"ratio losses: mean |log ratio| of the tokens of {bucket}."),
        )
    },
    "clipped_high": "ratio losses: share of tokens clipped above (cispo: whose weight is; else positive advantage).",
    "clipped_low": "ratio losses: share of tokens clipped below (cispo: whose weight is; else negative advantage).",
    "clipped_dual": "ppo and its variants: share of tokens bounded by the dual clip.",
    "unit_ratio": "gspo: mean ratio of the token's unit, the geometric mean over its tokens.",
    "unit_ratio_ess": "gspo: effective sample size of those, as a share of the tokens.",
    "log_ratio_abs_proximal": "With decoupled: mean |log(pi_theta / proximal)|, 0 where a period of it begins.",
    "correction_weight": "Mean weight of the off-policy correction, 0 where masked.",
    "correction_weight_ess": "Effective sample size of those weights, as a share of the tokens.",
    "correction_limited": "Share of tokens whose correction weight is truncated.",
    "correction_masked": "Share of tokens that the correction leaves out.",
    "kl_reference": "With a pull to the reference: KL(policy || reference) per token, estimate k3, at most 10 a token.",
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
"""Every metric a training step can write, and its meaning."""
OF_ROUNDS = {
    "loop/round": "The round, in `metrics.jsonl` and loggers, where a step is an update.",
    "loop/episodes": "Rollouts of the round: those that ended in it.",
    "loop/carried": "Those among them that an earlier round had begun and carried over.",
    "loop/failed": "Those that failed.",
    "loop/left_out": "Those that were not played to their end, or that a filter dropped (`selections` says why).",
    "loop/trained": "Those that the round's updates consumed.",
    "loop/stale_steps": "Steps that `max_staleness` left out.",
    "loop/score": "Their mean score, where advantages come from another than the return (`loop.credit.score`).",
    "loop/return": "Their mean `env_return`, of those where it is known.",
    "loop/tokens": "Tokens of the round, context included; budgets count these.",
    "loop/seconds": "Wall time of the round, from the push of its weights to the end of its update.",
    "loop/live_groups": "Groups whose siblings' outcomes differ: those with a signal.",
    "loop/dead_groups": "Groups whose siblings all came out the same.",
    "loop/best_version": "The version with the best evaluation so far.",
    "eval/success": "Share of the held-out attempts that reach the threshold of success.",
    "eval/score": "Mean score of the held-out attempts.",
    "eval/attempts": "Held-out attempts with a score.",
    "eval/unscored": "Held-out attempts without a score, which no mean counts.",
    "sync/seconds": "Longest time that an engine took to load the weights.",
    "sync/failed": "Engines that did not take the weights.",
    "sync/logprob_diff_max": "Largest difference in nats between log-probabilities of an engine and of the trainer.",
    "sync/logprob_diff_mean": "Mean difference in nats between log-probabilities of an engine and of the trainer.",
}
"""Metrics of `trajlake loop` (a step a round) and of pushes (a step a version)."""
