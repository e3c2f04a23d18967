"""What an optimizer step computes before its gradient: reference log-probabilities, and statistics of a first pass.

Most losses need neither. A reference policy is frozen, so its log-probabilities are those of any pass. A loss with
statistics (z0 of kto, batch-normalised weights) first sees every micro-batch of the step under the weights at its
start, without gradient; its sums are added over micro-batches and ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.backends.protocol import Backend, Scoring
from trainer.backends.rows import loss_rows
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.losses import Loss


def fill_batches(
    backend: Backend, reference: Scoring | None, loss: Loss, config: TrainConfig, batches: Sequence[PackedBatch]
) -> tuple[list[PackedBatch], Mapping[str, float]]:
    """The micro-batches of an optimizer step with what the loss needs filled in.

    Args:
        backend: the policy.
        reference: the reference policy, if the loss needs one.
        loss: the loss, its needs resolved.
        config: its options.
        batches: this rank's micro-batches, dummies included.

    Returns:
        The micro-batches on the policy's device, and what `loss.prepare` came to over all ranks.
    """
    filled = [batch.to(backend.policy.device) for batch in batches]
    if reference is not None:
        filled = [replace(batch, reference_logprobs_N=reference.logprobs(batch).result()) for batch in filled]
    if loss.prepare is None:
        return filled, {}
    filled = [replace(batch, proximal_logprobs_N=backend.logprobs(batch).result()) for batch in filled]
    rows = []
    for batch in filled:
        if not batch.dummy and batch.proximal_logprobs_N is not None:
            rows.append(loss_rows(batch, loss, batch.proximal_logprobs_N, None))
    sums = loss.prepare(rows, config) if rows else {}
    return filled, backend.ranks.added({name: float(value) for name, value in sums.items()})
