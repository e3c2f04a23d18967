"""Upper bounds of difflib's ratio, for one text against many at once: what may be skipped without changing a result.

difflib finds blocks of equal characters, in order in both texts, and calls 2 * matched / (len(a) + len(b)) the ratio.
Whatever blocks it finds, junk or not:

* matched <= min(len(a), len(b)),
* matched <= the characters both texts have, counted with multiplicity (`quick_ratio`),
* a block of n characters has n - 1 pairs of neighbours, and two blocks are apart in at least one of the texts, so there
  are at most 1 + (len(a) - matched) + (len(b) - matched) blocks. Hence the pairs both texts have are at least
  matched minus that, or: matched <= (pairs + 1 + len(a) + len(b)) / 3.

Counting pairs in buckets (several pairs to a bucket) can only raise the count, and so keeps the bound.

Axes: `_C` texts to compare with, `_T` characters of a text.
"""

import numpy as np
import numpy.typing as npt

LETTERS = 256
"""Buckets of single characters; a character's bucket is its code point modulo this."""
PAIRS = 1024
"""Buckets of pairs of neighbours."""

Counts = npt.NDArray[np.int32]


def codes(text: str) -> npt.NDArray[np.uint32]:
    """Code points of a text; lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def letter_counts(codes_T: npt.NDArray[np.uint32]) -> Counts:
    """How often each bucket's characters occur."""
    return np.bincount(codes_T & (LETTERS - 1), minlength=LETTERS).astype(np.int32)


def pair_counts(codes_T: npt.NDArray[np.uint32]) -> Counts:
    """How often each bucket's pairs of neighbours occur."""
    buckets_T = (codes_T[:-1] * np.uint32(31) + codes_T[1:]) & np.uint32(PAIRS - 1)
    return np.bincount(buckets_T, minlength=PAIRS).astype(np.int32)


def needed_matches(total: int, threshold: float) -> int:
    """Smallest number of matched characters with which difflib's own arithmetic reaches the threshold.

    Args:
        total: len(a) + len(b).
        threshold: ratio in (0, 1].
    """
    if total == 0:
        return 0
    needed = int(threshold * total / 2.0)
    while needed > 0 and 2.0 * (needed - 1) / total >= threshold:
        needed -= 1
    while 2.0 * needed / total < threshold:
        needed += 1
    return needed


class Profiles:
    """Lengths and counts of the texts that later ones are compared with; grows by doubling."""

    def __init__(self) -> None:
        self._size = 0
        self._length_C = np.zeros(8, np.int64)
        self._letters_C = np.zeros((8, LETTERS), np.int32)
        self._pairs_C = np.zeros((8, PAIRS), np.int32)

    def append(self, length: int, letters: Counts, pairs: Counts) -> None:
        """Add a text by its length and counts."""
        if self._size == len(self._length_C):
            self._length_C = np.concatenate([self._length_C, np.zeros_like(self._length_C)])
            self._letters_C = np.concatenate([self._letters_C, np.zeros_like(self._letters_C)])
            self._pairs_C = np.concatenate([self._pairs_C, np.zeros_like(self._pairs_C)])
        self._length_C[self._size] = length
        self._letters_C[self._size] = letters
        self._pairs_C[self._size] = pairs
        self._size += 1

    def possible(self, length: int, letters: Counts, pairs: Counts, threshold: float) -> list[int]:
        """Positions of the texts whose ratio with the given one may reach the threshold, ascending.

        The comparisons allow for rounding: a bound never excludes what difflib's arithmetic would accept.
        """
        if not self._size:
            return []
        length_C = self._length_C[: self._size]
        total_C = length_C + length
        needed_C = threshold * total_C / 2.0 - 0.5
        (found,) = (np.minimum(length_C, length) >= needed_C).nonzero()
        shared_letters = np.add.reduce(np.minimum(self._letters_C[found], letters), axis=1)
        found = found[shared_letters >= needed_C[found]]
        shared_pairs = np.add.reduce(np.minimum(self._pairs_C[found], pairs), axis=1)
        found = found[(shared_pairs + 1 + total_C[found]) / 3.0 >= needed_C[found]]
        positions: list[int] = found.tolist()
        return positions
