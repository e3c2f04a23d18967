"""REINFORCE++: returns-to-go, normalised over the batch."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.credit.estimators.normalise import Batches
from pipelines.credit.estimators.protocol import BatchOptions, CreditRows, Flag, ReturnOptions
from pipelines.credit.steps import StepBatch


class ReinforcePP(BatchOptions, ReturnOptions):
    r"""Global advantage normalisation (arXiv 2501.03262; verl `reinforce_plus_plus`), at the level of steps.

    .. code-block:: text

        G_i = sum_{k >= t} gamma^(k - t) r_k             (no bootstrap)
        A_i = (G_i - mean_b G) / (std_b G + 1e-6)        over all steps of the batch b, sample deviation

    It needs no siblings: one rollout per task is enough. verl discounts and averages over tokens, so that long actions
    weigh more, and adds 1e-8 to the variance. KL in the reward is not part of it (see `token_kl`).
    """

    name: ClassVar[str] = "reinforce_pp"

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount of the return-to-go."""

    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute advantages; see `Estimator.credit`."""
        return_N = self._returns_N(batch)
        excluded_E = self._excluded_E(batch, batch.score_E)
        member_N = ~batch.episodes.spread(excluded_E) & ~np.isnan(return_N)
        batch_credit = Batches.of(self._keys_N(batch)).whiten(return_N, member_N)
        flags = {
            **self._flag_endings(batch, excluded_E),
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            Flag.CONSTANT_BATCH: batch_credit.tied_N,
            Flag.SINGLETON_BATCH: batch_credit.single_N,
            Flag.UNKNOWN_BATCH: batch_credit.unknown_N,
        }
        return CreditRows(
            advantage_N=np.where(self._masked_N(batch), np.nan, batch_credit.value_N),
            size_P=self._siblings_P(batch, return_N, excluded_E),
            flags=flags,
            return_N=return_N,
            a_step_N=batch_credit.value_N,
        )
