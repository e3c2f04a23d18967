"""Centring and scaling inside groups, batches and anchor groups, and discounted returns, for all estimators.

`mean_norm`: x - mean. `mean_std_norm`: (x - mean) / (std + 1e-6), with the sample standard deviation (n - 1).
`leave_one_out`: x minus the mean of the other values, which is n / (n - 1) * (x - mean). `mean_ratio`: (x - mean) /
(mean + 1e-6), for values that are not negative.
A group whose values agree to 1e-9 gives exactly 0. In the reference code, float noise over a tiny deviation turns equal
scores into advantages of 0.5.

Axes: `_N` rows (or episodes), `_E` episodes, `_K` groups, batches or anchor groups, `_M` rows gathered by batch or
anchor, `_V` visits (the rows of one trajectory in one anchor group), `_T` steps from the end.
"""

from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.credit.steps import Bools, Floats, Gathered, Ints, Segments, StepBatch, gather, scatter

Norm: TypeAlias = Literal["mean_norm", "mean_std_norm"]
Scaling: TypeAlias = Literal["mean_norm", "mean_std_norm", "leave_one_out", "mean_ratio"]
Singleton: TypeAlias = Literal["zero", "raw"]

EPSILON = 1e-6
"""Added to the standard deviation or mean in a denominator."""
TIE = 1e-9
"""Tolerance for equal values: max - min <= TIE * max(1, |max|)."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of the members of each group."""

    count_K: Ints
    mean_K: Floats
    """0 without members."""
    std_K: Floats
    """0 for tied groups and for fewer than two members."""
    tied_K: Bools
    """The group has at least two members, all equal to `TIE`."""

    @classmethod
    def of(cls, values_N: Floats, member_N: Bools, groups: Segments, ddof: Literal[0, 1] = 1) -> Self:
        """Compute the statistics of each group's members; `ddof` 1 gives the sample deviation, 0 the population's."""
        count_K = groups.count(member_N)
        all_members = bool(member_N.all())  # the usual case needs no mask

        def mask(column_N: Floats, fill: float) -> Floats:
            return column_N if all_members else np.where(member_N, column_N, fill)

        mean_K = groups.sum(mask(values_N, 0.0)) / np.maximum(count_K, 1)
        squares_N = mask(values_N - groups.spread(mean_K), 0.0)
        np.square(squares_N, out=squares_N)
        variance_K = groups.sum(squares_N) / np.maximum(count_K - ddof, 1)
        high_K = groups.max(mask(values_N, -np.inf))
        low_K = groups.min(mask(values_N, np.inf))
        tied_K = (count_K >= 2) & (high_K - low_K <= TIE * np.maximum(1.0, np.abs(high_K)))
        return cls(count_K, mean_K, np.where(tied_K, 0.0, np.sqrt(variance_K)), tied_K)

    def normalise(
        self, values_N: Floats, member_N: Bools, groups: Segments, norm: Scaling, singleton: Singleton
    ) -> Floats:
        """Normalise the values of these statistics; NaN for rows that are not members.

        A group of one member gives exactly 0 (`zero`), or its value with mean 0 and std 1 (`raw`).
        """
        raw_K = (self.count_K == 1) & (singleton == "raw")
        result_N: Floats = values_N - groups.spread(np.where(raw_K, 0.0, self.mean_K))
        if norm == "mean_std_norm":
            result_N /= groups.spread(np.where(raw_K, 1.0, self.std_K) + EPSILON)
        elif norm == "leave_one_out":
            result_N *= groups.spread(np.where(raw_K, 1.0, self.count_K / np.maximum(self.count_K - 1, 1)))
        elif norm == "mean_ratio":
            result_N /= groups.spread(np.where(raw_K, 1.0, self.mean_K + EPSILON))
        result_N[groups.spread(self.tied_K | ((self.count_K == 1) & ~raw_K))] = 0.0
        result_N[~member_N] = np.nan
        return result_N


@dataclass(frozen=True, slots=True)
class Batches:
    """Partition of episodes or steps (units) by batch key. A unit whose key is NULL belongs to no batch."""

    order_M: npt.NDArray[np.int64]
    """Unit number of each gathered unit; inside a batch units stay in canonical order."""
    runs: Segments
    """Gathered units -> batches."""
    known_N: Bools
    """Whether the unit has a batch key."""

    @classmethod
    def of(cls, key_N: pl.Series) -> Self:
        """Gather units by batch key."""
        keys = key_N.alias("batch").to_frame()
        order = keys.select(pl.arg_sort_by("batch", maintain_order=True)).to_series()
        gathered = key_N.gather(order)
        opens_M = gathered.ne_missing(gathered.shift()).to_numpy().copy()
        opens_M[0] = True
        return cls(order.cast(pl.Int64).to_numpy(), Segments.opening_at(opens_M), key_N.is_not_null().to_numpy())

    def whiten(self, values_N: Floats, member_N: Bools, centred_N: Floats | None = None) -> "BatchCredit":
        """Return (x - mean) / (std + 1e-6) over the members of each batch; 0 for one member or equal values.

        `centred_N` replaces x - mean. It may be centred over groups that span batches, so a batch without spread still
        gives 0.
        """
        values_M, member_M = values_N[self.order_M], (member_N & self.known_N)[self.order_M]
        moments = Moments.of(values_M, member_M, self.runs)
        if centred_N is None:
            result_M = moments.normalise(values_M, member_M, self.runs, "mean_std_norm", "zero")
        else:
            is_constant_K = moments.tied_K | (moments.count_K == 1)
            result_M = centred_N[self.order_M] / self.runs.spread(moments.std_K + EPSILON)
            result_M[self.runs.spread(is_constant_K)] = 0.0
            result_M[~member_M] = np.nan
        single_M = member_M & self.runs.spread(moments.count_K == 1)
        tied_M = member_M & self.runs.spread(moments.tied_K)
        return BatchCredit(
            value_N=scatter(result_M, self.order_M),
            single_N=scatter(single_M, self.order_M),
            tied_N=scatter(tied_M, self.order_M),
            unknown_N=~self.known_N,
        )


