"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) on pairs of trajectories.

    S_u = sum_t (lp_t - lp_ref,t)
    L_p = -log sigmoid(beta (S_chosen - S_rejected))

The sums are over action tokens (ETO, arXiv 2403.02502); `trainer.losses.preference` adds label smoothing and a
likelihood term. `length_normalised` divides S by the unit's number of tokens (TRL's sigmoid_norm), so that long
trajectories do not dominate. Over several turns the partition function of DPO's derivation does not cancel; `dmpo`
corrects this. Pairs of single steps that share their context do not have the problem.
"""

from typing import Literal

from trainer.losses.base import LossResult, LossRows, require, unit_mean, unit_sum
from trainer.losses.preference import PairLoss, log_ratio_to_reference, pair_result


class DPO(PairLoss):
    """Direct preference optimisation."""

    name: Literal["dpo"] = "dpo"
    """Name of the loss."""
    length_normalised: bool = False
    """Compare mean log-ratios per token instead of sums; beta must then be larger by about the length."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the sigmoid loss over pairs of summed log-ratios."""
        over = unit_mean if self.length_normalised else unit_sum
        unit_N, weight_U = require(rows.unit_N, "unit_N"), require(rows.weight_U, "weight_U")
        return pair_result(rows, over(log_ratio_to_reference(rows), unit_N, len(weight_U)), self)
