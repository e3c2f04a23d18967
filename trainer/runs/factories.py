"""One-line factories for a loop of one's own: the policy, its backend, its reference, and the learning rate.

They are what `trainer.runs.offline` and `trainer.online` use. The finer functions are `load_policy` in
`trainer.policy.model`, those of `trainer.backends`, and `adamw`, `learning_rate` and `run_steps` in `trainer.runs`.
Gradient accumulation is the plan's: every micro-batch of an optimizer step adds its weighted part.

    >>> from trainer.config import TrainConfig
    >>> from trainer.runs.factories import make_backend, make_schedule
    >>> config = TrainConfig(model=folder, loss="sft", learning_rate=1e-3)
    >>> backend = make_backend(config)
    >>> rate_of = make_schedule(config, total_steps=3)
    >>> losses = []
    >>> for step in range(3):
    ...     sums = [backend.forward_backward(batch, config.loss) for batch in batches]
    ...     losses.append(sum(float(part["loss"]) for part in sums))
    ...     norm = backend.optim_step(rate_of(step))
    >>> losses[2] < losses[0]
    True
"""

import math
from collections.abc import Callable

from trainer.backends.base import FrozenPolicy, PolicyBackend, SingleDevice
from trainer.backends.ranks import ALONE, Ranks
from trainer.config import ScheduleConfig, TrainConfig
from trainer.policy.model import Policy, load_policy, policy_of

_DEFAULTS = ((1_000_000, 3e-3), (30_000_000, 1e-3), (300_000_000, 1e-4))


def learning_rate(step: int, total_steps: int, peak: float, config: ScheduleConfig) -> float:
    """Learning rate of an optimizer step, 0 to total_steps - 1; at most `peak`. A resumed run needs no other state.

    Warm-up rises linearly and reaches the peak at step round(warmup_fraction * total_steps); its first step is above 0.
    Then cosine and linear fall to final_fraction * peak at the last step.
    """
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.shape == "constant":
        return peak
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    fall = (1 + math.cos(math.pi * progress)) / 2 if config.shape == "cosine" else 1 - progress
    return peak * (config.final_fraction + (1 - config.final_fraction) * fall)


def default_learning_rate(num_parameters: int) -> float:
    """A peak that suits a model's size: 3e-3 below 1 M parameters, 1e-3 below 30 M, 1e-4 below 300 M, then 1e-5.

    Small models are trained from scratch here and large ones fine-tuned; the numbers are habits, not results.
    """
    return next((rate for limit, rate in _DEFAULTS if num_parameters < limit), 1e-5)


def make_backend(config: TrainConfig, ranks: Ranks = ALONE, policy: Policy | None = None) -> PolicyBackend:
    """A policy in training, with AdamW: on one device, or sharded over ranks; None loads the configuration's policy.

    Raises:
        UsageError: the model cannot be loaded, or is not served.
    """
    if not ranks.joined:
        return SingleDevice(policy or policy_of(config), config.optimizer)
    from trainer.backends.sharded import Sharded, loaded_on_rank_zero

    policy = policy or loaded_on_rank_zero(lambda empty: policy_of(config, ranks.device, empty=empty), ranks)
    return Sharded(policy, config.optimizer, ranks)


def make_reference(config: TrainConfig, ranks: Ranks = ALONE) -> FrozenPolicy:
    """The frozen reference policy, sharded over the ranks: `config.reference`, or the model before the first update.

    Raises:
        UsageError: the model cannot be loaded, or is not served.
    """
    device = ranks.device if ranks.joined else config.device
    source = config.reference or config.model

    def load(empty: bool) -> Policy:
        policy = load_policy(source, device, attention=config.attention, dtype=config.dtype, empty=empty)
        policy.model.requires_grad_(requires_grad=False)
        return policy

    if not ranks.joined:
        return FrozenPolicy(load(empty=False))
    from trainer.backends.sharded import loaded_on_rank_zero, shard_policy

    policy = loaded_on_rank_zero(load, ranks)
    shard_policy(policy, ranks)
    return FrozenPolicy(policy)


def make_schedule(config: TrainConfig, total_steps: int, num_parameters: int = 0) -> Callable[[int], float]:
    """The learning rate as a function of the optimizer step: warm-up, then cosine, linear or constant.

    The number of parameters chooses the peak where the configuration does not.
    """
    peak = config.learning_rate or default_learning_rate(num_parameters)
    return lambda step: learning_rate(step, total_steps, peak, config.schedule)
