"""Estimators that compare siblings first and normalise the outcome over the batch."""

from abc import ABC
from collections.abc import Mapping

import numpy as np

from pipelines.credit.batch import StepBatch
from pipelines.credit.estimators.options import BatchOptions
from pipelines.credit.estimators.siblings import SiblingEstimator
from pipelines.credit.flags import Flag
from pipelines.credit.segments import Bools, Floats


class WhitenedSiblings(BatchOptions, SiblingEstimator, ABC):
    """Base of the estimators with a group stage and a batch stage."""

    def _whiten(
        self, batch: StepBatch, compared_E: Floats, member_E: Bools, silent_P: Bools
    ) -> tuple[Floats, Mapping[Flag, Bools]]:
        """The batch stage.

        Args:
            batch: the steps.
            compared_E: what the group stage gave each episode.
            member_E: episodes that take part.
            silent_P: groups that say nothing. They count in the statistics and get exactly 0: the batch mean, which is
                0 up to rounding where batches hold whole groups, must not turn silence into a whisper.

        Returns:
            Advantages of episodes, NaN where unknown, and the flags of the stage.
        """
        batches = self._batches_E(batch)
        whitened_E = batches.whiten(compared_E, member_E).values_N
        silent_E = batch.siblings.spread(silent_P) & ~np.isnan(whitened_E)
        flags = {Flag.UNKNOWN_BATCH: batch.episodes.spread(~batches.known_N)}
        return np.where(silent_E, 0.0, whitened_E), flags
