"""REINFORCE++ with baseline: group mean, then normalisation over the batch."""

from typing import ClassVar

import numpy as np

from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.estimators.siblings import FlaggedCredit, WhitenedSiblings, spread_credit
from pipelines.credit.steps import Bools, Floats, StepBatch


class ReinforcePPBaseline(WhitenedSiblings):
    r"""The group-sampling variant of REINFORCE++ (arXiv 2501.03262; verl `reinforce_plus_plus_baseline`).

    .. code-block:: text

        A' = R(tau) - mean_g R
        A  = (A' - mean_b A') / (std_b A' + 1e-6)        for every step of tau

    over its task group g and its batch b, with one A' per trajectory and the sample deviation. Dead and singleton
    groups give exactly 0. verl takes the batch statistics over tokens, so that long trajectories weigh more, gives a
    lone trajectory its raw score, and adds 1e-8 to the variance. KL in the reward is not part of it (see `token_kl`).
    """

    name: ClassVar[str] = "reinforce_pp_baseline"

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        member_E = ~excluded_E & ~np.isnan(score_E)
        siblings = Moments.of(score_E, member_E, batch.siblings)
        centred_E = siblings.normalise(score_E, member_E, batch.siblings, "mean_norm", "zero")
        silent_P = siblings.tied_K | (siblings.count_K == 1)
        a_episode_E, flags = self._whiten(batch, centred_E, member_E, silent_P)
        return spread_credit(batch, a_episode_E, siblings), flags
