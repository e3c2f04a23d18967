"""Group mean, batch deviation (Lite PPO)."""

from typing import ClassVar

import numpy as np

from pipelines.credit.estimators.normalise import Batches, Moments
from pipelines.credit.estimators.protocol import BatchOptions
from pipelines.credit.estimators.siblings import FlaggedCredit, SiblingEstimator, flag_batches, spread_credit
from pipelines.credit.steps import Bools, Floats, StepBatch


class BatchStd(BatchOptions, SiblingEstimator):
    r"""GRPO with the deviation of the whole batch (arXiv 2508.08221, "Lite PPO"; TRL `scale_rewards="batch"`).

    .. code-block:: text

        A = (R(tau) - mean_g R) / (std_b R + 1e-6)        for every step of tau

    over its task group g and its batch b, with one score per trajectory and the sample deviation of the scores (not of
    the centred scores, see `reinforce_pp_baseline`). A group whose scores hardly differ is not scaled up to the size of
    the other groups. A batch of one scored episode, or of equal scores, gives exactly 0, also where a group spans
    batches. TRL adds 1e-4. An episode without a batch (NULL key) is a sibling and has no advantage.
    """

    name: ClassVar[str] = "batch_std"

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        member_E = ~excluded_E & ~np.isnan(score_E)
        siblings = Moments.of(score_E, member_E, batch.siblings)
        centred_E = siblings.normalise(score_E, member_E, batch.siblings, "mean_norm", "zero")
        batches_credit = Batches.of(self._keys_E(batch)).whiten(score_E, member_E, centred_E)
        return spread_credit(batch, batches_credit.value_N, siblings), flag_batches(batch, batches_credit)
