"""MaxRL: each trajectory against the mean of its siblings, divided by that mean."""

from typing import ClassVar

import numpy as np

from lake.errors import ContractError
from pipelines.credit.estimators.normalise import Scaling
from pipelines.credit.estimators.siblings import FlaggedCredit, ScaledSiblings
from pipelines.credit.steps import Bools, Floats, StepBatch


class MaxRL(ScaledSiblings):
    r"""Maximum likelihood reinforcement learning (arXiv 2602.02710; `maxrl` in the authors' verl fork).

    .. code-block:: text

        A = (R(tau) - mean_g R) / (mean_g R + 1e-6)        for every step of tau, over its task group g

    It is meant for scores of 0 and 1. Their mean is the success rate p, so the gradient weights a task by 1/p and
    approaches that of log p. A group without a success gives 0. Scores must not be negative, which would flip the sign
    of the quotient. The authors' code gives a lone trajectory its score times 1e6; here it gets 0.
    """

    name: ClassVar[str] = "maxrl"
    scaling: ClassVar[Scaling] = "mean_ratio"

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        negative = np.flatnonzero((score_E < 0.0) & ~excluded_E)
        if negative.size:
            first = int(negative[0])
            episode = batch.frame["episode_id"][int(batch.episodes.starts_K[first])]
            msg = (
                f"steps: episode {episode!r} has the score {score_E[first]}, and {self.name} divides by the mean score "
                "of a group, so scores must be 0 or more. Use a reward in [0, 1], or another estimator: rloo, dr_grpo."
            )
            raise ContractError(msg)
        return super()._compare(batch, score_E, excluded_E)
