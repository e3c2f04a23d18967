"""GiGPO over leave-one-out means: RLOO at both levels."""

from typing import ClassVar

from pipelines.credit.estimators.anchor_groups import AnchorGroups, StepCredit
from pipelines.credit.estimators.anchored import Scores, TwoLevelEstimator
from pipelines.credit.estimators.siblings import EpisodeCredit, episode_credit
from pipelines.credit.inputs.batch import StepBatch


class GiGPOLOO(TwoLevelEstimator):
    r"""GiGPO whose two baselines leave the trajectory (the step) itself out. Ours; RLOO is arXiv 2402.14740.

    .. code-block:: text

        A_E = R(tau) - c [i invalid] - mean of R over the other trajectories of the group
        A_S = S_i - mean of S over the other steps of the anchor group
        A   = A_E + omega A_S                                              or omega A_E + (1 - omega) A_S

    with R, S, c, omega and the anchors of `gigpo`. Each difference is n / (n - 1) times the centred value; nothing is
    divided by a deviation. A lone trajectory, a state that nobody else visited, and equal values give exactly 0. With
    `revisits="keep"` the others of an anchor group include other visits of the same trajectory, whose returns depend on
    the step: `revisits="first"` leaves one visit per trajectory, and the baselines independent.
    """

    name: ClassVar[str] = "gigpo_loo"

    def _episode_side(self, batch: StepBatch, scores: Scores) -> EpisodeCredit:
        penalty = self.invalid_action_penalty
        return episode_credit(batch, scores.score_E, scores.excluded_E, norm="leave_one_out", penalty=penalty)

    def _step_side(self, batch: StepBatch, scores: Scores) -> StepCredit:
        groups = AnchorGroups.of(batch, scores.anchor_key)
        return groups.credit(scores.step_score_N, scores.member_N, "leave_one_out", self.revisits)
