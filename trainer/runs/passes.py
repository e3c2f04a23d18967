"""What an optimizer step computes before its gradient: log-probabilities of other policies, and statistics.

Most losses need neither. A reference policy is frozen, so its log-probabilities are those of any pass. The proximal
policy of a decoupled loss has the weights of some optimizer steps ago (`trainer.losses.correction`), whose copy is put
in place for a pass. A loss with statistics (z0 of kto, batch-normalised weights) first sees every micro-batch of the
step under the weights at its start, without gradient; its sums are added over micro-batches and ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.backends.base import FrozenPolicy, PolicyBackend
from trainer.backends.rows import loss_rows
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.data.plan import Plan
from trainer.losses import Loss
from trainer.losses.policy import CorrectedLoss

PROXIMAL_EVERY = 4
"""Optimizer steps of a proximal policy where nothing else is said: AReaL cuts a batch into as many."""


def proximal_period(loss: Loss, config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps for which the proximal policy stays the same; 1 where the loss has none.

    Args:
        loss: the loss, with its options.
        config: the run.
        plan: what is trained on: its epochs are the periods where `config.minibatches` cuts them.
    """
    if not loss.needs.proximal_logprobs:
        return 1
    if isinstance(loss, CorrectedLoss) and loss.correction.proximal_every is not None:
        return loss.correction.proximal_every
    return PROXIMAL_EVERY if config.minibatches is None else sum(step.epoch == 0 for step in plan.steps)


def fill_batches(
    backend: PolicyBackend,
    reference: FrozenPolicy | None,
    loss: Loss,
    batches: Sequence[PackedBatch],
    *,
    proximal: bool = False,
) -> tuple[list[PackedBatch], Mapping[str, float]]:
    """The micro-batches of an optimizer step with what the loss needs filled in.

    Args:
        backend: the policy.
        reference: the reference policy, if the loss needs one.
        loss: the loss, with its options.
        batches: this rank's micro-batches, dummies included.
        proximal: the proximal policy is the copy that the backend keeps, and not the policy as it is.

    Returns:
        The micro-batches on the policy's device, and what `loss.prepare` came to over all ranks.

    Raises:
        ContractError: the backend keeps no copy.
    """
    filled = [batch.to(backend.policy.device) for batch in batches]
    if reference is not None:
        filled = [replace(batch, reference_logprobs_N=reference.logprobs(batch)) for batch in filled]
    if proximal:
        with backend.as_proximal():
            filled = [replace(batch, proximal_logprobs_N=backend.logprobs(batch)) for batch in filled]
    if not loss.needs.statistics:
        return filled, {}
    # Dummies too: across ranks all must make the same passes.
    passed = [(batch, backend.logprobs(batch)) for batch in filled]
    rows = [loss_rows(batch, loss, logprobs_N, None) for batch, logprobs_N in passed if not batch.dummy]
    sums = loss.prepare(rows) if rows else {}
    return filled, backend.ranks.added({name: float(value) for name, value in sums.items()})
