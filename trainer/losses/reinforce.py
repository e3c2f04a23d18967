"""REINFORCE on stored data (Williams 1992), each episode's log-probability times its advantage.

    L = -1/U sum_U sum_t sg(c_t) A lp_t

c is the weight of `correction`: by default the ratio of the current to the behaviour policy, truncated at 2, which is 1
on data of the current policy. With leave-one-out advantages (`trajlake credit rloo`, arXiv 2402.14740) this is
episode-level RLOO over multi-turn trajectories. Each episode contributes the sum of its action tokens'
log-probabilities over all turns times R_i minus the mean of its siblings.

`correction.method = "none"` makes it advantage-weighted likelihood at temperature 1, which needs no log-probabilities.
Use it on data of the current policy sampled at temperature 1, or accept a bias. Negative advantages then push without
bound.
"""

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from trainer.losses.base import Aggregation, LossResult, LossRows, Needs, Temperature, Unit, require
from trainer.losses.policy import CorrectedLoss, CorrectionConfig, CorrectionMethod, add_regularisers, apply_correction


class ImportanceConfig(CorrectionConfig):
    """The importance weight of REINFORCE."""

    method: CorrectionMethod = CorrectionMethod.TOKEN_TRUNCATE
    """Use of rho = current policy / behaviour policy; none omits the weight."""

    @model_validator(mode="after")
    def _check_decoupled(self) -> Self:
        if self.decoupled:
            raise ValueError("reinforce takes no ratio, so correction.decoupled has no effect: leave it out")
        return self


class Reinforce(CorrectedLoss):
    """REINFORCE with a truncated importance weight."""

    base_needs: ClassVar[Needs] = Needs(
        advantages=True, entropy=True, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_SUM
    )

    name: Literal["reinforce"] = "reinforce"
    """Name of the loss."""
    correction: ImportanceConfig = ImportanceConfig()
    """Importance weight."""

    def resolve_needs(self, needs: Needs) -> Needs:
        """Take ratios at the sampling temperature."""
        needs = super().resolve_needs(needs)
        return replace(needs, temperature=Temperature.AS_SAMPLED) if needs.behaviour_logprobs else needs

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the policy gradient weighted by the correction."""
        loss_N = -require(rows.advantages_N, "advantages_N") * rows.logprobs_N
        loss_N, sums = apply_correction(rows, self.correction, loss_N, weighted=True)
        return add_regularisers(rows, self, loss_N, sums)
