"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with clip-higher and a mean over tokens.

    L = 1/n sum_N max(-r A, -clip(r, 1 - 0.2, 1 + 0.28) A)

The mean is over all tokens of the optimizer step, as in verl; the paper's objective takes it over the tokens of a
prompt's group, and then over prompts. Against `ppo`: no dual clip. The rest of the paper is a matter of data: leave
dead groups out (`live_only`, the default where advantages are used), filter or shape over-long episodes (`trajlake
select`, reward functions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from trainer.losses.base import Loss, LossResult, LossRows
from trainer.losses.policy import prepare_correction
from trainer.losses.ppo import CLIPPED_NEEDS, PPOConfig, clipped

if TYPE_CHECKING:
    from trainer.config import TrainConfig


class DAPOConfig(PPOConfig):
    """Clip-higher, token mean."""

    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a negative advantage at -dual_clip * A. None switches it off."""


def dapo(rows: LossRows, config: TrainConfig) -> LossResult:
    """`clipped` with the settings of `config.dapo`."""
    return clipped(rows, config.dapo)


DAPO = Loss("dapo", CLIPPED_NEEDS, dapo, prepare_correction("dapo"))
