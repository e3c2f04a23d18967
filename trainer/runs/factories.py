"""Factories for a custom loop: the backend of a policy, its reference, and the learning rate.

`trainer.runs.offline` and `trainer.online` use them, too. The finer functions are `load_policy` in
`trainer.policy.model`, those of `trainer.backends`, and `adamw`, `learning_rate` and `run_steps` in `trainer.runs`.
The plan does gradient accumulation: every micro-batch of an optimizer step adds its weighted share.

    >>> from trainer.config import TrainConfig
    >>> from trainer.runs.factories import make_backend, make_schedule
    >>> config = TrainConfig(model=folder, loss="sft", learning_rate=1e-3)
    >>> backend = make_backend(config)
    >>> rate_of = make_schedule(config, total_steps=3)
    >>> losses = []
    >>> for step in range(3):
    ...     sums = [backend.forward_backward(batch, config.loss) for batch in batches]
    ...     losses.append(sum(float(batch_sums["loss"]) for batch_sums in sums))
    ...     norm = backend.optim_step(rate_of(step))
    >>> losses[2] < losses[0]
    True
"""

import math
from collections.abc import Callable

from trainer.backends.base import FrozenPolicy, PolicyBackend, SingleDevice
from trainer.backends.ranks import ALONE, Ranks
from trainer.config import ScheduleConfig, TrainConfig
from trainer.policy.model import PackedPolicy, build_policy, load_policy

_DEFAULTS = ((1_000_000, 3e-3), (30_000_000, 1e-3), (300_000_000, 1e-4))


def learning_rate(step: int, total_steps: int, peak: float, config: ScheduleConfig) -> float:
    """Return the learning rate of an optimizer step, 0 to total_steps - 1; at most `peak`.

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


def peak_learning_rate(config: TrainConfig, num_parameters: int) -> float:
    """Return the configured peak, or else 3e-3 below 1 M parameters, 1e-3 below 30 M, 1e-4 below 300 M, then 1e-5.

    Losses with ratios default to at most 3e-4. At 3e-3 models of .16 M lost Taxi and DoorKey (docs/learning.md). The
    other defaults are habits, not results.
    """
    rate = next((rate for limit, rate in _DEFAULTS if num_parameters < limit), 1e-5)
    return config.learning_rate or (min(rate, 3e-4) if config.loss.needs.behaviour_logprobs else rate)


def make_backend(config: TrainConfig, ranks: Ranks = ALONE, policy: PackedPolicy | None = None) -> PolicyBackend:
    """Make a policy in training with AdamW, on one device or sharded over ranks; None loads the configured policy.

    Raises:
        UsageError: the model cannot be loaded or trained packed.
    """
    if not ranks.joined:
        return SingleDevice(policy or build_policy(config), config.optimizer)
    from trainer.backends.sharded import Sharded, load_on_rank_zero

    policy = policy or load_on_rank_zero(lambda empty: build_policy(config, ranks.device, empty=empty), ranks)
    return Sharded(policy, config.optimizer, ranks)


def make_reference(config: TrainConfig, ranks: Ranks = ALONE) -> FrozenPolicy:
    """Make the frozen reference policy, sharded over the ranks: `config.reference`, or the model before any update.

    Raises:
        UsageError: the model cannot be loaded or trained packed.
    """
    device = ranks.device if ranks.joined else config.device
    source = config.reference or config.model
    scoring = config.model_copy(update={"gradient_checkpointing": False})

    def load(empty: bool) -> PackedPolicy:
        policy = load_policy(source, device, scoring, empty=empty, frozen=True)
        policy.model.requires_grad_(requires_grad=False)
        return policy

    if not ranks.joined:
        return FrozenPolicy(load(empty=False))
    from trainer.backends.sharded import load_on_rank_zero, shard_policy

    policy = load_on_rank_zero(load, ranks)
    shard_policy(policy, ranks)
    return FrozenPolicy(policy)


def make_schedule(config: TrainConfig, total_steps: int, num_parameters: int = 0) -> Callable[[int], float]:
    """Return the learning rate as a function of the optimizer step: warm-up, then cosine, linear or constant."""
    peak = peak_learning_rate(config, num_parameters)
    return lambda step: learning_rate(step, total_steps, peak, config.schedule)
