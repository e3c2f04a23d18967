"""Behaviour cloning weighted by exp(A_S / beta): imitate most the actions that beat others from the same state.

    L_t = -min(exp(A_S / beta), w_max) lp

A_S is the step advantage inside its anchor group (column `a_step` of a GiGPO credit job), unchanged. A step whose state
no sibling visited has A_S = 0 and weight 1, as in plain cloning, so nothing is shifted. Unlike `awr`, the loss ignores
the episode's advantage A_E; a selection decides which episodes to imitate (`--where "env_return >= 1"`).
"""

from typing import ClassVar, Literal

from pydantic import Field

from trainer.losses.awr import weighted_likelihood
from trainer.losses.base import LossResult, LossRows, Needs, TokenLoss


class BCExp(TokenLoss):
    """Behaviour cloning weighted by the step advantage."""

    base_needs: ClassVar[Needs] = Needs(advantages=True, step_advantages=True)

    name: Literal["bc_exp"] = "bc_exp"
    """Name of the loss."""
    beta: float = Field(1.0, gt=0)
    """Temperature of the weights exp(A_S / beta), in units of A_S."""
    max_weight: float = Field(20.0, gt=0)
    """Upper limit of a weight."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the likelihood weighted by the exponential of the step advantage."""
        return weighted_likelihood(rows, beta=self.beta, max_weight=self.max_weight)
