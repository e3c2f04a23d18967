"""Group mean, batch deviation (Lite PPO)."""

from typing import ClassVar

import numpy as np

from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.estimators.options import BatchOptions
from pipelines.credit.estimators.siblings import Compared, SiblingEstimator, batch_flags, credit_of_episodes
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch


class BatchStd(BatchOptions, SiblingEstimator):
    r"""GRPO with the deviation of the whole batch (arXiv 2508.08221, "Lite PPO"; TRL `scale_rewards="batch"`).

    .. code-block:: text

        A = (R(tau) - mean_g R) / (std_b R + 1e-6)        for every step of tau

    over its task group g and its batch b, one score per trajectory, sample deviation of the scores themselves (not of
    the centred ones, see `reinforce_pp_baseline`). A group where scores hardly differ is not blown up to the size of
    the others. A batch of one scored episode, or of equal scores, gives exactly 0, also where a group spans batches.
    TRL adds 1e-4. An episode of no batch (batch key NULL) is a sibling and has no advantage.
    """

    name: ClassVar[str] = "batch_std"

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Compared:
        member_E = ~excluded_E & ~np.isnan(score_E)
        siblings = Moments.of(score_E, member_E, batch.siblings)
        centred_E = siblings.normalise(score_E, member_E, batch.siblings, "mean_norm", "zero")
        scaled = self._batches_E(batch).scale(centred_E, score_E, member_E)
        return credit_of_episodes(batch, scaled.value_N, siblings), batch_flags(batch, scaled)
