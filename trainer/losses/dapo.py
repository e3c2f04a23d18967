"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with clip-higher and a mean over tokens.

    L = 1/n sum_N max(-r A, -clip(r, 1 - 0.2, 1 + 0.28) A)

The mean is over all tokens of the optimizer step, as in verl; the paper's objective takes it over the tokens of a
prompt's group, and then over prompts. Unlike `ppo` there is no dual clip. The rest of the paper concerns the data: drop
dead groups (`live_only`, the default where advantages are used), filter or shape over-long episodes (`trajlake select`,
reward functions).
"""

from typing import Literal

from pydantic import Field

from trainer.losses.ppo import ClippedLoss


class DAPO(ClippedLoss):
    """Clip-higher, token mean."""

    name: Literal["dapo"] = "dapo"
    """Name of the loss."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high; larger than clip_low, so that rare tokens may grow."""
