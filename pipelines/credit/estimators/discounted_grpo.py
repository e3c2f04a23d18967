"""Discounted GRPO: each step's return-to-go against the returns of the siblings' steps."""

from typing import ClassVar, Literal

import numpy as np
import polars as pl

from pipelines.credit.estimators.normalise import AnchorGroups, Norm
from pipelines.credit.estimators.protocol import CreditRows, Flag, ReturnOptions
from pipelines.credit.steps import StepBatch


class DiscountedGRPO(ReturnOptions):
    r"""GRPO on discounted returns-to-go, step by step.

    .. code-block:: text

        G_i = sum_{k >= t} gamma^(k - t) r_k                      (no bootstrap)
        A_i = (G_i - mean G) / (std G + 1e-6)                     over the steps that i is compared with

    `same_step`: the siblings' steps at the same position t (rLLM's stepwise advantage, mode `per_step`: Monte Carlo
    returns, gamma 0.95, grouped by task and step number). `all_steps`: all steps of the task group, as in Kevin (arXiv
    2507.11948, sections 4 and 4.3). There each of the n turns of m trajectories is a sample. Its reward is the
    discounted sum of the scores of this and later turns (gamma 0.4; the paper also tests a discounted maximum), and
    rewards are normalised over the m n samples of a task. The paper refers to GRPO for the rest; it gives neither the
    kind of deviation nor an epsilon, and we know of no code by its authors. Position counts active steps. The deviation
    is the sample deviation. Equal returns, and a step that no sibling reached, give exactly 0.

    The estimator uses no episode score. A group is dead if two or more trajectories take part and no comparison shows a
    difference.
    """

    name: ClassVar[str] = "discounted_grpo"

    compare: Literal["same_step", "all_steps"] = "same_step"
    """Steps that a step is compared with: the siblings' at the same position, or all of the group."""
    norm: Norm = "mean_std_norm"
    """Normalisation: centre, or centre and scale."""

    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute advantages; see `Estimator.credit`."""
        return_N = self._returns_N(batch)
        excluded_E = self._excluded_E(batch, batch.score_E)
        included_N = ~batch.episodes.spread(excluded_E)
        place_N = np.arange(len(return_N)) - batch.episodes.spread(batch.episodes.starts_K)
        key_N = place_N if self.compare == "same_step" else np.zeros_like(place_N)
        step = AnchorGroups.of(batch, pl.Series(key_N)).credit(return_N, included_N, self.norm, "keep")
        size_P = self._siblings_P(batch, return_N, excluded_E)
        speaks_N = ~np.isnan(step.a_step_N) & ~step.single_N & ~step.tied_N
        flags = {
            **self._flag_endings(batch, excluded_E),
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            Flag.CONSTANT_STEP: step.tied_N,
            Flag.DEAD_GROUP: batch.groups.spread((size_P >= 2) & ~batch.groups.any(speaks_N)),
            Flag.SINGLETON_GROUP: batch.groups.spread(size_P == 1),
            Flag.SINGLETON_STEP: step.single_N,
        }
        advantage_N = np.where(self._masked_N(batch), np.nan, step.a_step_N)
        return CreditRows(
            advantage_N=advantage_N, size_P=size_P, flags=flags, return_N=return_N, a_step_N=step.a_step_N
        )
