"""Direct multi-turn preference optimisation (Shi et al. 2024, arXiv 2406.14868): DPO that weighs early turns more.

    S_u = sum_t phi(k_t, K_u) (lp_t - lp_ref,t)
    phi(k, K) = gamma^k (1 - gamma^(K - k)) / (1 - gamma^K),    (K - k) / K for gamma = 1
    L_p = -log sigmoid(beta (S_chosen - S_rejected))

k_t is the turn of token t counted from the unit's first trained one, K_u the number of turns up to its last. The loss
constrains the state-action occupancy instead of the policy and normalises the discounted length. The partition function
is then the same for both sides of a pair. phi(0, K) = 1, and as gamma falls to 0 only the first turn is compared.
Formula and defaults (gamma 0.7, beta 0.1) are those of the authors' code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer.losses.base import LossResult, LossRows, require, unit_sum
from trainer.losses.preference import PairLoss, log_ratio_to_reference, pair_result

if TYPE_CHECKING:
    from torch import Tensor


def turn_factors(step_index_N: Tensor, unit_N: Tensor, units: int, gamma: float) -> Tensor:
    """Return the factor phi of each token, float64 [N] in (0, 1], from its turn and its unit (integers [N])."""
    step_N = step_index_N.long()
    blank_U = step_N.new_zeros(units)
    first_U = blank_U.scatter_reduce(0, unit_N, step_N, "amin", include_self=False)
    last_U = blank_U.scatter_reduce(0, unit_N, step_N, "amax", include_self=False)
    turn_N = (step_N - first_U[unit_N]).double()
    turns_N = (last_U - first_U + 1)[unit_N].double()
    if gamma == 1:
        return (turns_N - turn_N) / turns_N
    return gamma**turn_N * (1 - gamma ** (turns_N - turn_N)) / (1 - gamma**turns_N)


class DMPO(PairLoss):
    """Direct multi-turn preference optimisation."""

    name: Literal["dmpo"] = "dmpo"
    """Name of the loss."""
    gamma: float = Field(0.7, gt=0, le=1)
    """Discount from turn to turn."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the sigmoid loss over pairs of discounted log-ratios."""
        unit_N, weight_U = require(rows.unit_N, "unit_N"), require(rows.weight_U, "weight_U")
        step_index_N = require(rows.step_index_N, "step_index_N")
        factor_N = turn_factors(step_index_N, unit_N, len(weight_U), self.gamma).to(rows.logprobs_N.dtype)
        return pair_result(rows, unit_sum(factor_N * log_ratio_to_reference(rows), unit_N, len(weight_U)), self)
