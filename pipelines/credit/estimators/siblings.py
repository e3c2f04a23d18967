"""Estimators that give every step of a trajectory one advantage: its score against those of its siblings.

Axes: `_N` rows, `_E` episodes, `_P` task groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipelines.credit.estimators.normalise import BatchCredit, Moments, Scaling, Singleton
from pipelines.credit.estimators.options import BatchOptions, ScoreOptions
from pipelines.credit.estimators.protocol import CreditRows
from pipelines.credit.flags import Flag
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch

Baseline: TypeAlias = Literal["trajectories", "rows"]


@dataclass(frozen=True, slots=True)
class EpisodeCredit:
    """Episode advantages and what they rest on."""

    a_episode_N: Floats
    """A_E of each row, NaN where unknown."""
    size_P: npt.NDArray[np.int32]
    """Scored siblings that take part."""
    dead_P: Bools
    """Two or more of them, all with the same score."""


def episode_credit(
    batch: StepBatch,
    score_E: Floats,
    excluded_E: Bools,
    *,
    norm: Scaling,
    baseline: Baseline = "trajectories",
    singleton: Singleton = "zero",
    penalty: float = 0.0,
) -> EpisodeCredit:
    """Normalise episode scores (NaN where unknown) inside each task group; see `normalise.py`.

    `baseline="trajectories"`: statistics over one unpenalised score per trajectory; the penalty c of a malformed
    action, in the unit of the scores, is taken from the row's own advantage. `rows`: statistics over the penalised
    score of every row.
    """
    member_E = ~excluded_E & ~np.isnan(score_E)
    siblings = Moments.of(score_E, member_E, batch.siblings)
    if baseline == "rows":
        score_N = batch.episodes.spread(score_E) - penalty * batch.invalid_N
        member_N = batch.episodes.spread(member_E)
        rows = Moments.of(score_N, member_N, batch.groups)
        a_episode_N = rows.normalise(score_N, member_N, batch.groups, norm, singleton)
    else:
        a_episode_E = siblings.normalise(score_E, member_E, batch.siblings, norm, singleton)
        penalty_P = _scaled_penalty(siblings, norm, singleton, penalty)
        a_episode_N = batch.episodes.spread(a_episode_E) - batch.groups.spread(penalty_P) * batch.invalid_N
    return EpisodeCredit(a_episode_N, siblings.count_K.astype(np.int32), siblings.tied_K)


def _scaled_penalty(siblings: Moments, norm: Scaling, singleton: Singleton, penalty: float) -> Floats:
    """What a malformed action costs in each group, in the unit of A_E: c, or c / max(std, c) where scores are scaled.

    Dividing by the deviation alone would have no bound: with judge scores of .9, .91, .9 and .9 one malformed action
    would cost 20. A lone trajectory has none: under `raw` it is 1, as for its score; under `zero` it costs nothing.
    """
    alone_P = siblings.count_K == 1
    penalty_P = np.full(len(alone_P), penalty)
    if norm == "mean_std_norm" and penalty > 0.0:
        penalty_P /= np.maximum(np.where(alone_P, 1.0, siblings.std_K), penalty)
    if singleton == "zero":
        penalty_P[alone_P] = 0.0
    return penalty_P


Compared: TypeAlias = tuple[EpisodeCredit, Mapping[Flag, Bools]]
"""Episode advantages, and flags beyond the usual ones that say what they rest on."""


class SiblingEstimator(ScoreOptions, ABC):
    """Base of the estimators whose advantage is `a_episode`; `a_step`, anchors and returns are not computed."""

    @abstractmethod
    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Compared:
        """Episode advantages from scores (NaN where unknown) of the episodes that are not excluded."""

    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps; see `Estimator.credit`."""
        return self._rows_of(batch, self._scores_E(batch), batch.score_E)

    def _rows_of(self, batch: StepBatch, score_E: Floats, given_E: Floats) -> CreditRows:
        """The rows, from the scores that are compared and those that somebody gave (see `_excluded_E`)."""
        excluded_E = self._excluded_E(batch, given_E)
        episode, own_flags = self._compare(batch, score_E, excluded_E)
        flags = {**self._fate_flags(batch, excluded_E), **sibling_flags(batch, score_E, episode), **own_flags}
        advantage_N = np.where(self._masked_N(batch), np.nan, episode.a_episode_N)
        return CreditRows(advantage_N=advantage_N, size_P=episode.size_P, flags=flags, a_episode_N=episode.a_episode_N)


