"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): good and bad episodes, not paired.

    S_u = sum_t (lp_t - lp_ref,t)
    z0  = max(0, mean over the optimizer step of S_u)
    L_u = lambda_D (1 - sigmoid(beta (S_u - z0)))     desirable
          lambda_U (1 - sigmoid(beta (z0 - S_u)))     undesirable

z0 is the reference point: the distance that the policy has moved for any episode. The paper estimates KL(pi || ref) for
it with outputs shuffled between prompts. Trajectories cannot be shuffled, so z0 is the mean over the optimizer step. A
first pass without gradient computes it over all micro-batches and ranks. Keep lambda_D n_D : lambda_U n_U near 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainer.losses.base import Atom, LabelRule, Loss, LossResult, LossRows, Needs, Unit, require, sum_by_name, unit_sum
from trainer.losses.preference import log_ratio_to_reference

if TYPE_CHECKING:
    from torch import Tensor


class KTO(Loss):
    """Kahneman-Tversky optimisation; a mean over units."""

    base_needs: ClassVar[Needs] = Needs(
        reference_logprobs=True, statistics=("kto_score", "kto_mass"), unit_above_token=True, atom=Atom.EPISODE
    )

    name: Literal["kto"] = "kto"
    """Name of the loss."""
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference: the smaller, the further the policy may go."""
    desirable_weight: float = Field(1.0, gt=0)
    """lambda_D: weight of good episodes."""
    undesirable_weight: float = Field(1.0, gt=0)
    """lambda_U: weight of bad ones."""
    threshold: float | None = None
    """Lowest score of a desirable episode; lower ones are undesirable. None: the sign of its A_E decides, and episodes
    without A_E, or with A_E = 0, are dropped."""
    score: str = "env_return"
    """Score that `threshold` is compared with: env_return, or a scorer of whole episodes, with or without @VERSION."""
    unit: Literal["turn", "sequence", "episode"] = "episode"
    """Unit that is scored by S: turn, sequence or episode."""

    @model_validator(mode="after")
    def _check_threshold(self) -> Self:
        if self.score != type(self).model_fields["score"].default and self.threshold is None:
            raise ValueError(f"score {self.score!r} is compared with a threshold: set threshold, or leave score out")
        return self

    def resolve_needs(self, needs: Needs) -> Needs:
        """Add the labels and the unit."""
        return replace(needs, labels=LabelRule(self.threshold, self.score), unit=Unit(self.unit))

    def prepare(self, rows_B: Sequence[LossRows]) -> Mapping[str, Tensor]:
        """Sum the terms of z0: the units' scores and their number, weighted by the plan."""
        weighed = [(require(rows.weight_U, "weight_U"), _unit_scores(rows)) for rows in rows_B]
        return sum_by_name(
            {"kto_score": (weight_U * score_U).sum(), "kto_mass": weight_U.sum()} for weight_U, score_U in weighed
        )

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the sigmoid loss of each unit against the reference point."""
        weight_U = require(rows.weight_U, "weight_U")
        score_U = _unit_scores(rows)
        sign_U = require(rows.sign_U, "sign_U").to(score_U.dtype)
        origin = max(0.0, rows.statistics["kto_score"] / rows.statistics["kto_mass"])
        good_U = sign_U > 0
        loss_U = 1 - (self.beta * sign_U * (score_U - origin)).sigmoid()
        lambda_U = score_U.new_full((len(score_U),), self.undesirable_weight).masked_fill(good_U, self.desirable_weight)
        reward_U = self.beta * score_U.detach()
        sums = {
            "desirable": good_U.sum(),
            "undesirable": (~good_U).sum(),
            "reward_chosen/desirable": (reward_U * good_U).sum(),
            "reward_rejected/undesirable": (reward_U * ~good_U).sum(),
            "log_ratio_reference": log_ratio_to_reference(rows).detach().sum(),
        }
        return LossResult(total=(weight_U * lambda_U * loss_U).sum(), sums=sums)


def _unit_scores(rows: LossRows) -> Tensor:
    """Return S of each unit, [U]."""
    unit_N, weight_U = require(rows.unit_N, "unit_N"), require(rows.weight_U, "weight_U")
    return unit_sum(log_ratio_to_reference(rows), unit_N, len(weight_U))
