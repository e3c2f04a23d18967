"""GRPO without its length bias (Liu et al. 2025, arXiv 2503.20783): sums over episodes, divided by a constant.

    L = 1/(U C) sum_U sum_t max(-r A, -clip(r, 1 - e, 1 + e) A)  +  beta KL

A token weighs the same in a short and in a long episode; C is `aggregation_constant`, the same for every optimizer step
(unless set, max_length). The other half of the paper, advantages without the division by the standard deviation,
belongs to the credit job: estimator `dr_grpo`.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from trainer.data.stream.aggregation import Aggregation, Unit
from trainer.losses.base import Needs
from trainer.losses.policy import RATIO_NEEDS
from trainer.losses.ppo import ClippedLoss


class DrGRPO(ClippedLoss):
    """GRPO without its length bias."""

    always: ClassVar[Needs] = replace(RATIO_NEEDS, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_SUM_NORM)

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the loss."""
