"""GRPO without its length bias (Liu et al. 2025, arXiv 2503.20783): sums over episodes, divided by a constant.

    L = 1/(U C) sum_U sum_t max(-r A, -clip(r, 1 - e, 1 + e) A)  +  beta KL

A token has the same weight in a short and in a long episode. C is `aggregation_constant`, the same for every optimizer
step (default max_length). The paper also drops the division of advantages by the standard deviation; the credit
estimator `dr_grpo` does that.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from trainer.losses.base import Aggregation, Needs, Unit
from trainer.losses.policy import RATIO_NEEDS
from trainer.losses.ppo import ClippedLoss


class DrGRPOLoss(ClippedLoss):
    """GRPO without its length bias."""

    base_needs: ClassVar[Needs] = replace(
        RATIO_NEEDS, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_SUM_NORM
    )

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the loss."""
