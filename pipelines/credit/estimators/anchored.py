"""Bases of the estimators that compare trajectories, and then steps from the same state."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from pipelines.credit.anchors import Anchors
from pipelines.credit.anchors.definitions import ExactText
from pipelines.credit.estimators.normalise import Revisits, StepCredit
from pipelines.credit.estimators.protocol import STATE_COLUMNS, CreditRows, Flag, ReturnOptions, ScoreOptions
from pipelines.credit.estimators.siblings import EpisodeCredit, flag_siblings
from pipelines.credit.steps import Bools, Floats, InputNeeds, StepBatch


@dataclass(frozen=True, slots=True)
class Scores:
    """Compared quantities of a batch."""

    score_E: Floats
    """R of each episode, NaN where unknown."""
    excluded_E: Bools
    """Episodes that are not compared."""
    anchor_key: pl.Series
    """NULL where unknown."""
    step_score_N: Floats
    """S of each row, NaN where unknown."""
    member_N: Bools
    """Rows of episodes that take part, with a known anchor."""
    anchorless_N: Bools
    """Rows of compared episodes without an anchor: their state is unknown, or the definition excludes it. Their step
    advantage is exactly 0."""


TwoLevelCredit: TypeAlias = tuple[EpisodeCredit, StepCredit, Floats]
"""Episode side, step side, and A of every row (NaN where a term of non-zero weight is unknown)."""


class AnchoredEstimator(ScoreOptions, ReturnOptions, ABC):
    """Base of the estimators with anchors: an episode side, a step side, and their combination."""

    invalid_action_penalty: float = Field(default=0.1, ge=0.0)
    """Penalty c of a malformed action, in the unit of the rewards."""
    revisits: Revisits = "keep"
    """Members of an anchor group: all visits, or the first visit of each trajectory (later visits get A_S = 0)."""
    anchors: Anchors = ExactText()
    """Definition of the same state."""

    @abstractmethod
    def _compare(self, batch: StepBatch, scores: Scores) -> TwoLevelCredit:
        """Compute episode advantages, step advantages, and their combination."""

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        return replace(super().input_needs(present), anchor_columns=tuple(self.anchors.columns(list(present))))

    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute advantages; see `Estimator.credit`."""
        return_N = self._returns_N(batch)
        score_E = self._scores_E(batch)
        excluded_E = self._excluded_E(batch, batch.score_E)
        included_N = ~batch.episodes.spread(excluded_E)
        anchor_key = self.anchors.keys(batch, included_N)
        known_N = anchor_key.is_not_null().to_numpy()
        step_score_N = return_N - self.invalid_action_penalty * batch.invalid_N
        anchorless_N = included_N & ~known_N
        state = next((name for name in ("state_hash", "state") if name in batch.frame.columns), None)
        is_recorded_N = (
            np.zeros(len(return_N), np.bool_) if state is None else batch.frame[state].is_not_null().to_numpy()
        )
        left_out_N = anchorless_N & is_recorded_N
        member_N = included_N & known_N
        scores = Scores(score_E, excluded_E, anchor_key, step_score_N, member_N, anchorless_N)
        episode, step, advantage_N = self._compare(batch, scores)
        flags = {
            **self._flag_endings(batch, excluded_E),
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            **flag_siblings(batch, score_E, episode),
            Flag.CONSTANT_ANCHOR: step.tied_N,
            Flag.REVISIT: step.revisit_N,
            Flag.SINGLETON_ANCHOR: step.single_N,
            Flag.LEFT_OUT: left_out_N,
            Flag.UNKNOWN_STATE: ~known_N & ~left_out_N,
        }
        return CreditRows(
            advantage_N=np.where(self._masked_N(batch), np.nan, advantage_N),
            size_P=episode.size_P,
            flags=flags,
            return_N=return_N,
            a_episode_N=episode.a_episode_N,
            a_step_N=step.a_step_N,
            anchor_key=anchor_key,
            anchors=step,
        )


class TwoLevelEstimator(AnchoredEstimator, ABC):
    """Base of the estimators with GiGPO's combination of the two sides."""

    omega: float = Field(default=1.0, ge=0.0)
    """Weight of the step advantage (`sum`), or of the episode advantage (`convex`, at most 1)."""
    combination: Literal["sum", "convex"] = "sum"
    """`sum`: A_E + omega * A_S. `convex`: omega * A_E + (1 - omega) * A_S."""

    @model_validator(mode="after")
    def _check_omega(self) -> Self:
        if self.combination == "convex" and self.omega > 1.0:
            msg = f'omega is {self.omega}; under combination="convex" it weighs A_E and lies in [0, 1]'
            raise ValueError(msg)
        return self

    @abstractmethod
    def _episode_side(self, batch: StepBatch, scores: Scores) -> EpisodeCredit:
        """Compute the episode advantages."""

    @abstractmethod
    def _step_side(self, batch: StepBatch, scores: Scores) -> StepCredit:
        """Compute the step advantages inside the anchor groups."""

    def _compare(self, batch: StepBatch, scores: Scores) -> TwoLevelCredit:
        episode, step = self._episode_side(batch, scores), self._step_side(batch, scores)
        alone_N = scores.anchorless_N & ~np.isnan(scores.step_score_N)
        step = replace(step, a_step_N=np.where(alone_N, 0.0, step.a_step_N))
        weights = (1.0, self.omega) if self.combination == "sum" else (self.omega, 1.0 - self.omega)
        advantages = (episode.a_episode_N, step.a_step_N)
        advantage_N = sum(
            (weight * a_N for weight, a_N in zip(weights, advantages, strict=True) if weight != 0.0),
            start=np.zeros_like(step.a_step_N),
        )
        return episode, step, advantage_N
