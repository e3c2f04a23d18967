"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): PPO's surrogate, averaged over episodes.

    r = exp(lp - lp_b)
    L = 1/U sum_U 1/T_u sum_t max(-r A, -clip(r, 1 - e, 1 + e) A)  +  beta KL

Group-relative advantages come from a credit job (`grpo`, `gigpo`). Unlike `ppo` it has e = 0.2 on both sides and no
dual clip. It takes the mean over episodes of the mean over their tokens. This favours short good and long bad episodes;
`dr_grpo` and `dapo` do not. The paper's KL has beta = 0.04 and k3; here, as in TRL, it is off unless `kl.coefficient`
is set.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from trainer.losses.base import Aggregation, Needs, Unit
from trainer.losses.policy import RATIO_NEEDS
from trainer.losses.ppo import ClippedLoss


class GRPOLoss(ClippedLoss):
    """Group relative policy optimisation."""

    base_needs: ClassVar[Needs] = replace(RATIO_NEEDS, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_MEAN)

    name: Literal["grpo"] = "grpo"
    """Name of the loss."""
