"""Estimators that give every step of a trajectory one advantage: its score against those of its siblings.

Axes: `_N` rows, `_E` episodes, `_P` task groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipelines.credit.batch import StepBatch
from pipelines.credit.credit_rows import CreditRows
from pipelines.credit.episode_credit import Baseline, EpisodeCredit, episode_credit
from pipelines.credit.estimators.options import ScoreOptions
from pipelines.credit.flags import Flag
from pipelines.credit.normalise import Moments, Scaling, Singleton
from pipelines.credit.segments import Bools, Floats


@dataclass(frozen=True, slots=True)
class Comparison:
    """Episode advantages, and flags beyond the usual ones that say what they rest on."""

    episode: EpisodeCredit
    flags: Mapping[Flag, Bools] = field(default_factory=dict)


class SiblingEstimator(ScoreOptions, ABC):
    """Base of the estimators whose advantage is `a_episode`; `a_step`, anchors and returns are not computed."""

    @abstractmethod
    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Comparison:
        """Episode advantages from scores (NaN where unknown) of the episodes that are not excluded."""

    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps; see `Estimator.credit`."""
        return self._rows_of(batch, self._scores_E(batch), batch.score_E)

    def _rows_of(self, batch: StepBatch, score_E: Floats, given_E: Floats) -> CreditRows:
        """The rows, from the scores that are compared and those that somebody gave (see `_excluded_E`)."""
        excluded_E = self._excluded_E(batch, given_E)
        compared = self._compare(batch, score_E, excluded_E)
        episode = compared.episode
        flags = {
            **self._fate_flags(batch, excluded_E),
            **sibling_flags(batch, score_E, episode),
            **compared.flags,
        }
        advantage_N = np.where(self._masked_N(batch), np.nan, episode.a_episode_N)
        return CreditRows(advantage_N=advantage_N, size_P=episode.size_P, flags=flags, a_episode_N=episode.a_episode_N)


class ScaledSiblings(SiblingEstimator, ABC):
    """Siblings compared by one normalisation; the subclass says which."""

    scaling: ClassVar[Scaling]

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Comparison:
        return Comparison(episode_credit(batch, score_E, excluded_E, norm=self.scaling))


class PenalisedSiblings(SiblingEstimator, ABC):
    """The episode side of GiGPO with its options: unit of the statistics, lone trajectories, malformed actions."""

    scaling: ClassVar[Scaling]

    baseline: Baseline = "trajectories"
    """Unit of the group statistics: every trajectory once, or every step row once (as verl-agent does)."""
    singleton: Singleton = "zero"
    """A task group of one unit has A = 0, or its raw score (`raw`, as verl does)."""
    invalid_action_penalty: float = Field(default=0.0, ge=0.0)
    """c, in the unit of the scores: taken from the score of a row whose action was malformed, as in GiGPO."""

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Comparison:
        return Comparison(
            episode_credit(
                batch,
                score_E,
                excluded_E,
                norm=self.scaling,
                baseline=self.baseline,
                singleton=self.singleton,
                penalty=self.invalid_action_penalty,
            )
        )


def sibling_flags(batch: StepBatch, score_E: Floats, episode: EpisodeCredit) -> Mapping[Flag, Bools]:
    """What the comparison of siblings rests on."""
    return {
        Flag.DEAD_GROUP: batch.groups.spread(episode.dead_P),
        Flag.SINGLETON_GROUP: batch.groups.spread(episode.size_P == 1),
        Flag.UNSCORED: batch.episodes.spread(np.isnan(score_E)),
    }


def credit_of_episodes(batch: StepBatch, a_episode_E: Floats, siblings: Moments) -> EpisodeCredit:
    """The advantage of each episode, given to all its rows.

    Args:
        batch: the steps.
        a_episode_E: A of each episode, NaN where unknown.
        siblings: statistics of the siblings' scores.
    """
    size_P: npt.NDArray[np.int32] = siblings.count_K.astype(np.int32)
    return EpisodeCredit(batch.episodes.spread(a_episode_E), size_P, siblings.tied_K)
