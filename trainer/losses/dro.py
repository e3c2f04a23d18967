"""Direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107), token by token, with advantages from credit.

    L_t = -(A lp - beta/2 (lp - lp_b)^2)

The quadratic term pulls to the policy that sampled the data, so no ratio can explode. A negative advantage pushes only
until beta (lp_b - lp) = -A. beta = 0.1 is our default; verl has the loss and gives its beta no default.
"""

from typing import ClassVar, Literal

from pydantic import Field

from trainer.losses.base import LossResult, LossRows, Needs, behaviour_log_ratio, require
from trainer.losses.policy import RATIO_NEEDS, PolicyLoss, add_regularisers


class DRO(PolicyLoss):
    """Advantage times log-probability, with a quadratic pull to the behaviour policy."""

    base_needs: ClassVar[Needs] = RATIO_NEEDS

    name: Literal["dro"] = "dro"
    """Name of the loss."""
    beta: float = Field(0.1, gt=0)
    """Strength of the pull."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the quadratic objective."""
        advantages_N = require(rows.advantages_N, "advantages_N")
        pull_N = self.beta / 2 * behaviour_log_ratio(rows).square()
        return add_regularisers(rows, self, pull_N - advantages_N * rows.logprobs_N, {"pull": pull_N.detach().sum()})
