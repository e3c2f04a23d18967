"""Similarity: clusters of texts by difflib's ratio, as in the authors' code.

The algorithm visits texts in order. A text joins the first cluster whose first member is similar enough, or opens one.
The result depends on this order and on difflib's details, such as autojunk, which makes two nearly equal texts of 200
characters or more look different. A faster ratio of another library would be another algorithm. This module skips pairs
that upper bounds exclude, indexes each first member once, and stops the search for blocks once the result is decided.

`SequenceMatcher` finds the longest run of equal characters, repeats this to the left and right of it, and counts the
characters. A search starts at characters in its index of the second text. From 200 characters on, the index excludes
popular characters (autojunk). The run then grows over any equal characters; the first of equally long runs counts. This
module finds the runs of indexed characters once per pair of texts instead of once per window, and compares slices.

The upper bounds apply to one text against many at once. difflib finds blocks of equal characters, in order in both
texts; its ratio is 2 * matched / (len(a) + len(b)). For any blocks, with or without junk:

* matched <= min(len(a), len(b)),
* matched <= the characters both texts have, counted with multiplicity (`quick_ratio`),
* a block of n characters has n - 1 pairs of neighbours, and two blocks are apart in at least one of the texts, so there
  are at most 1 + (len(a) - matched) + (len(b) - matched) blocks. Hence the pairs both texts have are at least
  matched minus that, or: matched <= (pairs + 1 + len(a) + len(b)) / 3.

Counting pairs in buckets (several pairs to a bucket) can only raise the count, and so keeps the bound.

Axes: `_T` characters of a text, `_R` indexed characters, `_M` matches of single characters, `_K` runs, `_C` texts to
compare with.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import Field

from pipelines.credit.anchors.definitions import Definition, Reads, States, hash_texts

Ints: TypeAlias = npt.NDArray[np.int64]
Codes: TypeAlias = npt.NDArray[np.uint32]
STRIDES = (64, 8, 1)
"""Lengths of the slices that are compared, one after the other."""
MANY = 512
"""Number of runs above which those outside a window are removed."""
SMALL = 1 << 15
"""Bound of 16-bit numbers."""


@dataclass(frozen=True, slots=True)
class CharacterIndex:
    """Positions of a text's indexed characters, as difflib's `b2j`."""

    codes_R: Codes
    """Indexed characters, ascending."""
    starts_R: Ints
    """Start of each character's positions in `places`."""
    counts_R: Ints
    places: Ints
    """Positions in the text, by character, then ascending."""

    @classmethod
    def of(cls, codes_T: Codes) -> Self:
        """Index a text. From 200 characters on, exclude characters with a share above 1 % (plus 1)."""
        order = _argsort_stable(codes_T)
        by_code_T = codes_T[order]
        opens_T = np.ones(len(by_code_T), np.bool_)
        opens_T[1:] = by_code_T[1:] != by_code_T[:-1]
        starts_R = opens_T.nonzero()[0]
        counts_R = _measure_lengths(starts_R, len(by_code_T))
        if len(codes_T) >= 200:
            rare_R = counts_R <= len(codes_T) // 100 + 1
            starts_R, counts_R = starts_R[rare_R], counts_R[rare_R]
        return cls(by_code_T[starts_R], starts_R, counts_R, order)


class Runs(NamedTuple):
    """Maximal runs of equal indexed characters of two texts."""

    at_a_K: Ints
    at_b_K: Ints
    size_K: Ints

    @classmethod
    def of(cls, a_T: Codes, index: CharacterIndex) -> Self:
        """Find all runs of a text and an indexed text."""
        if not len(index.codes_R):
            return cls(*np.zeros((3, 0), np.int64))
        slot_T = np.minimum(index.codes_R.searchsorted(a_T), len(index.codes_R) - 1)
        hits = (index.codes_R[slot_T] == a_T).nonzero()[0]
        slots = slot_T[hits]
        counts = index.counts_R[slots]
        at_a_M = hits.repeat(counts)
        skipped_M = (counts.cumsum() - counts - index.starts_R[slots]).repeat(counts)
        diagonal_M = at_a_M - index.places[np.arange(len(at_a_M)) - skipped_M]
        order = _argsort_stable(diagonal_M)  # by diagonal, then by position in a
        at_a_M, diagonal_M = at_a_M[order], diagonal_M[order]
        opens_M = np.ones(len(order), np.bool_)
        opens_M[1:] = (diagonal_M[1:] != diagonal_M[:-1]) | (at_a_M[1:] != at_a_M[:-1] + 1)
        starts_K = opens_M.nonzero()[0]
        at_a_K = at_a_M[starts_K]
        return cls(at_a_K, at_a_K - diagonal_M[starts_K], _measure_lengths(starts_K, len(order)))

    def select_in(self, window: "_Window") -> Self:
        """Return the runs that overlap a window; all runs if they are few."""
        if len(self.size_K) <= MANY:
            return self
        inside_K = (self.at_a_K < window.high_a) & (self.at_b_K < window.high_b)
        inside_K &= (self.at_a_K + self.size_K > window.low_a) & (self.at_b_K + self.size_K > window.low_b)
        return type(self)(self.at_a_K[inside_K], self.at_b_K[inside_K], self.size_K[inside_K])

    def find_longest(self, window: "_Window") -> tuple[int, int, int]:
        """Find the first longest part of a run inside a window: start in a, start in b, size."""
        if not len(self.size_K):
            return window.low_a, window.low_b, 0
        cut_K = np.maximum(np.maximum(window.low_a - self.at_a_K, window.low_b - self.at_b_K), 0)
        ends_K = np.minimum(np.minimum(window.high_a - self.at_a_K, window.high_b - self.at_b_K), self.size_K)
        size_K = ends_K - cut_K
        size = int(np.maximum.reduce(size_K))
        if size <= 0:
            return window.low_a, window.low_b, 0
        best = (size_K == size).nonzero()[0]
        at_a, at_b = self.at_a_K[best] + cut_K[best], self.at_b_K[best] + cut_K[best]
        first = min(zip(at_a.tolist(), at_b.tolist(), strict=True))
        return *first, size


