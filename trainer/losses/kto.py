"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): good and bad episodes, not paired.

    S_u = sum_t (lp_t - lp_ref,t)
    z0  = max(0, mean over the optimizer step of S_u)
    L_u = lambda_D (1 - sigmoid(beta (S_u - z0)))     desirable
          lambda_U (1 - sigmoid(beta (z0 - S_u)))     undesirable

z0 is the point of reference: how far the policy has moved anyway. The paper estimates KL(pi || ref) for it with outputs
shuffled between prompts; trajectories cannot be shuffled, so it is the mean of the step's own, taken in a first pass
without gradient over all micro-batches and ranks. Keep lambda_D n_D : lambda_U n_U near 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from trainer.data.aggregation import Atom, Unit
from trainer.losses.base import Loss, LossConfig, LossResult, LossRows, Needs, added, required
from trainer.losses.preference import log_ratio_to_reference
from trainer.losses.segments import unit_sum

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig


class KTOConfig(LossConfig):
    """Kahneman-Tversky optimisation."""

    beta: float = Field(0.1, gt=0)
    """How strongly the reference holds: the smaller, the further the policy may go."""
    desirable_weight: float = Field(1.0, gt=0)
    """lambda_D: weight of good episodes."""
    undesirable_weight: float = Field(1.0, gt=0)
    """lambda_U: weight of bad ones."""


def kto_prepare(rows_B: Sequence[LossRows], config: TrainConfig) -> Mapping[str, Tensor]:
    """What z0 is made of: the units' scores and their number, weighted by the plan."""
    del config
    weighed = [(required(rows.weight_U, "weight_U"), _scores(rows)) for rows in rows_B]
    return added({"kto_score": (weight_U * score_U).sum(), "kto_mass": weight_U.sum()} for weight_U, score_U in weighed)


def kto(rows: LossRows, config: TrainConfig) -> LossResult:
    """Sigmoid loss of each unit against the point of reference."""
    options = config.kto
    weight_U = required(rows.weight_U, "weight_U")
    score_U = _scores(rows)
    sign_U = required(rows.sign_U, "sign_U").to(score_U.dtype)
    origin = max(0.0, rows.statistics["kto_score"] / rows.statistics["kto_mass"])
    good_U = sign_U > 0
    loss_U = 1 - (options.beta * sign_U * (score_U - origin)).sigmoid()
    lambda_U = score_U.new_full((len(score_U),), options.undesirable_weight).masked_fill(
        good_U, options.desirable_weight
    )
    reward_U = options.beta * score_U.detach()
    sums = {
        "desirable": good_U.sum(),
        "undesirable": (~good_U).sum(),
        "reward_chosen/desirable": (reward_U * good_U).sum(),
        "reward_rejected/undesirable": (reward_U * ~good_U).sum(),
        "log_ratio_reference": log_ratio_to_reference(rows).detach().sum(),
    }
    return LossResult(total=(weight_U * lambda_U * loss_U).sum(), sums=sums)


def _scores(rows: LossRows) -> Tensor:
    """S of each unit, [U]."""
    unit_N, weight_U = required(rows.unit_N, "unit_N"), required(rows.weight_U, "weight_U")
    return unit_sum(log_ratio_to_reference(rows), unit_N, len(weight_U))


KTO = Loss(
    "kto",
    Needs(
        reference_logprobs=True,
        statistics=("kto_score", "kto_mass"),
        labels=True,
        unit=Unit.EPISODE,
        unit_above_token=True,
        atom=Atom.EPISODE,
    ),
    kto,
    kto_prepare,
)
