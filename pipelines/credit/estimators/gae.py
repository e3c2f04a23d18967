"""GAE at the level of turns, from values that a critic gave each state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.credit.estimators.normalise import Batches, discount_rewards
from pipelines.credit.estimators.protocol import STATE_COLUMNS, BatchOptions, CreditRows, Flag, ReturnOptions
from pipelines.credit.steps import InputNeeds, StepBatch, to_floats

VALUE_COLUMN = "value_estimate"
"""Column of `steps` with recorded values."""


class GAE(BatchOptions, ReturnOptions):
    r"""Generalised advantage estimation (arXiv 1506.02438) over the steps of an episode.

    .. code-block:: text

        delta_t = r_t + gamma V_{t+1} - V_t        V_t = steps.value_estimate, or a scorer's score of the step
        A_t     = delta_t + gamma lam A_{t+1}      = sum_{k >= t} (gamma lam)^(k - t) delta_k

    After the last step V is `episodes.final_value_estimate` (the scorer's score of the episode) if the episode was
    truncated, and 0 otherwise: a limit does not end the task, unless `bootstrap` is false. gamma = lam = 1 gives
    return-to-go minus value. A NULL value makes its step, the step before and all earlier steps unknown, for any lam.
    So does a NULL final value of a truncated episode. The estimator compares no siblings. With `batch_key` the column
    `advantage` is whitened over the batch, as PPO implementations do: (A - mean) / (std + 1e-6); `a_step` is A before
    that. `return_to_go` is the plain return without bootstrap; the critic's target is `a_step` + V.
    """

    name: ClassVar[str] = "gae"
    incremental: ClassVar[bool] = True

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per step."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Weight of the observed rewards (1) against the value estimates (0)."""
    values: str = VALUE_COLUMN
    """Source of V: `value_estimate` (as recorded), or a scorer of steps, optionally with @VERSION; a loop with
    [trainer.value] takes its value head's."""
    bootstrap: bool = True
    """After a truncated episode V is its final value; false: 0, so that the limit is an end without reward."""
    batch_key: str | None = None
    """Column of `episodes` whose equal values form a batch for whitening, or `all`; None: no whitening."""

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        needs = super().input_needs(present)
        return replace(
            needs,
            step_columns=(*needs.step_columns, VALUE_COLUMN),
            episode_columns=(*needs.episode_columns, "final_value_estimate"),
            values=None if self.values == VALUE_COLUMN else self.values,
        )

    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute advantages; see `Estimator.credit`."""
        reward_N = self._step_rewards_N(batch)
        return_N = discount_rewards(reward_N, batch.episodes, self.gamma)
        excluded_E = self._excluded_E(batch, batch.score_E)
        value_N = to_floats(batch.frame[VALUE_COLUMN])
        next_value_N = np.append(value_N[1:], 0.0)
        final_E = np.where(batch.truncated_E & self.bootstrap, batch.episode_numbers("final_value_estimate"), 0.0)
        next_value_N[batch.episodes.last_K] = final_E
        delta_N = reward_N + self.gamma * next_value_N - value_N
        a_step_N = discount_rewards(delta_N, batch.episodes, self.gamma * self.lam)
        a_step_N[batch.episodes.spread(excluded_E)] = np.nan
        # The same recursion over differences of values marks what unknown values make unknown.
        unknown_N = np.isnan(discount_rewards(next_value_N - value_N, batch.episodes, 1.0))
        flags = {
            **self._flag_endings(batch, excluded_E),
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            Flag.UNKNOWN_VALUE: unknown_N,
        }
        advantage_N = a_step_N
        if self.batch_key is not None:
            credit = Batches.of(self._keys_N(batch)).whiten(a_step_N, ~np.isnan(a_step_N))
            advantage_N = credit.value_N
            flags |= {
                Flag.CONSTANT_BATCH: credit.tied_N,
                Flag.SINGLETON_BATCH: credit.single_N,
                Flag.UNKNOWN_BATCH: credit.unknown_N,
            }
        return CreditRows(
            advantage_N=np.where(self._masked_N(batch), np.nan, advantage_N),
            size_P=self._siblings_P(batch, return_N, excluded_E),
            flags=flags,
            return_N=return_N,
            a_step_N=a_step_N,
        )