class _Window(NamedTuple):
    """Part of both texts, `[low, high)`, for the next block; sorts by size, largest first."""

    minus_room: int
    low_a: int
    high_a: int
    low_b: int
    high_b: int


def reaches(a: str, b: str, index: CharacterIndex, needed: int, a_T: Codes) -> bool:
    """Return whether difflib's blocks in `a` (code points a_T) and the indexed `b` have `needed` characters."""
    match_count, room = 0, min(len(a), len(b))
    windows = [(_Window(-room, 0, len(a), 0, len(b)), Runs.of(a_T, index))]
    while windows and match_count < needed <= match_count + room:
        window, runs = heappop(windows)
        room += window.minus_room
        runs = runs.select_in(window)
        at_a, at_b, size = _find_longest_block(a, b, window, runs)
        if not size:
            continue
        match_count += size
        for remainder in (
            _make_window(window.low_a, at_a, window.low_b, at_b),
            _make_window(at_a + size, window.high_a, at_b + size, window.high_b),
        ):
            if remainder.minus_room < 0:
                room -= remainder.minus_room
                heappush(windows, (remainder, runs))
    return match_count >= needed


def _make_window(low_a: int, high_a: int, low_b: int, high_b: int) -> _Window:
    return _Window(-min(high_a - low_a, high_b - low_b), low_a, high_a, low_b, high_b)


def _find_longest_block(a: str, b: str, window: _Window, runs: Runs) -> tuple[int, int, int]:
    """Return the result of `SequenceMatcher.find_longest_match` for a window: start in a, start in b, size."""
    at_a, at_b, size = runs.find_longest(window)
    if size:
        before = _count_equal_before(a, b, at_a, at_b, min(at_a - window.low_a, at_b - window.low_b))
        at_a, at_b, size = at_a - before, at_b - before, size + before
    # Without a common indexed character, difflib still grows the empty match at the window's start.
    end_a, end_b = at_a + size, at_b + size
    return at_a, at_b, size + _count_equal_after(a, b, end_a, end_b, min(window.high_a - end_a, window.high_b - end_b))


def _count_equal_after(a: str, b: str, at_a: int, at_b: int, room: int) -> int:
    """Count equal characters from a position on, at most `room`."""
    size = 0
    for stride in STRIDES:
        while size + stride <= room and a[at_a + size : at_a + size + stride] == b[at_b + size : at_b + size + stride]:
            size += stride
    return size


def _count_equal_before(a: str, b: str, at_a: int, at_b: int, room: int) -> int:
    """Count equal characters before a position, at most `room`."""
    size = 0
    for stride in STRIDES:
        while size + stride <= room and a[at_a - size - stride : at_a - size] == b[at_b - size - stride : at_b - size]:
            size += stride
    return size


def _measure_lengths(starts: Ints, end: int) -> Ints:
    """Return the distance from each start to the next, and from the last to the end."""
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1:] = end - starts[-1:]
    return lengths


def _argsort_stable(values: npt.NDArray[Any]) -> Ints:
    """Return the stable order of integers; NumPy's radix sort of 16-bit integers is several times as fast."""
    if len(values) and values.min() >= -SMALL and values.max() < SMALL:
        values = values.astype(np.int16)
    return values.argsort(kind="stable")


LETTERS = 256
"""Buckets of single characters; a character's bucket is its code point modulo this."""
PAIRS = 1024
"""Buckets of pairs of neighbours."""

