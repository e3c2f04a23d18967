"""Parts shared by the losses on preferences: scores of units against the reference, and pairs of units.

    S_u = sum_t f_t (lp_t - lp_ref,t)          over the action tokens of unit u
    z_p = beta (S_chosen - S_rejected)
    L_p = -(1 - e) log sigmoid(z_p) - e log sigmoid(-z_p) - alpha lp_chosen / T_chosen

e is label smoothing (cDPO). alpha is the weight of the chosen side's likelihood (RPO, arXiv 2404.19733), which keeps it
from falling together with the rejected one. Environment tokens are excluded, because they cancel only if both sides saw
the same. Axes: `_N` tokens, `_U` units, `_P` pairs.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from trainer.losses.base import Atom, Loss, LossResult, LossRows, Needs, PairsConfig, Unit, require, unit_mean

if TYPE_CHECKING:
    from torch import Tensor


class PairLoss(Loss, ABC):
    """A loss on pairs; a mean over pairs."""

    base_needs: ClassVar[Needs] = Needs(
        reference_logprobs=True, unit=Unit.EPISODE, unit_above_token=True, atom=Atom.PAIR
    )

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference: the smaller, the further the policy may go."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a preference is reversed."""
    nll_coefficient: float = Field(0.0, ge=0)
    """Weight of the chosen side's negative log-likelihood per token (RPO)."""
    pairs: PairsConfig = PairsConfig()
    """Pairs to compare."""

    def resolve_needs(self, needs: Needs) -> Needs:
        """Add the pairs."""
        return replace(needs, pairs=self.pairs)


def log_ratio_to_reference(rows: LossRows) -> Tensor:
    """Return lp - lp_ref, [N], with gradient."""
    return rows.logprobs_N - require(rows.reference_logprobs_N, "reference_logprobs_N").detach()


def pair_result(rows: LossRows, score_U: Tensor, options: PairLoss) -> LossResult:
    """Compute the sigmoid loss over the pairs of a micro-batch, which contains whole pairs.

    score_U is S of each unit, [U], with gradient.
    """
    from torch.nn.functional import logsigmoid

    pair_U, sign_U = require(rows.pair_U, "pair_U"), require(rows.sign_U, "sign_U").to(score_U.dtype)
    unit_N, weight_U = require(rows.unit_N, "unit_N"), require(rows.weight_U, "weight_U")
    units = len(weight_U)
    # There are at most as many pairs as units; unused pair numbers have weight 0.
    weight_P = weight_U.new_zeros(units).index_add(0, pair_U, weight_U)
    margin_P = score_U.new_zeros(units).index_add(0, pair_U, sign_U * score_U)
    logit_P = options.beta * margin_P
    smoothing = options.label_smoothing
    loss_P = -(1 - smoothing) * logsigmoid(logit_P) - smoothing * logsigmoid(-logit_P)
    chosen_U = (sign_U > 0).to(score_U.dtype)
    if options.nll_coefficient > 0:
        likelihood_U = unit_mean(rows.logprobs_N, unit_N, units)
        loss_P = loss_P - options.nll_coefficient * score_U.new_zeros(units).index_add(
            0, pair_U, chosen_U * likelihood_U
        )
    reward_U = options.beta * score_U.detach()
    sums = {
        "pairs": chosen_U.sum(),
        "margin/pairs": logit_P.detach().sum(),
        "accuracy/pairs": (logit_P > 0).sum(),
        "reward_chosen/pairs": (chosen_U * reward_U).sum(),
        "reward_rejected/pairs": ((1 - chosen_U) * reward_U).sum(),
        "log_ratio_reference": log_ratio_to_reference(rows).detach().sum(),
    }
    return LossResult(total=(weight_P * loss_P).sum(), sums=sums)
