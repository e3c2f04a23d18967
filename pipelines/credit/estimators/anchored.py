"""Estimators that compare steps taken from the same state, after their trajectories."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from pipelines.credit.anchors import Anchors
from pipelines.credit.anchors.texts import ExactText
from pipelines.credit.estimators.anchor_groups import Revisits, StepCredit
from pipelines.credit.estimators.options import ReturnOptions, ScoreOptions
from pipelines.credit.estimators.protocol import STATE_COLUMNS, CreditRows
from pipelines.credit.estimators.siblings import EpisodeCredit, sibling_flags
from pipelines.credit.flags import Flag
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch
from pipelines.credit.inputs.columns import InputNeeds


@dataclass(frozen=True, slots=True)
class Scores:
    """What is compared."""

    score_E: Floats
    """R of each episode, NaN where unknown."""
    excluded_E: Bools
    """Episodes that take no part."""
    anchor_key: pl.Series
    """NULL where unknown."""
    step_score_N: Floats
    """S of each row, NaN where unknown."""
    member_N: Bools
    """Rows of episodes that take part, with a known anchor."""
    anchorless_N: Bools
    """Rows of episodes that take part and have no anchor: the state is not known, or the definition leaves it out. They
    are compared with nothing, which gives exactly 0."""


Compared: TypeAlias = tuple[EpisodeCredit, StepCredit, Floats]
"""Both sides, and A of every row, NaN where a term that counts is unknown."""


class AnchoredEstimator(ScoreOptions, ReturnOptions, ABC):
    """Base of the estimators with anchors: an episode side, a step side, and their combination."""

    invalid_action_penalty: float = Field(default=0.1, ge=0.0)
    """c, in the unit of the rewards: taken from the score of a row whose action was malformed."""
    revisits: Revisits = "keep"
    """Members of an anchor group: every visit, or the first visit of each trajectory (later ones get A_S = 0)."""
    anchors: Anchors = ExactText()
    """When two steps are in the same state."""

    @abstractmethod
    def _compare(self, batch: StepBatch, scores: Scores) -> Compared:
        """Episode advantages, step advantages, and their combination."""

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        return replace(super().needed(present), anchor_columns=tuple(self.anchors.columns(list(present))))

    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps; see `Estimator.credit`."""
        return_N = self._returns_N(batch)
        score_E = self._scores_E(batch)
        excluded_E = self._excluded_E(batch, batch.score_E)
        included_N = ~batch.episodes.spread(excluded_E)
        anchor_key = self.anchors.keys(batch, included_N)
        known_N = anchor_key.is_not_null().to_numpy()
        step_score_N = return_N - self.invalid_action_penalty * batch.invalid_N
        anchorless_N = included_N & ~known_N
        left_out_N = anchorless_N & _state_is_known_N(batch)
        member_N = included_N & known_N
        scores = Scores(score_E, excluded_E, anchor_key, step_score_N, member_N, anchorless_N)
        episode, step, advantage_N = self._compare(batch, scores)
        flags = {
            **self._fate_flags(batch, excluded_E),
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            **sibling_flags(batch, score_E, episode),
            **anchor_flags(step),
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
    """GiGPO's combination of the two sides."""

    omega: float = Field(default=1.0, ge=0.0)
    """Weight of the step advantage (`sum`), or of the episode advantage (`convex`, at most 1)."""
    combination: Literal["sum", "convex"] = "sum"
    """`sum`: A_E + omega * A_S. `convex`: omega * A_E + (1 - omega) * A_S."""

    @model_validator(mode="after")
    def _convex_weight(self) -> Self:
        if self.combination == "convex" and self.omega > 1.0:
            msg = f'omega is {self.omega}; under combination="convex" it weighs A_E and lies in [0, 1]'
            raise ValueError(msg)
        return self

    @abstractmethod
    def _episode_side(self, batch: StepBatch, scores: Scores) -> EpisodeCredit:
        """Episode advantages."""

    @abstractmethod
    def _step_side(self, batch: StepBatch, scores: Scores) -> StepCredit:
        """Step advantages inside the anchor groups."""

    def _compare(self, batch: StepBatch, scores: Scores) -> Compared:
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


def _state_is_known_N(batch: StepBatch) -> Bools:
    """Rows whose state was recorded, as far as the definition read it."""
    for name in ("state_hash", "state"):
        if name in batch.frame.columns:
            return batch.frame[name].is_not_null().to_numpy()
    return np.zeros(batch.frame.height, np.bool_)


def anchor_flags(step: StepCredit) -> Mapping[Flag, Bools]:
    """What the comparison inside anchor groups rests on."""
    return {
        Flag.CONSTANT_ANCHOR: step.tied_N,
        Flag.REVISIT: step.revisit_N,
        Flag.SINGLETON_ANCHOR: step.single_N,
    }
