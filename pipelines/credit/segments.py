"""Groups as runs of consecutive rows, and reductions over them.

Rows are put in canonical order once; after that every group (an episode, its siblings, an anchor) is a run of rows,
and a reduction over all groups is one `ufunc.reduceat`. It adds in a fixed order that depends on the run's own values
alone, so the same rows give the same bits whatever order they came in and whatever other groups are present.

Axes: `_N` rows, `_K` runs.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Bools: TypeAlias = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Segments:
    """A partition of one or more consecutive rows into runs.

    Attributes:
        starts_K: index of each run's first row, ascending, `starts_K[0] == 0`.
        lengths_K: rows of each run, at least 1.
    """

    starts_K: Ints
    lengths_K: Ints

    @classmethod
    def opening_at(cls, first_N: Bools) -> Self:
        """Runs that open wherever `first_N` is true."""
        starts_K = np.flatnonzero(first_N)
        return cls(starts_K, np.diff(starts_K, append=len(first_N)))

    @property
    def last_K(self) -> Ints:
        """Index of each run's last row."""
        return self.starts_K + self.lengths_K - 1

    def sum(self, values_N: Floats) -> Floats:
        """Sum of each run; NaN where a value is NaN."""
        sums_K: Floats = np.add.reduceat(values_N, self.starts_K)
        return sums_K

    def count(self, mask_N: Bools) -> npt.NDArray[np.int32]:
        """True values of each run."""
        counts_K: npt.NDArray[np.int32] = np.add.reduceat(mask_N, self.starts_K, dtype=np.int32)
        return counts_K

    def any(self, mask_N: Bools) -> Bools:
        """Whether a run has a true value."""
        return np.logical_or.reduceat(mask_N, self.starts_K)

    def min(self, values_N: Floats) -> Floats:
        """Smallest value of each run."""
        return np.minimum.reduceat(values_N, self.starts_K)

    def max(self, values_N: Floats) -> Floats:
        """Largest value of each run."""
        return np.maximum.reduceat(values_N, self.starts_K)

    def spread(self, values_K: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Each run's value, repeated for its rows."""
        return np.repeat(values_K, self.lengths_K)

    def ids_N(self) -> npt.NDArray[np.int32]:
        """Number of the run each row lies in: 0, 1, 2, ..."""
        return self.spread(np.arange(len(self.starts_K), dtype=np.int32))


def scatter(values_M: npt.NDArray[Scalar], order_M: Ints) -> npt.NDArray[Scalar]:
    """Undo a gathering: the value of gathered row m goes to row `order_M[m]`."""
    values_N = np.empty_like(values_M)
    values_N[order_M] = values_M
    return values_N
