"""GRPO without its length bias (Liu et al. 2025, arXiv 2503.20783): sums over episodes, divided by a constant.

    L = 1/(U C) sum_U sum_t max(-r A, -clip(r, 1 - e, 1 + e) A)  +  beta KL

A token weighs the same in a short and in a long episode; C is `aggregation_constant`, the same for every optimizer step
(unless set, max_length). The other half of the paper, advantages without the division by the standard deviation,
belongs to the credit job: estimator `dr_grpo`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.data.aggregation import Aggregation, Unit
from trainer.losses.base import Loss, LossResult, LossRows
from trainer.losses.grpo import GRPOConfig
from trainer.losses.policy import prepare_correction
from trainer.losses.ppo import CLIPPED_NEEDS, clipped

if TYPE_CHECKING:
    from trainer.config import TrainConfig


class DrGRPOConfig(GRPOConfig):
    """GRPO without its length bias."""


def dr_grpo(rows: LossRows, config: TrainConfig) -> LossResult:
    """`clipped` with the settings of `config.dr_grpo`."""
    return clipped(rows, config.dr_grpo)


DR_GRPO = Loss(
    "dr_grpo",
    replace(CLIPPED_NEEDS, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_SUM_NORM),
    dr_grpo,
    prepare_correction("dr_grpo"),
)
