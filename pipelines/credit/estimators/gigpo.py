"""GiGPO, group-in-group policy optimisation (arXiv 2505.10978), over all recorded trajectories.

It makes two comparisons and needs no critic: a trajectory against its siblings (as in GRPO), and a step against the
other steps from the same state (the anchor). docs/guides/gigpo.md lists the differences from the paper and from the
reference code, with reasons.

Axes: `_N` rows, `_E` episodes.
"""

from typing import ClassVar

from pipelines.credit.estimators.anchored import Scores, TwoLevelEstimator
from pipelines.credit.estimators.normalise import AnchorGroups, Norm, Singleton, StepCredit
from pipelines.credit.estimators.siblings import Baseline, EpisodeCredit, credit_episodes
from pipelines.credit.steps import StepBatch


class GiGPO(TwoLevelEstimator):
    r"""Advantages of a step i of trajectory tau(i), whose siblings are the task group g(i).

    .. code-block:: text

        return-to-go        G_i = sum_{k >= t} gamma^(k - t) r_k           (no bootstrap)
        episode score       R(tau)
        step score          S_i = G_i - c [i invalid]
        episode advantage   A_E = (R(tau(i)) - mean_g R) / (std_g R + 1e-6) - c [i invalid] / max(std_g R, c)
        step advantage      A_S = (S_i - mean_a S) / (std_a S + 1e-6)      over the anchor group a(i)
        advantage           A   = A_E + omega A_S                          or omega A_E + (1 - omega) A_S

    with one R per trajectory (`baseline="trajectories"`); `mean_norm` omits the divisions. `baseline="rows"` normalises
    R(tau(i)) - c [i invalid] over the rows of the group, as the reference code does. Standard deviations are sample
    deviations. A group of equal values gives exactly 0, and so does a state of one step. The sum omits a term of weight
    0 with its NULLs: `omega=0` is GRPO.

    NULL means unknown, never 0. An episode without a score has no A_E and is not a sibling. A step with a NULL reward
    at or after it has no return and is not a member of its anchor group.
    """

    name: ClassVar[str] = "gigpo"

    episode_norm: Norm = "mean_std_norm"
    """Normalisation of the episode scores of a group: centre, or centre and scale."""
    step_norm: Norm = "mean_std_norm"
    """Normalisation of the step scores of an anchor group: centre, or centre and scale."""
    baseline: Baseline = "trajectories"
    """Unit of the group statistics: trajectories, or step rows (the reference code)."""
    singleton: Singleton = "zero"
    """A_E in a task group of one unit: 0, or its raw score (`raw`, the reference code)."""

    def _episode_side(self, batch: StepBatch, scores: Scores) -> EpisodeCredit:
        return credit_episodes(
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
