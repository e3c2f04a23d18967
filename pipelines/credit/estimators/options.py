"""Options that estimators share, each spelled once, and what follows from them; presets that follow other code.

An estimator inherits those it has: a score per episode (`ScoreOptions`), returns of steps (`ReturnOptions`), a batch
(`BatchOptions`). Presets stand beside the estimators: they decide nothing that the options of a job do not say. Axes:
`_N` rows, `_E` episodes.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import Field, model_validator

from pipelines.credit.estimators.normalise import Batches, discounted_returns
from pipelines.credit.estimators.protocol import STATE_COLUMNS, Estimator
from pipelines.credit.flags import Flag
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch
from pipelines.credit.inputs.columns import InputNeeds

ALL = "all"
"""Batch key of one batch that holds every episode of the job."""
_NO_BATCH_KEY = frozenset({"episode_id", "step_index", "reward", "episode_score", "status", "is_active"})


class RewardOptions(Estimator, ABC):
    """What every estimator decides about episodes and rewards."""

    default_step_reward: float | None = None
    """Value of a NULL `reward`. None: it stays unknown."""
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """Truncated episodes: like others; in the statistics, own advantage NULL; or as if absent."""

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        return InputNeeds()

    def _rewards_N(self, batch: StepBatch) -> Floats:
        if self.default_step_reward is None:
            return batch.reward_N
        return np.where(np.isnan(batch.reward_N), self.default_step_reward, batch.reward_N)

    def _excluded_E(self, batch: StepBatch, given_E: Floats) -> Bools:
        """Episodes that take part in nothing: aborted or failed without a score, or truncated if so chosen.

        `given_E` is the score that somebody gave each episode. What a broken rollout has collected is none.
        """
        excluded_E: Bools = batch.broken_E & np.isnan(given_E)
        return excluded_E | batch.truncated_E if self.truncated == "exclude" else excluded_E

    def _masked_N(self, batch: StepBatch) -> Bools:
        """Rows that count in the statistics and get no advantage of their own."""
        return batch.episodes.spread(batch.truncated_E) & (self.truncated == "mask")

    def _fate_flags(self, batch: StepBatch, excluded_E: Bools) -> Mapping[Flag, Bools]:
        return {
            Flag.EXCLUDED: batch.episodes.spread(excluded_E),
            Flag.MASKED: self._masked_N(batch),
            Flag.TRUNCATED: batch.episodes.spread(batch.truncated_E),
        }


class ScoreOptions(RewardOptions, ABC):
    """Where the score of an episode comes from."""

    episode_source: Literal["score", "sum_rewards"] = "score"
    """R: the `episode_score` column, or the undiscounted sum of the episode's `reward`s."""

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        needs = super().needed(present)
        if self.episode_source == "score":
            return replace(needs, episode_score=True)
        return replace(needs, step_columns=(*needs.step_columns, "reward"))

    def _scores_E(self, batch: StepBatch) -> Floats:
        """R of each episode, NaN where unknown."""
        return batch.score_E if self.episode_source == "score" else batch.episodes.sum(self._rewards_N(batch))


class ReturnOptions(RewardOptions, ABC):
    """How returns of steps are made."""

    gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Discount of the return-to-go."""
    step_source: Literal["rewards", "terminal_score", "rewards_plus_terminal"] = "rewards"
    """r: the `reward` column; 0 with `episode_score` on the last step; or `reward` plus `episode_score` on the last."""

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        needs = super().needed(present)
        rewards = ("reward",) * (self.step_source != "terminal_score")
        return replace(
            needs,
            step_columns=(*needs.step_columns, *rewards),
            episode_score=needs.episode_score or self.step_source != "rewards",
        )

    def _step_rewards_N(self, batch: StepBatch) -> Floats:
        """Step rewards r, from the chosen source."""
        reward_N = self._rewards_N(batch)
        if self.step_source == "rewards":
            return reward_N
        terminal_N = np.zeros_like(reward_N)
        terminal_N[batch.episodes.last_K] = batch.score_E
        return terminal_N if self.step_source == "terminal_score" else reward_N + terminal_N

    def _returns_N(self, batch: StepBatch) -> Floats:
        """Return-to-go G, NaN where unknown."""
        return discounted_returns(self._step_rewards_N(batch), batch.episodes, self.gamma)

    def _siblings_P(self, batch: StepBatch, return_N: Floats, excluded_E: Bools) -> npt.NDArray[np.int32]:
        """Trajectories of each group that take part and whose whole return is known."""
        return batch.siblings.count(~excluded_E & ~np.isnan(return_N[batch.episodes.starts_K]))


class BatchOptions(RewardOptions, ABC):
    """Which episodes form the batch that is normalised over. There is no default: it is part of the result."""

    incremental: ClassVar[bool] = False

    batch_key: str | None = None
    """A column of `episodes` whose equal values form a batch, or `all`. Required."""

    @model_validator(mode="after")
    def _named_batch(self) -> Self:
        if self.batch_key is None or self.batch_key in _NO_BATCH_KEY:
            given = "none is given" if self.batch_key is None else f"{self.batch_key!r} cannot be one"
            msg = (
                f"{self.name} normalises over a batch of episodes, so it needs batch_key, and {given}. Name the column "
                "of episodes that tells batches apart, for example batch_key=policy_version or "
                "batch_key=collection_round; batch_key=all makes one batch of everything the job covers"
            )
            raise ValueError(msg)
        return self

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        needs = super().needed(present)
        if self.batch_key is None or self.batch_key == ALL:
            return needs
        return replace(needs, episode_columns=(*needs.episode_columns, self.batch_key))

    def _batches_N(self, batch: StepBatch) -> Batches:
        return Batches.of(self._keys_N(batch))

    def _batches_E(self, batch: StepBatch) -> Batches:
        return Batches.of(self._keys_N(batch).gather(batch.episodes.starts_K))

    def _keys_N(self, batch: StepBatch) -> pl.Series:
        if self.batch_key is None or self.batch_key == ALL:
            return pl.repeat(0, len(batch.reward_N), dtype=pl.Int8, eager=True)
        return batch.frame[self.batch_key]


PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gigpo": {
        "verl-agent": {
            "gamma": 0.95,
            "omega": 1.0,
            "combination": "sum",
            "episode_norm": "mean_norm",
            "step_norm": "mean_norm",
            "baseline": "rows",
            "singleton": "raw",
            "invalid_action_penalty": 0.1,
            "revisits": "keep",
            "truncated": "keep",
            "episode_source": "sum_rewards",
            "anchors": {"kind": "exact"},
        }
    }
}
"""Estimator -> name -> options; what is given beside a preset wins. verl-agent: its defaults, but for the gamma of its
GiGPO scripts (its own default is 1)."""
