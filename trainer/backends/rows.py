"""From a packed buffer and its log-probabilities to what a loss sees."""

from collections.abc import Mapping

from torch import Tensor  # noqa: TID253 - loaded by commands only when they train

from trainer.data.batch import PackedBatch
from trainer.losses import Loss, LossRows


def loss_rows(
    batch: PackedBatch,
    loss: Loss,
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    statistics: Mapping[str, float] | None = None,
) -> LossRows:
    """One micro-batch as a loss sees it.

    Where the batch has no log-probabilities of the proximal policy, that policy is the one whose weights are in place:
    they are the policy's own, without gradient.

    Args:
        batch: the packed buffer.
        loss: the loss.
        logprobs_N: the policy's log-probabilities.
        entropy_N: its entropies, or None.
        statistics: of the optimizer step.
    """
    proximal_N = batch.proximal_logprobs_N
    if proximal_N is None and loss.needs.proximal_logprobs:
        proximal_N = logprobs_N.detach()
    return LossRows(
        logprobs_N=logprobs_N,
        weight_N=batch.weight_N,
        advantages_N=batch.advantages_N,
        behaviour_logprobs_N=batch.behaviour_logprobs_N,
        entropy_N=entropy_N,
        reference_logprobs_N=batch.reference_logprobs_N,
        proximal_logprobs_N=proximal_N,
        unit_N=batch.unit_N,
        weight_U=batch.weight_U,
        pair_U=batch.pair_U,
        sign_U=batch.sign_U,
        step_index_N=batch.step_index_N,
        staleness_N=batch.staleness_N,
        statistics=statistics or {},
    )
