"""GiGPO with leave-one-out means: RLOO at both levels."""

from typing import ClassVar

from pipelines.credit.estimators.anchored import Scores, TwoLevelEstimator
from pipelines.credit.estimators.normalise import AnchorGroups, StepCredit
from pipelines.credit.estimators.siblings import EpisodeCredit, credit_episodes
from pipelines.credit.steps import StepBatch


class GiGPOLOO(TwoLevelEstimator):
    r"""GiGPO with baselines that exclude the trajectory (the step) itself. Ours; RLOO is arXiv 2402.14740.

    .. code-block:: text

        A_E = R(tau) - c [i invalid] - mean of R over the other trajectories of the group
        A_S = S_i - mean of S over the other steps of the anchor group
        A   = A_E + omega A_S                                              or omega A_E + (1 - omega) A_S

    with R, S, c, omega and the anchors of `gigpo`. Each difference is n / (n - 1) times the centred value, without a
    division by a deviation. A lone trajectory, a state of one step, and equal values give exactly 0. With
    `revisits="keep"` an anchor group includes other visits of the same trajectory, whose returns depend on the step.
    `revisits="first"` takes one visit per trajectory, so the baselines are independent.
    """

    name: ClassVar[str] = "gigpo_loo"

    def _episode_side(self, batch: StepBatch, scores: Scores) -> EpisodeCredit:
        penalty = self.invalid_action_penalty
        return credit_episodes(batch, scores.score_E, scores.excluded_E, norm="leave_one_out", penalty=penalty)

    def _step_side(self, batch: StepBatch, scores: Scores) -> StepCredit:
        groups = AnchorGroups.of(batch, scores.anchor_key)
        return groups.credit(scores.step_score_N, scores.member_N, "leave_one_out", self.revisits)
