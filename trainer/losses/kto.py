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
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainer.data.stream.aggregation import Atom, Unit
from trainer.losses.base import LabelRule, Loss, LossResult, LossRows, Needs, required, summed, unit_sum
from trainer.losses.preference import log_ratio_to_reference

if TYPE_CHECKING:
    from torch import Tensor


class KTO(Loss):
    """Kahneman-Tversky optimisation; a mean over units."""

    always: ClassVar[Needs] = Needs(
        reference_logprobs=True, statistics=("kto_score", "kto_mass"), unit_above_token=True, atom=Atom.EPISODE
    )

    name: Literal["kto"] = "kto"
    """Name of the loss."""
    beta: float = Field(0.1, gt=0)
    """How strongly the reference holds: the smaller, the further the policy may go."""
    desirable_weight: float = Field(1.0, gt=0)
    """lambda_D: weight of good episodes."""
    undesirable_weight: float = Field(1.0, gt=0)
    """lambda_U: weight of bad ones."""
    threshold: float | None = None
    """An episode whose score reaches this is desirable, below it is not. None: the sign of its A_E decides, and
    episodes without one, or with A_E = 0, are left out."""
    score: str = "env_return"
    """Score that `threshold` is compared with: env_return, or a scorer of whole episodes, @VERSION or not."""
    unit: Literal["turn", "sequence", "episode"] = "episode"
    """What is scored by S: turn, sequence or episode."""

    @model_validator(mode="after")
    def _score_has_a_threshold(self) -> Self:
        if self.score != type(self).model_fields["score"].default and self.threshold is None:
            raise ValueError(f"score {self.score!r} is compared with a threshold: set threshold, or leave score out")
        return self

    def resolved(self, needs: Needs) -> Needs:
        """What is labelled, and by what."""
        return replace(needs, labels=LabelRule(self.threshold, self.score), unit=Unit(self.unit))

    def prepare(self, rows_B: Sequence[LossRows]) -> Mapping[str, Tensor]:
        """What z0 is made of: the units' scores and their number, weighted by the plan."""
        weighed = [(required(rows.weight_U, "weight_U"), _scores(rows)) for rows in rows_B]
        return summed(
            {"kto_score": (weight_U * score_U).sum(), "kto_mass": weight_U.sum()} for weight_U, score_U in weighed
        )

    def compute(self, rows: LossRows) -> LossResult:
        """Sigmoid loss of each unit against the point of reference."""
        weight_U = required(rows.weight_U, "weight_U")
        score_U = _scores(rows)
        sign_U = required(rows.sign_U, "sign_U").to(score_U.dtype)
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


def _scores(rows: LossRows) -> Tensor:
    """S of each unit, [U]."""
    unit_N, weight_U = required(rows.unit_N, "unit_N"), required(rows.weight_U, "weight_U")
    return unit_sum(log_ratio_to_reference(rows), unit_N, len(weight_U))