class ScaledSiblings(SiblingEstimator, ABC):
    """Siblings compared by one normalisation; the subclass says which."""

    scaling: ClassVar[Scaling]

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Compared:
        return episode_credit(batch, score_E, excluded_E, norm=self.scaling), {}


class PenalisedSiblings(SiblingEstimator, ABC):
    """The episode side of GiGPO with its options: unit of the statistics, lone trajectories, malformed actions."""

    scaling: ClassVar[Scaling]

    baseline: Baseline = "trajectories"
    """Unit of the group statistics: every trajectory once, or every step row once (as verl-agent does)."""
    singleton: Singleton = "zero"
    """A task group of one unit has A = 0, or its raw score (`raw`, as verl does)."""
    invalid_action_penalty: float = Field(default=0.0, ge=0.0)
    """c, in the unit of the scores: taken from the score of a row whose action was malformed, as in GiGPO."""

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Compared:
        episode = episode_credit(
            batch,
            score_E,
            excluded_E,
            norm=self.scaling,
            baseline=self.baseline,
            singleton=self.singleton,
            penalty=self.invalid_action_penalty,
        )
        return episode, {}


def sibling_flags(batch: StepBatch, score_E: Floats, episode: EpisodeCredit) -> Mapping[Flag, Bools]:
    """What the comparison of siblings rests on."""
    return {
        Flag.DEAD_GROUP: batch.groups.spread(episode.dead_P),
        Flag.SINGLETON_GROUP: batch.groups.spread(episode.size_P == 1),
        Flag.UNSCORED: batch.episodes.spread(np.isnan(score_E)),
    }


def credit_of_episodes(batch: StepBatch, a_episode_E: Floats, siblings: Moments) -> EpisodeCredit:
    """The advantage of each episode (NaN where unknown), given to all its rows."""
    size_P: npt.NDArray[np.int32] = siblings.count_K.astype(np.int32)
    return EpisodeCredit(batch.episodes.spread(a_episode_E), size_P, siblings.tied_K)


def batch_flags(batch: StepBatch, credit: BatchCredit) -> Mapping[Flag, Bools]:
    """Return what the comparison of episodes inside their batches rests on."""
    return {
        Flag.CONSTANT_BATCH: batch.episodes.spread(credit.tied_N),
        Flag.SINGLETON_BATCH: batch.episodes.spread(credit.single_N),
        Flag.UNKNOWN_BATCH: batch.episodes.spread(credit.unknown_N),
    }


class WhitenedSiblings(BatchOptions, SiblingEstimator, ABC):
    """Base of the estimators with a group stage and a batch stage."""

    def _whiten(
        self, batch: StepBatch, compared_E: Floats, member_E: Bools, silent_P: Bools
    ) -> tuple[Floats, Mapping[Flag, Bools]]:
        """The batch stage: advantages of episodes, NaN where unknown, and its flags.

        `compared_E` is what the group stage gave each episode. Silent groups count in the statistics and get exactly 0:
        the batch mean is 0 only up to rounding where batches hold whole groups.
        """
        whitened = self._batches_E(batch).whiten(compared_E, member_E)
        silent_E = batch.siblings.spread(silent_P) & ~np.isnan(whitened.value_N)
        return np.where(silent_E, 0.0, whitened.value_N), batch_flags(batch, whitened)
