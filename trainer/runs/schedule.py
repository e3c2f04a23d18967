"""The learning rate: a pure function of the optimizer step, so a resumed run needs no scheduler state."""

import math

from trainer.config import ScheduleConfig

_DEFAULTS = ((1_000_000, 3e-3), (30_000_000, 1e-3), (300_000_000, 1e-4))


def learning_rate(step: int, total_steps: int, peak: float, config: ScheduleConfig) -> float:
    """Learning rate of one optimizer step, at most `peak`.

    Warm-up rises linearly and reaches the peak at step round(warmup_fraction * total_steps); its first step is above 0.
    Then cosine and linear fall to final_fraction * peak at the last step.

    Args:
        step: 0 to total_steps - 1.
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