@dataclass(frozen=True, slots=True)
class BatchCredit:
    """Units normalised inside their batches."""

    value_N: Floats
    """NaN for units that are not members."""
    single_N: Bools
    """The unit is the only one of its batch."""
    tied_N: Bools
    """The batch has two or more members, all with equal values."""
    unknown_N: Bools
    """The unit belongs to no batch."""


def discount_rewards(rewards_N: Floats, episodes: Segments, gamma: float) -> Floats:
    """Return G_t = r_t + gamma * G_{t+1}, without bootstrap: G of an episode's last row is its reward.

    Each episode's rewards are consecutive rows in step order. An unknown reward (NaN) makes all earlier returns of its
    episode NaN. The loop runs from the end, over the k-th last rows of all episodes at once. Its operations and their
    order are those of a loop over steps, so the bits are too. Power-scaled window sums would underflow (gamma = 0.95
    fails beyond 13,600 steps in float64); differences of prefix sums would lose all digits.
    """
    lengths_E = episodes.lengths_K
    longest_first_E = np.argsort(-lengths_E, kind="stable")
    last_E = episodes.last_K[longest_first_E]
    longest = int(lengths_E.max())
    alive_T = len(lengths_E) - np.searchsorted(np.sort(lengths_E), np.arange(longest), side="right")
    returns_N = rewards_N.copy()
    for back, alive in enumerate(alive_T.tolist()[1:], start=1):
        row_E = last_E[:alive] - back
        returns_N[row_E] += gamma * returns_N[row_E + 1]
    return returns_N


Revisits: TypeAlias = Literal["keep", "first"]


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Step advantages and their comparison groups, over rows in canonical order."""

    a_step_N: Floats
    """A_S, NaN where unknown."""
    size_N: npt.NDArray[np.int32]
    """Member rows of the row's anchor group."""
    episodes_N: npt.NDArray[np.int32]
    """Distinct trajectories among them."""
    single_N: Bools
    """The row is the only member of its anchor group."""
    tied_N: Bools
    """The anchor group has two or more members, all with equal scores."""
    revisit_N: Bools
    """The row is a later visit, under `revisits="first"`."""


@dataclass(frozen=True, slots=True)
class AnchorGroups:
    """Partition of a batch's rows by (group_id, anchor key). Rows without a key form a separate part."""

    order_M: npt.NDArray[np.int64]
    """Row number of each gathered row; inside an anchor group rows stay in (episode, step) order."""
    anchors: Segments
    visits: Segments

    @classmethod
    def of(cls, batch: StepBatch, anchor_key: pl.Series) -> Self:
        """Gather the rows of `batch` by group and key."""
        order_M, opens_anchor_M = gather_anchors(batch.groups, anchor_key)
        episode_M = batch.episodes.ids_N()[order_M]
        opens_visit_M = opens_anchor_M.copy()
        opens_visit_M[1:] |= episode_M[1:] != episode_M[:-1]
        return cls(order_M, Segments.opening_at(opens_anchor_M), Segments.opening_at(opens_visit_M))

    def credit(
        self, score_N: Floats, included_N: Bools, norm: Scaling, revisits: Revisits, ddof: Literal[0, 1] = 1
    ) -> StepCredit:
        """Normalise step scores S (NaN where unknown) of the included rows inside each anchor group.

        An anchor group of one member gives exactly 0. `revisits="keep"`: every visit is a member. `first`: only the
        first visit of each trajectory is a member and later visits get 0. (The members' statistics would not bound
        them.)
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


def gather_anchors(groups: Segments, anchor_key: pl.Series) -> Gathered:
    """Gather rows by group and key, as `gather`, for keys of any type, including NULL."""
    if anchor_key.dtype == pl.Int64 and anchor_key.null_count() == 0:
        gathering = gather(anchor_key.to_numpy(), groups)
        if gathering is not None:
            return gathering
    columns = pl.DataFrame({"group": groups.ids_N(), "anchor": anchor_key}).rechunk()
    order = columns.select(pl.arg_sort_by("group", "anchor", maintain_order=True)).to_series()
    changes = columns.select(pl.all().gather(order)).select(pl.all().ne_missing(pl.all().shift()))
    opens_M = (changes["group"] | changes["anchor"]).to_numpy().copy()
    opens_M[:1] = True
    return order.cast(pl.Int64).to_numpy(), opens_M
