"""OPO: each trajectory against the mean of its siblings, in which longer ones weigh more."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.estimators.protocol import STATE_COLUMNS
from pipelines.credit.estimators.siblings import Compared, SiblingEstimator, credit_of_episodes
from pipelines.credit.flags import Flag
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch
from pipelines.credit.inputs.columns import InputNeeds


class OPO(SiblingEstimator):
    r"""On-policy RL with the optimal reward baseline (arXiv 2505.23585; verl `opo`).

    .. code-block:: text

        A = R(tau) - b_g,        b_g = sum_g l(tau) R(tau) / sum_g l(tau)        for every step of tau

    over its task group g, with l the length of a trajectory. b is the baseline of least variance if all tokens have
    gradients of the same size that are orthogonal. The advantages sum to 0 when weighted by length. An episode whose
    length is NULL is no sibling and has no advantage. One of length 0 has no weight; if all are, all weigh the same.
    """

    name: ClassVar[str] = "opo"

    length: Literal["tokens", "steps"] = "tokens"
    """l: sampled tokens (`episodes.completion_tokens`, the paper's), or active steps, where tokens are not recorded."""

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        needs = super().needed(present)
        return replace(needs, episode_columns=("completion_tokens",)) if self.length == "tokens" else needs

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Compared:
        tokens = self.length == "tokens"
        length_E = batch.episode_numbers("completion_tokens") if tokens else batch.episodes.lengths_K.astype(np.float64)
        member_E = ~excluded_E & ~np.isnan(score_E) & ~np.isnan(length_E)
        siblings = Moments.of(score_E, member_E, batch.siblings)
        weight_E = np.where(member_E, length_E, 0.0)
        total_P = batch.siblings.sum(weight_E)
        weighted_P = batch.siblings.sum(np.where(member_E, weight_E * score_E, 0.0))
        baseline_P = np.divide(weighted_P, total_P, out=siblings.mean_K.copy(), where=total_P > 0.0)
        weighted = replace(siblings, mean_K=baseline_P)
        a_episode_E = weighted.normalise(score_E, member_E, batch.siblings, "mean_norm", "zero")
        flags = {Flag.UNKNOWN_LENGTH: batch.episodes.spread(np.isnan(length_E))}
        return credit_of_episodes(batch, a_episode_E, siblings), flags
