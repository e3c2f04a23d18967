"""Each trajectory against its siblings: where episode advantages are computed.

Axes: `_N` rows, `_E` episodes, `_P` task groups.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pipelines.credit.batch import StepBatch
from pipelines.credit.normalise import Moments, Scaling, Singleton
from pipelines.credit.segments import Bools, Floats

Baseline: TypeAlias = Literal["trajectories", "rows"]


@dataclass(frozen=True, slots=True)
class EpisodeCredit:
    """Episode advantages and what they rest on.

    Attributes:
        a_episode_N: A_E of each row, NaN where unknown.
        size_P: scored siblings that take part.
        dead_P: two or more of them, all with the same score.
    """

    a_episode_N: Floats
    size_P: npt.NDArray[np.int32]
    dead_P: Bools


def episode_credit(
    batch: StepBatch,
    score_E: Floats,
    excluded_E: Bools,
    *,
    norm: Scaling,
    baseline: Baseline = "trajectories",
    singleton: Singleton = "zero",
    penalty: float = 0.0,
) -> EpisodeCredit:
    """Normalise episode scores inside each task group.

    Args:
        batch: the steps.
        score_E: R of each episode, NaN where unknown.
        excluded_E: episodes that take no part.
        norm: see `normalise.py`.
        baseline: `trajectories`: statistics over one unpenalised score per trajectory; the penalty is taken from the
            row's own advantage. `rows`: statistics over the penalised score of every row.
        singleton: what a group of one unit gives, see `normalise.py`.
        penalty: c, what a malformed action costs, in the unit of the scores.
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
        penalty_P = _scaled_penalty(siblings, norm, singleton, penalty)
        a_episode_N = batch.episodes.spread(a_episode_E) - batch.groups.spread(penalty_P) * batch.invalid_N
    return EpisodeCredit(a_episode_N, siblings.count_K.astype(np.int32), siblings.tied_K)


def _scaled_penalty(siblings: Moments, norm: Scaling, singleton: Singleton, penalty: float) -> Floats:
    """What a malformed action costs in each group, in the unit of A_E: c, or c / max(std, c) where scores are scaled.

    The deviation does not contain the penalty, so dividing by it alone would have no bound: with judge scores of .9,
    .91, .9 and .9 one malformed action would cost 20. A lone trajectory has no deviation: under `raw` it is 1, as for
    its score; under `zero` nothing is claimed about it, not even a penalty.
    """
    alone_P = siblings.count_K == 1
    penalty_P = np.full(len(alone_P), penalty)
    if norm == "mean_std_norm" and penalty > 0.0:
        penalty_P /= np.maximum(np.where(alone_P, 1.0, siblings.std_K), penalty)
    if singleton == "zero":
        penalty_P[alone_P] = 0.0
    return penalty_P
