"""OPO: each trajectory against the mean of its siblings, weighted by length."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.estimators.protocol import STATE_COLUMNS, Flag
from pipelines.credit.estimators.siblings import FlaggedCredit, SiblingEstimator, spread_credit
from pipelines.credit.steps import Bools, Floats, InputNeeds, StepBatch


class OPO(SiblingEstimator):
    r"""On-policy RL with the optimal reward baseline (arXiv 2505.23585; verl `opo`).

    .. code-block:: text

        A = R(tau) - b_g,        b_g = sum_g l(tau) R(tau) / sum_g l(tau)        for every step of tau

    over its task group g, with l the length of a trajectory. b is the baseline of least variance if the gradients of
    all tokens are orthogonal and of equal size. The advantages sum to 0 when weighted by length. An episode of unknown
    length (NULL) is not a sibling and has no advantage. An episode of length 0 has no weight; if all lengths are 0, all
    weigh the same.
    """

    name: ClassVar[str] = "opo"

    length: Literal["tokens", "steps"] = "tokens"
    """Unit of l: sampled tokens (`episodes.completion_tokens`, as in the paper), or active steps."""

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        needs = super().input_needs(present)
        return replace(needs, episode_columns=("completion_tokens",)) if self.length == "tokens" else needs

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        tokens = self.length == "tokens"
        length_E = batch.episode_numbers("completion_tokens") if tokens else batch.episodes.lengths_K.astype(np.float64)
        member_E = ~excluded_E & ~np.isnan(score_E) & ~np.isnan(length_E)
        siblings = Moments.of(score_E, member_E, batch.siblings)
        weight_E = np.where(member_E, length_E, 0.0)
        total_P = batch.siblings.sum(weight_E)
        weighted_P = batch.siblings.sum(np.where(member_E, weight_E * score_E, 0.0))
        baseline_P = np.divide(weighted_P, total_P, out=siblings.mean_K.copy(), where=total_P > 0.0)
        weighted_moments = replace(siblings, mean_K=baseline_P)
        a_episode_E = weighted_moments.normalise(score_E, member_E, batch.siblings, "mean_norm", "zero")
        flags = {Flag.UNKNOWN_LENGTH: batch.episodes.spread(np.isnan(length_E))}
        return spread_credit(batch, a_episode_E, siblings), flags
