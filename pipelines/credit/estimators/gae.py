"""GAE at the level of turns, from value estimates that were stored with the rollouts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.credit.estimators.normalise import discounted_returns
from pipelines.credit.estimators.options import ReturnOptions
from pipelines.credit.estimators.protocol import STATE_COLUMNS, CreditRows
from pipelines.credit.flags import Flag
from pipelines.credit.inputs.batch import StepBatch
from pipelines.credit.inputs.columns import InputNeeds


class GAE(ReturnOptions):
    r"""Generalised advantage estimation (arXiv 1506.02438) over the steps of an episode.

    .. code-block:: text

        delta_t = r_t + gamma V_{t+1} - V_t        V_t = steps.value_estimate
        A_t     = delta_t + gamma lam A_{t+1}      = sum_{k >= t} (gamma lam)^(k - t) delta_k

    After the last step V is `episodes.final_value_estimate` if the episode was truncated, and 0 if it ended by itself:
    a limit is no end of the task. gamma = lam = 1 gives return-to-go minus value. A value that is NULL, or that of a
    truncated episode's end, makes that step, the one before and all earlier ones unknown, for any lam. Nothing is
    compared with siblings, and nothing is normalised over the batch (verl whitens afterwards). `return_to_go` is the
    plain return without bootstrap; the critic's target is `advantage` + `value_estimate`.
    """

    name: ClassVar[str] = "gae"

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per step."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Trust in the rewards that were seen (1) against the values (0)."""

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        needs = super().needed(present)
        return replace(
            needs,
            step_columns=(*needs.step_columns, "value_estimate"),
            episode_columns=(*needs.episode_columns, "final_value_estimate"),
        )

    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps; see `Estimator.credit`."""
        reward_N = self._step_rewards_N(batch)
        return_N = discounted_returns(reward_N, batch.episodes, self.gamma)
        excluded_E = self._excluded_E(batch, batch.score_E)
        value_N = batch.step_numbers("value_estimate")
        next_value_N = np.append(value_N[1:], 0.0)
        final_E = np.where(batch.truncated_E, batch.episode_numbers("final_value_estimate"), 0.0)
        next_value_N[batch.episodes.last_K] = final_E
        delta_N = reward_N + self.gamma * next_value_N - value_N
        a_step_N = discounted_returns(delta_N, batch.episodes, self.gamma * self.lam)
        a_step_N[batch.episodes.spread(excluded_E)] = np.nan
        # What is unknown about values alone: the same recursion over differences of values.
        unknown_N = np.isnan(discounted_returns(next_value_N - value_N, batch.episodes, 1.0))
        flags = {
            **self._fate_flags(batch, excluded_E),
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            Flag.UNKNOWN_VALUE: unknown_N,
        }
        return CreditRows(
            advantage_N=np.where(self._masked_N(batch), np.nan, a_step_N),
            size_P=self._siblings_P(batch, return_N, excluded_E),
            flags=flags,
            return_N=return_N,
            a_step_N=a_step_N,
        )