Counts = npt.NDArray[np.int32]


def encode_text(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of a text, including lone surrogates."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def count_letters(codes_T: npt.NDArray[np.uint32]) -> Counts:
    """Count the characters of each bucket."""
    return np.bincount(codes_T & (LETTERS - 1), minlength=LETTERS).astype(np.int32)


def count_pairs(codes_T: npt.NDArray[np.uint32]) -> Counts:
    """Count the pairs of neighbours of each bucket."""
    buckets_T = (codes_T[:-1] * np.uint32(31) + codes_T[1:]) & np.uint32(PAIRS - 1)
    return np.bincount(buckets_T, minlength=PAIRS).astype(np.int32)


def compute_needed_matches(total: int, threshold: float) -> int:
    """Return the fewest matched characters, of `total` = len(a) + len(b), whose ratio reaches the threshold."""
    if total == 0:
        return 0
    needed = int(threshold * total / 2.0)
    while needed > 0 and 2.0 * (needed - 1) / total >= threshold:
        needed -= 1
    while 2.0 * needed / total < threshold:
        needed += 1
    return needed


class Profiles:
    """Lengths and counts of the clusters' first members; grows by doubling."""

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

    def find_candidates(self, length: int, letters: Counts, pairs: Counts, threshold: float) -> list[int]:
        """Return the ascending positions of texts whose ratio with this one may reach the threshold."""
        if not self._size:
            return []
        length_C = self._length_C[: self._size]
        total_C = length_C + length
        needed_C = threshold * total_C / 2.0 - 0.5
        (candidates,) = (np.minimum(length_C, length) >= needed_C).nonzero()
        shared_letters = np.add.reduce(np.minimum(self._letters_C[candidates], letters), axis=1)
        candidates = candidates[shared_letters >= needed_C[candidates]]
        shared_pairs = np.add.reduce(np.minimum(self._pairs_C[candidates], pairs), axis=1)
        candidates = candidates[(shared_pairs + 1 + total_C[candidates]) / 3.0 >= needed_C[candidates]]
        positions: list[int] = candidates.tolist()
        return positions


def find_representatives(texts: Iterable[str], threshold: float) -> dict[str, str]:
    """Map each distinct text of a task group, in visiting order, to the first member of its cluster.

    A repeated text joins the same cluster again, so only distinct texts are compared. The threshold is the smallest
    ratio in (0, 1] that joins.
    """
    firsts: list[str] = []
    profiles, indices = Profiles(), dict[int, CharacterIndex]()
    representatives: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        codes_T = encode_text(text)
        profile = (len(text), count_letters(codes_T), count_pairs(codes_T))
        for cluster in profiles.find_candidates(*profile, threshold):
            first = firsts[cluster]
            if cluster not in indices:
                indices[cluster] = CharacterIndex.of(encode_text(first))
            needed = compute_needed_matches(len(text) + len(first), threshold)
            if reaches(text, first, indices[cluster], needed, codes_T):
                representatives[text] = first
                break
        else:
            firsts.append(text)
            profiles.append(*profile)
            representatives[text] = text
    return representatives


class SimilarText(Definition):
    """Two steps share an anchor if greedy clustering by difflib's ratio puts their texts together.

    It visits the steps of a task group by (episode_id, step_index). The key is the hash of the cluster's first text. It
    is slow, because it compares each distinct text of a group with all clusters before it.
    """

    kind: Literal["similarity"] = "similarity"
    threshold: float = Field(default=0.95, gt=0.0, le=1.0)
    """Smallest `difflib.SequenceMatcher(None, text, first_member).ratio()` that joins a cluster."""
    makes_key: ClassVar[bool] = True
    reads: ClassVar[Reads] = "text"

    def apply(self, states: States) -> States:
        """Hash the clusters' first texts; rows of episodes that are not compared get NULL and open no cluster."""
        rows = pl.DataFrame({"group": states.batch.groups.ids_N(), "code": states.codes_N})
        rows_to_compare = rows.filter(pl.Series(states.included_N)).unique(maintain_order=True)
        visits = rows_to_compare.join(states.texts().drop_nulls(), on="code", how="inner", maintain_order="left")
        firsts: list[str] = []
        for texts in visits.group_by("group", maintain_order=True).agg("text")["text"]:
            first_text = find_representatives(texts, self.threshold)
            firsts.extend(first_text[text] for text in texts)
        keys = hash_texts(pl.Series(firsts, dtype=pl.String)).alias("key")
        table = visits.select("group", "code").with_columns(keys)
        keys_N = rows.join(table, on=["group", "code"], how="left", maintain_order="left")["key"]
        return states.with_keys(keys_N).mask(pl.Series(states.included_N))
