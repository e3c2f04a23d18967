"""REINFORCE on stored data (Williams 1992), each episode's log-probability times its advantage.

    L = -1/U sum_U sum_t sg(c_t) A lp_t

c is the weight of `correction`: by default the ratio of the current to the behaviour policy, truncated at 2, which is 1
on data of the current policy. With leave-one-out advantages (`trajlake credit rloo`, arXiv 2402.14740) this is
episode-level RLOO over multi-turn trajectories: per episode the sum of its action tokens' log-probabilities over all
turns times R_i minus the mean of its siblings.

`correction.method = "none"` makes it advantage-weighted likelihood at temperature 1, which needs no log-probabilities.
Use it on data of the current policy sampled at temperature 1, or knowing that it is biased; negative advantages push
without bound then.
"""

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from trainer.data.stream.aggregation import Aggregation, Unit
from trainer.losses.base import LossResult, LossRows, Needs, Temperature, required
from trainer.losses.correction import CorrectionConfig, CorrectionMethod
from trainer.losses.policy import CorrectedLoss, corrected, regularised


class ImportanceConfig(CorrectionConfig):
    """The importance weight of REINFORCE."""

    method: CorrectionMethod = CorrectionMethod.TOKEN_TRUNCATE
    """What is done about rho = current policy / behaviour policy; none leaves the weight out."""

    @model_validator(mode="after")
    def _has_no_ratio_to_decouple(self) -> Self:
        if self.decoupled:
            raise ValueError("reinforce has no ratio of its own, so there is nothing to decouple: leave it out")
        return self


class Reinforce(CorrectedLoss):
    """REINFORCE with a truncated importance weight."""

    always: ClassVar[Needs] = Needs(
        advantages=True, entropy=True, unit=Unit.EPISODE, aggregation=Aggregation.UNIT_MEAN_TOKEN_SUM
    )

    name: Literal["reinforce"] = "reinforce"
    """Name of the loss."""
    correction: ImportanceConfig = ImportanceConfig()
    """Importance weight."""

    def resolved(self, needs: Needs) -> Needs:
        """Ratios are taken at the temperature of sampling."""
        needs = super().resolved(needs)
        return replace(needs, temperature=Temperature.AS_SAMPLED) if needs.behaviour_logprobs else needs

    def compute(self, rows: LossRows) -> LossResult:
        """Policy gradient weighted by the correction."""
        loss_N = -required(rows.advantages_N, "advantages_N") * rows.logprobs_N
        loss_N, sums = corrected(rows, self.correction, loss_N, weighted=True)
        return regularised(rows, self, loss_N, sums)
