"""Rows gathered by (task group, anchor key): where step advantages are computed.

Axes: `_N` rows in canonical order, `_M` the same rows gathered by anchor, `_K` anchor groups, `_V` visits (the rows of
one trajectory in one anchor group).
"""

from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.credit.estimators.normalise import Moments, Scaling
from pipelines.credit.inputs.batch import Bools, Floats, Gathered, Segments, StepBatch, gather, scatter

Revisits: TypeAlias = Literal["keep", "first"]


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Step advantages and what they rest on, over rows in canonical order."""

    a_step_N: Floats
    """A_S, NaN where unknown."""
    size_N: npt.NDArray[np.int32]
    """Member rows of the row's anchor group."""
    episodes_N: npt.NDArray[np.int32]
    """Distinct trajectories among them."""
    single_N: Bools
    """The row is the only member of its anchor group."""
    tied_N: Bools
    """The row is one of two or more members with equal scores."""
    revisit_N: Bools
    """A later visit, under `revisits="first"`."""


@dataclass(frozen=True, slots=True)
class AnchorGroups:
    """The partition of a batch's rows by (group_id, anchor key). Rows without a key form a part of their own."""

    order_M: npt.NDArray[np.int64]
    """Row number of each gathered row; inside an anchor group rows stay in (episode, step) order."""
    anchors: Segments
    visits: Segments

    @classmethod
    def of(cls, batch: StepBatch, anchor_key: pl.Series) -> Self:
        """Gather the rows of `batch` by group and key."""
        order_M, opens_anchor_M = gathered(batch.groups, anchor_key)
        episode_M = batch.episodes.ids_N()[order_M]
        opens_visit_M = opens_anchor_M.copy()
        opens_visit_M[1:] |= episode_M[1:] != episode_M[:-1]
        return cls(order_M, Segments.opening_at(opens_anchor_M), Segments.opening_at(opens_visit_M))

    def credit(
        self, score_N: Floats, included_N: Bools, norm: Scaling, revisits: Revisits, ddof: Literal[0, 1] = 1
    ) -> StepCredit:
        """Normalise step scores S (NaN where unknown) of rows that take part inside each anchor group.

        An anchor group of one member gives exactly 0. `revisits="keep"`: every visit is a member; `first`: only the
        first visit of each trajectory is, later ones get 0, like a state nobody shares. (Measuring them by the members'
        statistics would have no bound.)
        """
        score_M = score_N[self.order_M]
        candidate_M = included_N[self.order_M] & ~np.isnan(score_M)
        first_visit_M = np.zeros(len(score_M), np.bool_)
        first_visit_M[self.visits.starts_K] = True
        member_M = candidate_M & first_visit_M if revisits == "first" else candidate_M
        later_M = candidate_M & ~member_M
        moments = Moments.of(score_M, member_M, self.anchors, ddof)
        a_step_M = moments.normalise(score_M, member_M, self.anchors, norm, singleton="zero")
        a_step_M[later_M] = 0.0
        # Each visit with a member counts once, at its first row.
        counted_M = np.zeros(len(score_M), np.bool_)
        counted_M[self.visits.starts_K] = self.visits.any(member_M)
        anchors, order_M = self.anchors, self.order_M
        return StepCredit(
            a_step_N=scatter(a_step_M, order_M),
            size_N=scatter(anchors.spread(moments.count_K.astype(np.int32)), order_M),
            episodes_N=scatter(anchors.spread(anchors.count(counted_M).astype(np.int32)), order_M),
            single_N=scatter(member_M & anchors.spread(moments.count_K == 1), order_M),
            tied_N=scatter(member_M & anchors.spread(moments.tied_K), order_M),
            revisit_N=scatter(later_M, order_M),
        )


def gathered(groups: Segments, anchor_key: pl.Series) -> Gathered:
    """Rows by group and key, as `batch.gather`, for keys of any kind, NULL among them."""
    if anchor_key.dtype == pl.Int64 and anchor_key.null_count() == 0:
        packed = gather(anchor_key.to_numpy(), groups)
        if packed is not None:
            return packed
    columns = pl.DataFrame({"group": groups.ids_N(), "anchor": anchor_key}).rechunk()
    order = columns.select(pl.arg_sort_by("group", "anchor", maintain_order=True)).to_series()
    changes = columns.select(pl.all().gather(order)).select(pl.all().ne_missing(pl.all().shift()))
    opens_M = (changes["group"] | changes["anchor"]).to_numpy().copy()
    opens_M[:1] = True
    return order.cast(pl.Int64).to_numpy(), opens_M
