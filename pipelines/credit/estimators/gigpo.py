"""GiGPO, group-in-group policy optimisation (arXiv 2505.10978), over all the trajectories you have.

Two comparisons, no critic: a trajectory against its siblings (as GRPO does), and a step against the other steps that
were taken from the same state (the anchor). docs/guides/gigpo.md lists where this differs from paper and reference
code, and why.

Axes: `_N` rows, `_E` episodes.
"""

from typing import ClassVar

from pipelines.credit.estimators.anchor_groups import AnchorGroups, StepCredit
from pipelines.credit.estimators.anchored import Scores, TwoLevelEstimator
from pipelines.credit.estimators.normalise import Norm, Singleton
from pipelines.credit.estimators.siblings import Baseline, EpisodeCredit, episode_credit
from pipelines.credit.inputs.batch import StepBatch


class GiGPO(TwoLevelEstimator):
    r"""Advantages of a step i of trajectory tau(i), whose siblings are the task group g(i).

    .. code-block:: text

        return-to-go        G_i = sum_{k >= t} gamma^(k - t) r_k           (no bootstrap)
        episode score       R(tau)
        step score          S_i = G_i - c [i invalid]
        episode advantage   A_E = (R(tau(i)) - mean_g R) / (std_g R + 1e-6) - c [i invalid] / max(std_g R, c)
        step advantage      A_S = (S_i - mean_a S) / (std_a S + 1e-6)      over the anchor group a(i)
        advantage           A   = A_E + omega A_S                          or omega A_E + (1 - omega) A_S

    with one R per trajectory (`baseline="trajectories"`); `mean_norm` leaves the divisions out. Under
    `baseline="rows"` R(tau(i)) - c [i invalid] is normalised over the rows of the group, as the reference code does.
    Standard deviations are sample deviations; a group of equal values gives exactly 0, and so does a state that nobody
    else visited. A term of weight 0 is left out of the sum, its NULLs included: `omega=0` is GRPO.

    NULL is unknown, never 0. An episode without a score has no A_E and is no sibling; a step with a NULL reward at or
    after it has no return and is no member of its anchor.
    """

    name: ClassVar[str] = "gigpo"

    episode_norm: Norm = "mean_std_norm"
    """Centre, or centre and scale, the episode scores of a group."""
    step_norm: Norm = "mean_std_norm"
    """Centre, or centre and scale, the step scores of an anchor group."""
    baseline: Baseline = "trajectories"
    """Unit of the group statistics: every trajectory once, or every step row once (the reference code)."""
    singleton: Singleton = "zero"
    """A task group of one unit has A_E = 0, or its raw score (`raw`, the reference code)."""

    def _episode_side(self, batch: StepBatch, scores: Scores) -> EpisodeCredit:
        return episode_credit(
            batch,
            scores.score_E,
            scores.excluded_E,
            norm=self.episode_norm,
            baseline=self.baseline,
            singleton=self.singleton,
            penalty=self.invalid_action_penalty,
        )

    def _step_side(self, batch: StepBatch, scores: Scores) -> StepCredit:
        groups = AnchorGroups.of(batch, scores.anchor_key)
        return groups.credit(scores.step_score_N, scores.member_N, self.step_norm, self.revisits)
