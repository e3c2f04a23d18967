"""Discounted GRPO: each step's return-to-go against those of the siblings' steps."""

from typing import ClassVar, Literal

import numpy as np
import polars as pl

from pipelines.credit.estimators.anchor_groups import AnchorGroups
from pipelines.credit.estimators.normalise import Norm
from pipelines.credit.estimators.options import ReturnOptions
from pipelines.credit.estimators.protocol import CreditRows
from pipelines.credit.flags import Flag
from pipelines.credit.inputs.batch import StepBatch


class DiscountedGRPO(ReturnOptions):
    r"""GRPO on discounted returns-to-go, step by step.

    .. code-block:: text

        G_i = sum_{k >= t} gamma^(k - t) r_k                      (no bootstrap)
        A_i = (G_i - mean G) / (std G + 1e-6)                     over the steps that i is compared with

    `same_step`: those at the same position t of the siblings (rLLM's stepwise advantage, mode `per_step`: Monte Carlo
    returns, gamma 0.95, grouped by task and step number). `all_steps`: all steps of the task group, as in Kevin (arXiv
    2507.11948, sections 4 and 4.3): each of the n turns of m trajectories is a sample, its reward is the discounted sum
    of the scores of this turn and the later ones (gamma 0.4; a discounted maximum was compared), and rewards are
    normalised over the m n samples of a task. That is the paper's text: it refers to GRPO for the rest, prints neither
    the kind of deviation nor an epsilon, and no code of its authors is known to us. Position counts active steps.
    Sample deviation; equal returns, and a step that no sibling reached, give exactly 0.

    No episode score enters. A group is dead if two or more trajectories take part and no comparison shows a difference.
    """

    name: ClassVar[str] = "discounted_grpo"

    compare: Literal["same_step", "all_steps"] = "same_step"
    """What a step is compared with: the siblings' steps at the same position, or all steps of the group."""
    norm: Norm = "mean_std_norm"
    """Centre, or centre and scale."""

    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps; see `Estimator.credit`."""
        return_N = self._returns_N(batch)
        excluded_E = self._excluded_E(batch, batch.score_E)
        included_N = ~batch.episodes.spread(excluded_E)
        place_N = np.arange(len(return_N)) - batch.episodes.spread(batch.episodes.starts_K)
        key_N = place_N if self.compare == "same_step" else np.zeros_like(place_N)
        step = AnchorGroups.of(batch, pl.Series(key_N)).credit(return_N, included_N, self.norm, "keep")
        size_P = self._siblings_P(batch, return_N, excluded_E)
        speaks_N = ~np.isnan(step.a_step_N) & ~step.single_N & ~step.tied_N
        flags = {
            **self._fate_flags(batch, excluded_E),
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
