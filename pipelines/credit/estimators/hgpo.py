"""HGPO: each step against the steps with the same last states, for several lengths of the past.

Axes: `_N` rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from pipelines.credit.estimators.anchored import AnchoredEstimator, Scores, TwoLevelCredit
from pipelines.credit.estimators.normalise import TIE, AnchorGroups, Norm, StepCredit
from pipelines.credit.estimators.siblings import Baseline, credit_episodes
from pipelines.credit.steps import Bools, Floats, StepBatch


class HGPO(AnchoredEstimator):
    r"""Hierarchy-of-groups policy optimisation (arXiv 2602.22817; verl-agent `recipe/hgpo`).

    .. code-block:: text

        groups      a_k(i): steps of the task group with the same last k states, k = 1 .. history + 1
        per level   A_k = (S_i - mean S) / (std S + 1e-6)        over a_k(i), if another step is in it; population std
        combined    A_S = sum_k w_k A_k / sum_k w_k,             w_k = (k + 1)^alpha
        advantage   A   = A_S; with `episode_level`: the same mean with A_E added, of weight 1

    with S as in `gigpo` and k over the levels that count. A level counts if the step is not alone in it and, as in the
    reference code, A_k is not 0 to 1e-9 (`zeros="skip"`). Without such a level A_S is 0. A step has no level k before
    its k-th state. A longer shared past means a more equal context and fewer members; the weights favour it.

    Differences from the reference code: float64; a tolerance of 1e-9 for ties and zeros; no 1e-6 added to the sum of
    the weights; one score per trajectory for A_E (`baseline="rows"`: as in the reference code). The deviation of A_E is
    the sample deviation in both.
    """

    name: ClassVar[str] = "hgpo"

    history: int = Field(default=2, ge=0)
    """Number of earlier states of the longest level; 0: the state alone."""
    alpha: float = Field(default=1.0, ge=0.0)
    """Exponent of the weights; 0: equal weights."""
    norm: Norm = "mean_std_norm"
    """Normalisation at every level and of A_E: centre, or centre and scale."""
    zeros: Literal["skip", "count"] = "skip"
    """Levels where A_k is 0 to 1e-9 (tied, or at the mean): skip (the reference code), or count."""
    episode_level: bool = False
    """Add the episode advantage as a further level (`base_group` in the reference code)."""
    baseline: Baseline = "trajectories"
    """Unit of A_E's statistics: trajectories, or step rows (the reference code)."""

    def _compare(self, batch: StepBatch, scores: Scores) -> TwoLevelCredit:
        episode = credit_episodes(
            batch,
            scores.score_E,
            scores.excluded_E,
            norm=self.norm,
            baseline=self.baseline,
            penalty=self.invalid_action_penalty,
        )
        sum_N, weight_N = np.zeros_like(scores.step_score_N), np.zeros_like(scores.step_score_N)
        keys = _rank_past_keys(scores.anchor_key, batch, self.history + 1)
        levels = (self._credit_level(batch, scores, key) for key in keys)
        state = next(levels)
        for length, level in enumerate(chain([state], levels), start=1):
            self._add(level.a_step_N, ~(level.single_N | level.revisit_N), float(length + 1), sum_N, weight_N)
        alone_N = scores.anchorless_N & ~np.isnan(scores.step_score_N)
        unknown_N = np.isnan(state.a_step_N) & ~alone_N
        a_step_N = np.where(unknown_N, np.nan, _divide(sum_N, weight_N))
        if not self.episode_level:
            advantage_N = a_step_N
        else:
            a_episode_N = episode.a_episode_N
            self._add(a_episode_N, np.ones(len(sum_N), np.bool_), 1.0, sum_N, weight_N)
            advantage_N = np.where(unknown_N | np.isnan(a_episode_N), np.nan, _divide(sum_N, weight_N))
        return episode, replace(state, a_step_N=a_step_N), advantage_N

    def _credit_level(self, batch: StepBatch, scores: Scores, key: pl.Series) -> StepCredit:
        member_N = scores.member_N & key.is_not_null().to_numpy()
        groups = AnchorGroups.of(batch, key)
        return groups.credit(scores.step_score_N, member_N, self.norm, self.revisits, ddof=0)

    def _add(self, a_N: Floats, counts_N: Bools, length: float, sum_N: Floats, weight_N: Floats) -> None:
        counts_N = counts_N & ~np.isnan(a_N)
        if self.zeros == "skip":
            counts_N &= np.abs(a_N) > TIE
        weight = length**self.alpha
        sum_N[counts_N] += weight * a_N[counts_N]
        weight_N[counts_N] += weight


def _divide(sum_N: Floats, weight_N: Floats) -> Floats:
    """Return the weighted means; 0 where the weight is 0."""
    return np.divide(sum_N, weight_N, out=np.zeros_like(sum_N), where=weight_N > 0.0)


def _rank_past_keys(state_key: pl.Series, batch: StepBatch, levels: int) -> Iterator[pl.Series]:
    """Yield, for k = 1 .. levels, a key of each row's last k state keys, by ranks instead of hashes.

    The key is NULL before the episode's k-th row and where one of the k keys is NULL.
    """
    rows_N = np.arange(len(state_key))
    place_N = rows_N - batch.episodes.spread(batch.episodes.starts_K)
    code = state_key.rank("dense").cast(pl.Int64)
    code_N = code.fill_null(0).to_numpy()
    past = code
    for back in range(levels):
        if back:
            earlier_N = np.where(place_N >= back, code_N[np.maximum(rows_N - back, 0)], 0)
            earlier = pl.Series(earlier_N)
            # Ranks are at most the number of rows, so the pair fits in 63 bits.
            pair = past * (len(state_key) + 1) + earlier
            past = pair.set(earlier == 0, None).rank("dense").cast(pl.Int64)
        yield past
