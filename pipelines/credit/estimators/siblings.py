"""Bases of the estimators that compare a trajectory's score with its siblings' and give all its steps one advantage.

Axes: `_N` rows, `_E` episodes, `_P` task groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipelines.credit.estimators.normalise import BatchCredit, Batches, Moments, Scaling, Singleton
from pipelines.credit.estimators.protocol import BatchOptions, CreditRows, Flag, ScoreOptions
from pipelines.credit.steps import Bools, Floats, StepBatch

Baseline: TypeAlias = Literal["trajectories", "rows"]


@dataclass(frozen=True, slots=True)
class EpisodeCredit:
    """Episode advantages and the groups they were computed in."""

    a_episode_N: Floats
    """A_E of each row, NaN where unknown."""
    size_P: npt.NDArray[np.int32]
    """Scored siblings that take part, per group."""
    dead_P: Bools
    """Whether a group has two or more of them, all with the same score."""


def credit_episodes(
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

    `baseline="trajectories"`: statistics over one unpenalised score per trajectory. The penalty c of a malformed
    action, in the unit of the scores, is subtracted from the row's advantage. `rows`: statistics over the penalised
    scores of all rows.
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
        # A malformed action costs c, or c / max(std, c) where scores are scaled. Dividing by the deviation alone would
        # have no bound: with judge scores of .9, .91, .9 and .9 it would cost 20. A lone trajectory has std 1 under
        # `raw`, as for its score; under `zero` a malformed action costs nothing.
        is_alone_P = siblings.count_K == 1
        penalty_P = np.full(len(is_alone_P), penalty)
        if norm == "mean_std_norm" and penalty > 0.0:
            penalty_P /= np.maximum(np.where(is_alone_P, 1.0, siblings.std_K), penalty)
        if singleton == "zero":
            penalty_P[is_alone_P] = 0.0
        a_episode_N = batch.episodes.spread(a_episode_E) - batch.groups.spread(penalty_P) * batch.invalid_N
    return EpisodeCredit(a_episode_N, siblings.count_K.astype(np.int32), siblings.tied_K)


FlaggedCredit: TypeAlias = tuple[EpisodeCredit, Mapping[Flag, Bools]]
"""Episode advantages, and the flags of this comparison."""


class SiblingEstimator(ScoreOptions, ABC):
    """Base of the estimators whose advantage is `a_episode`. They compute no `a_step`, anchors or returns."""

    @abstractmethod
    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        """Compute episode advantages from the scores (NaN where unknown) of the episodes that are not excluded."""

    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute advantages; see `Estimator.credit`."""
        return self._make_rows(batch, self._scores_E(batch), batch.score_E)

    def _make_rows(self, batch: StepBatch, score_E: Floats, assigned_E: Floats) -> CreditRows:
        excluded_E = self._excluded_E(batch, assigned_E)
        episode, own_flags = self._compare(batch, score_E, excluded_E)
        flags = {**self._flag_endings(batch, excluded_E), **flag_siblings(batch, score_E, episode), **own_flags}
        advantage_N = np.where(self._masked_N(batch), np.nan, episode.a_episode_N)
        return CreditRows(advantage_N=advantage_N, size_P=episode.size_P, flags=flags, a_episode_N=episode.a_episode_N)


class ScaledSiblings(SiblingEstimator, ABC):
    """Base of the estimators that compare siblings by one normalisation, `scaling`."""

    scaling: ClassVar[Scaling]

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        return credit_episodes(batch, score_E, excluded_E, norm=self.scaling), {}


class PenalisedSiblings(SiblingEstimator, ABC):
    """Episode side of GiGPO with its options: unit of the statistics, lone trajectories, malformed actions."""

    scaling: ClassVar[Scaling]

    baseline: Baseline = "trajectories"
    """Unit of the group statistics: trajectories, or step rows (as in verl-agent)."""
    singleton: Singleton = "zero"
    """Advantage in a task group of one unit: 0, or its raw score (`raw`, as in verl)."""
    invalid_action_penalty: float = Field(default=0.0, ge=0.0)
    """Penalty c of a malformed action, in the unit of the scores, as in GiGPO."""

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        episode = credit_episodes(
            batch,
            score_E,
            excluded_E,
            norm=self.scaling,
            baseline=self.baseline,
            singleton=self.singleton,
            penalty=self.invalid_action_penalty,
        )
        return episode, {}


def flag_siblings(batch: StepBatch, score_E: Floats, episode: EpisodeCredit) -> Mapping[Flag, Bools]:
    """Return the flags of a comparison of siblings."""
    return {
        Flag.DEAD_GROUP: batch.groups.spread(episode.dead_P),
        Flag.SINGLETON_GROUP: batch.groups.spread(episode.size_P == 1),
        Flag.UNSCORED: batch.episodes.spread(np.isnan(score_E)),
    }


def spread_credit(batch: StepBatch, a_episode_E: Floats, siblings: Moments) -> EpisodeCredit:
    """Give the advantage of each episode (NaN where unknown) to all its rows."""
    size_P: npt.NDArray[np.int32] = siblings.count_K.astype(np.int32)
    return EpisodeCredit(batch.episodes.spread(a_episode_E), size_P, siblings.tied_K)


def flag_batches(batch: StepBatch, credit: BatchCredit) -> Mapping[Flag, Bools]:
    """Return the flags of a comparison of episodes inside their batches."""
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
        """Normalise episode values over batches; return advantages (NaN where unknown) and flags.

        `compared_E` is the result of the group stage. Silent groups count in the statistics and get exactly 0: in
        batches of whole groups, the batch mean is 0 only up to rounding.
        """
        batch_credit = Batches.of(self._keys_E(batch)).whiten(compared_E, member_E)
        silent_E = batch.siblings.spread(silent_P) & ~np.isnan(batch_credit.value_N)
        return np.where(silent_E, 0.0, batch_credit.value_N), flag_batches(batch, batch_credit)
