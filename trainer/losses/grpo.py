"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): PPO's surrogate, episodes alike.

    r = exp(lp - lp_b)
    L = 1/U sum_U 1/T_u sum_t max(-r A, -clip(r, 1 - e, 1 + e) A)  +  beta KL

Group-relative advantages come from a credit job (`grpo`, `gigpo`). Against `ppo`: e = 0.2 on both sides, no dual clip,
and the mean over episodes of the mean over their tokens, which favours short good and long bad episodes (`dr_grpo` and
`dapo` do not). The paper's KL has beta = 0.04 and k3; here, as in TRL, it is off unless `kl.coefficient` is set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from trainer.data.aggregation import Aggregation, Unit
from trainer.losses.base import Loss, LossResult, LossRows
from trainer.losses.policy import prepare_correction
from trainer.losses.ppo import CLIPPED_NEEDS, PPOConfig, clipped

if TYPE_CHECKING:
    from trainer.config import TrainConfig


class GRPOConfig(PPOConfig):
    """Group relative policy optimisation."""

    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a negative advantage at -dual_clip * A. None switches it off."""


def grpo(rows: LossRows, config: TrainConfig) -> LossResult:
    """`clipped` with the settings of `config.grpo`."""
    return clipped(rows, config.grpo)


GRPO = Loss(
    "grpo",
    replace(CLIPPED_NEEDS, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_MEAN),
    grpo,
    prepare_correction("grpo"),
)
