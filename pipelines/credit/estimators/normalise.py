"""Centring and scaling inside a group or a batch, and discounted returns: what all estimators share.

`mean_norm`: x - mean. `mean_std_norm`: (x - mean) / (std + 1e-6), with the sample standard deviation (n - 1).
`leave_one_out`: x minus the mean of the others, which is n / (n - 1) * (x - mean). `mean_ratio`: (x - mean) / (mean +
1e-6), for values that are not negative.
A group whose values agree to 1e-9 gives exactly 0: in the reference code float noise over a tiny deviation turns equal
scores into advantages of 0.5.

Axes: `_N` rows (or episodes), `_E` episodes, `_K` groups or batches, `_M` rows gathered by batch, `_T` steps from the
end.
"""

from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.credit.inputs.batch import Bools, Floats, Ints, Segments, scatter

Norm: TypeAlias = Literal["mean_norm", "mean_std_norm"]
Scaling: TypeAlias = Literal["mean_norm", "mean_std_norm", "leave_one_out", "mean_ratio"]
Singleton: TypeAlias = Literal["zero", "raw"]

EPSILON = 1e-6
"""Added to the standard deviation or mean that is divided by."""
TIE = 1e-9
"""Values that differ by no more than this, relative to the largest and at least absolutely, count as equal."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of the members of each group."""

    count_K: Ints
    mean_K: Floats
    """0 without members."""
    std_K: Floats
    """0 for tied groups and for fewer than two members."""
    tied_K: Bools
    """At least two members, all equal: max - min <= 1e-9 * max(1, |max|)."""

    @classmethod
    def of(cls, values_N: Floats, member_N: Bools, groups: Segments, ddof: Literal[0, 1] = 1) -> Self:
        """Statistics per group of the member rows alone; `ddof` 1 gives the sample deviation, 0 the population's."""
        count_K = groups.count(member_N)
        all_members = bool(member_N.all())  # the usual case, in which nothing has to be masked

        def masked(found_N: Floats, other: float) -> Floats:
            return found_N if all_members else np.where(member_N, found_N, other)

        mean_K = groups.sum(masked(values_N, 0.0)) / np.maximum(count_K, 1)
        squares_N = masked(values_N - groups.spread(mean_K), 0.0)
        np.square(squares_N, out=squares_N)
        variance_K = groups.sum(squares_N) / np.maximum(count_K - ddof, 1)
        high_K = groups.max(masked(values_N, -np.inf))
        low_K = groups.min(masked(values_N, np.inf))
        tied_K = (count_K >= 2) & (high_K - low_K <= TIE * np.maximum(1.0, np.abs(high_K)))
        return cls(count_K, mean_K, np.where(tied_K, 0.0, np.sqrt(variance_K)), tied_K)

    def normalise(
        self, values_N: Floats, member_N: Bools, groups: Segments, norm: Scaling, singleton: Singleton
    ) -> Floats:
        """Advantages (float64) of the members, from the values the statistics were taken from; NaN for other rows.

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
    """The partition of units by batch key. Units whose key is NULL belong to no batch."""

    order_M: npt.NDArray[np.int64]
    """Unit number of each gathered unit; inside a batch units stay in canonical order."""
    runs: Segments
    """Gathered units -> batches."""
    known_N: Bools
    """The unit's key is not NULL."""

    @classmethod
    def of(cls, key_N: pl.Series) -> Self:
        """Gather units by their key."""
        keys = key_N.alias("batch").to_frame()
        order = keys.select(pl.arg_sort_by("batch", maintain_order=True)).to_series()
        gathered = key_N.gather(order)
        opens_M = gathered.ne_missing(gathered.shift()).to_numpy().copy()
        opens_M[0] = True
        return cls(order.cast(pl.Int64).to_numpy(), Segments.opening_at(opens_M), key_N.is_not_null().to_numpy())

    def whiten(self, values_N: Floats, member_N: Bools) -> "BatchCredit":
        """Return (x - mean) / (std + 1e-6) over the members of each batch; 0 where they are all equal, or only one."""
        return self._credit(None, values_N, member_N)

    def scale(self, centred_N: Floats, values_N: Floats, member_N: Bools) -> "BatchCredit":
        """Return centred / (std of values + 1e-6) of each batch; 0 where its values are all equal, or only one.

        The centred values come from elsewhere (a group that may span batches), so they need not be 0 where the batch
        has no spread.
        """
        return self._credit(centred_N, values_N, member_N)

    def _credit(self, centred_N: Floats | None, values_N: Floats, member_N: Bools) -> "BatchCredit":
        values_M, member_M = values_N[self.order_M], (member_N & self.known_N)[self.order_M]
        moments = Moments.of(values_M, member_M, self.runs)
        if centred_N is None:
            result_M = moments.normalise(values_M, member_M, self.runs, "mean_std_norm", "zero")
        else:
            flat_K = moments.tied_K | (moments.count_K == 1)
            result_M = centred_N[self.order_M] / self.runs.spread(moments.std_K + EPSILON)
            result_M[self.runs.spread(flat_K)] = 0.0
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
    """NaN for units that take no part."""
    single_N: Bools
    """The unit is the only one of its batch."""
    tied_N: Bools
    """The unit is one of two or more of its batch, all with equal values."""
    unknown_N: Bools
    """The unit belongs to no batch."""


def discounted_returns(rewards_N: Floats, episodes: Segments, gamma: float) -> Floats:
    """G_t = r_t + gamma * G_{t+1}, and G of an episode's last row is its reward. Nothing is bootstrapped.

    In the unit of the rewards, each episode's in consecutive rows in step order; NaN at an unknown reward and at all
    earlier steps of its episode. Computed from the end, the k-th row from the end of all episodes at once: the same
    operations in the same order as the obvious loop, so the bits are the same at any length and discount. Power-scaled
    window sums underflow (gamma = 0.95 fails beyond 13,600 steps, in float64), differences of prefix sums lose all
    digits.
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
