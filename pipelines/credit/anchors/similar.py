"""Similarity: steps whose texts difflib finds close enough, clustered as the authors' code does it.

Texts are visited in a given order; each joins the first cluster whose first member is similar enough, else opens one.
The outcome depends on the visiting order and on difflib's own quirks (autojunk stays on: it makes two nearly equal
texts of 200 characters or more look different), so a faster ratio from another library would be another algorithm.
What is safe, and done: skip what upper bounds rule out, index each first member once instead of once per comparison,
and stop looking for blocks as soon as they decide.

`SequenceMatcher` finds the longest run of equal characters, then does the same to the left and to the right of it, and
counts what was found. The search starts only at characters of its index of the second text, which in texts of 200
characters or more leaves out the popular ones (autojunk), and then grows over any equal characters; of equally long
runs the first one counts. All of that is kept. Runs of indexed characters are found once per pair of texts instead of
once per window, and equal stretches are compared by slices.

The upper bounds, for one text against many at once: difflib finds blocks of equal characters, in order in both texts,
and calls 2 * matched / (len(a) + len(b)) the ratio. Whatever blocks it finds, junk or not:

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

from pipelines.credit.anchors.definition import Definition, Reads, States, hash_texts

Ints: TypeAlias = npt.NDArray[np.int64]
Codes: TypeAlias = npt.NDArray[np.uint32]
STRIDES = (64, 8, 1)
"""Equal stretches are compared by slices of these lengths, one after the other."""
MANY = 512
"""Runs above which those outside a window are sorted out."""
SMALL = 1 << 15
"""Numbers below this, and not below minus it, have 16 bits."""


@dataclass(frozen=True, slots=True)
class Index:
    """What difflib's `b2j` says of a text: where its indexed characters stand."""

    codes_R: Codes
    """Indexed characters, ascending."""
    starts_R: Ints
    """Where each one's places begin in `places`."""
    counts_R: Ints
    places: Ints
    """Positions in the text, by character, then ascending."""

    @classmethod
    def of(cls, codes_T: Codes) -> Self:
        """Index a text. From 200 characters on, one that makes up more than 1 % (and 1) of it is left out."""
        order = _stable_order(codes_T)
        by_code_T = codes_T[order]
        opens_T = np.ones(len(by_code_T), np.bool_)
        opens_T[1:] = by_code_T[1:] != by_code_T[:-1]
        starts_R = opens_T.nonzero()[0]
        counts_R = _lengths(starts_R, len(by_code_T))
        if len(codes_T) >= 200:
            rare_R = counts_R <= len(codes_T) // 100 + 1
            starts_R, counts_R = starts_R[rare_R], counts_R[rare_R]
        return cls(by_code_T[starts_R], starts_R, counts_R, order)


class Runs(NamedTuple):
    """Runs of equal indexed characters of two texts, each as long as it gets."""

    at_a_K: Ints
    at_b_K: Ints
    size_K: Ints

    @classmethod
    def of(cls, a_T: Codes, index: Index) -> Self:
        """All runs of a text and an indexed one."""
        if not len(index.codes_R):
            return cls(*np.zeros((3, 0), np.int64))
        slot_T = np.minimum(index.codes_R.searchsorted(a_T), len(index.codes_R) - 1)
        hits = (index.codes_R[slot_T] == a_T).nonzero()[0]
        slots = slot_T[hits]
        counts = index.counts_R[slots]
        at_a_M = hits.repeat(counts)
        skipped_M = (counts.cumsum() - counts - index.starts_R[slots]).repeat(counts)
        diagonal_M = at_a_M - index.places[np.arange(len(at_a_M)) - skipped_M]
        order = _stable_order(diagonal_M)  # along each diagonal in step with a
        at_a_M, diagonal_M = at_a_M[order], diagonal_M[order]
        opens_M = np.ones(len(order), np.bool_)
        opens_M[1:] = (diagonal_M[1:] != diagonal_M[:-1]) | (at_a_M[1:] != at_a_M[:-1] + 1)
        starts_K = opens_M.nonzero()[0]
        at_a_K = at_a_M[starts_K]
        return cls(at_a_K, at_a_K - diagonal_M[starts_K], _lengths(starts_K, len(order)))

    def meeting(self, window: "_Window") -> Self:
        """Those that reach into a window; all of them if they are few."""
        if len(self.size_K) <= MANY:
            return self
        inside_K = (self.at_a_K < window.high_a) & (self.at_b_K < window.high_b)
        inside_K &= (self.at_a_K + self.size_K > window.low_a) & (self.at_b_K + self.size_K > window.low_b)
        return type(self)(self.at_a_K[inside_K], self.at_b_K[inside_K], self.size_K[inside_K])

    def longest_in(self, window: "_Window") -> tuple[int, int, int]:
        """The longest part of a run inside a window, the first one of several: start in a, start in b, size."""
        if not len(self.size_K):
            return window.low_a, window.low_b, 0
        cut_K = np.maximum(np.maximum(window.low_a - self.at_a_K, window.low_b - self.at_b_K), 0)
        ends_K = np.minimum(np.minimum(window.high_a - self.at_a_K, window.high_b - self.at_b_K), self.size_K)
        left_K = ends_K - cut_K
        size = int(np.maximum.reduce(left_K))
        if size <= 0:
            return window.low_a, window.low_b, 0
        best = (left_K == size).nonzero()[0]
        at_a, at_b = self.at_a_K[best] + cut_K[best], self.at_b_K[best] + cut_K[best]
        first = min(zip(at_a.tolist(), at_b.tolist(), strict=True))
        return *first, size


class _Window(NamedTuple):
    """A part of both texts, `[low, high)`, in which the next block is looked for; the roomiest comes first."""

    minus_room: int
    low_a: int
    high_a: int
    low_b: int
    high_b: int


def reaches(a: str, b: str, index: Index, needed: int, a_T: Codes) -> bool:
    """Whether the blocks that difflib finds in `a` (code points a_T) and the indexed `b` hold `needed` characters."""
    found, room = 0, min(len(a), len(b))
    windows = [(_Window(-room, 0, len(a), 0, len(b)), Runs.of(a_T, index))]
    while windows and found < needed <= found + room:
        window, runs = heappop(windows)
        room += window.minus_room
        runs = runs.meeting(window)
        at_a, at_b, size = _longest_block(a, b, window, runs)
        if not size:
            continue
        found += size
        for part in (
            _window(window.low_a, at_a, window.low_b, at_b),
            _window(at_a + size, window.high_a, at_b + size, window.high_b),
        ):
            if part.minus_room < 0:
                room -= part.minus_room
                heappush(windows, (part, runs))
    return found >= needed


def _window(low_a: int, high_a: int, low_b: int, high_b: int) -> _Window:
    return _Window(-min(high_a - low_a, high_b - low_b), low_a, high_a, low_b, high_b)


def _longest_block(a: str, b: str, window: _Window, runs: Runs) -> tuple[int, int, int]:
    """What `SequenceMatcher.find_longest_match` gives for a window: start in a, start in b, size."""
    at_a, at_b, size = runs.longest_in(window)
    if size:
        before = _equal_before(a, b, at_a, at_b, min(at_a - window.low_a, at_b - window.low_b))
        at_a, at_b, size = at_a - before, at_b - before, size + before
    # Without an indexed character in common a window's beginning still counts: difflib grows its empty match as well.
    end_a, end_b = at_a + size, at_b + size
    return at_a, at_b, size + _equal_after(a, b, end_a, end_b, min(window.high_a - end_a, window.high_b - end_b))


def _equal_after(a: str, b: str, at_a: int, at_b: int, room: int) -> int:
    """Equal characters from a place on, at most `room`."""
    size = 0
    for stride in STRIDES:
        while size + stride <= room and a[at_a + size : at_a + size + stride] == b[at_b + size : at_b + size + stride]:
            size += stride
    return size


def _equal_before(a: str, b: str, at_a: int, at_b: int, room: int) -> int:
    """Equal characters before a place, at most `room`."""
    size = 0
    for stride in STRIDES:
        while size + stride <= room and a[at_a - size - stride : at_a - size] == b[at_b - size - stride : at_b - size]:
            size += stride
    return size


def _lengths(starts: Ints, end: int) -> Ints:
    """How far it is from each start to the next, and from the last to the end."""
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1:] = end - starts[-1:]
    return lengths


def _stable_order(values: npt.NDArray[Any]) -> Ints:
    """Stable order of integers; NumPy sorts those of 16 bits by radix, several times as fast."""
    if len(values) and values.min() >= -SMALL and values.max() < SMALL:
        values = values.astype(np.int16)
    return values.argsort(kind="stable")


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
    """Fewest matched characters, of `total` = len(a) + len(b), with which difflib's own ratio reaches the threshold."""
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
        """Positions, ascending, of texts whose ratio with this one may reach the threshold, allowing for rounding."""
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


def cluster_representatives(texts: Iterable[str], threshold: float) -> dict[str, str]:
    """Map each distinct text of a task group, in visiting order, to the first member of its cluster.

    A text that was seen before joins the same cluster again: the clusters before its own still do not match, and its
    own still does. So only distinct texts are compared. The threshold is the smallest ratio in (0, 1] that joins.
    """
    clusters = _Clusters(threshold)
    return {text: clusters.representative(text) for text in dict.fromkeys(texts)}


class _Clusters:
    """The clusters opened so far, by their first members."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._firsts: list[str] = []
        self._profiles = Profiles()
        self._indices: dict[int, Index] = {}

    def representative(self, text: str) -> str:
        """First member of the cluster that a text joins, or the text itself, which then opens one."""
        codes_T = codes(text)
        profile = (len(text), letter_counts(codes_T), pair_counts(codes_T))
        for cluster in self._profiles.possible(*profile, self._threshold):
            first = self._firsts[cluster]
            needed = needed_matches(len(text) + len(first), self._threshold)
            if reaches(text, first, self._index(cluster), needed, codes_T):
                return first
        self._firsts.append(text)
        self._profiles.append(*profile)
        return text

    def _index(self, cluster: int) -> Index:
        if cluster not in self._indices:
            self._indices[cluster] = Index.of(codes(self._firsts[cluster]))
        return self._indices[cluster]


class SimilarText(Definition):
    """Two steps share an anchor if greedy clustering by difflib's ratio puts their texts together.

    Inside a task group, steps are visited by (episode_id, step_index). The key is the hash of the cluster's first text.
    Slow: every distinct text of a group is compared with the clusters so far.
    """

    kind: Literal["similarity"] = "similarity"
    threshold: float = Field(default=0.95, gt=0.0, le=1.0)
    """Smallest `difflib.SequenceMatcher(None, text, first_member).ratio()` that joins a cluster."""
    makes_key: ClassVar[bool] = True
    reads: ClassVar[Reads] = "text"

    def apply(self, states: States) -> States:
        """Keys of the clusters; NULL also for rows that take no part, and so open no cluster."""
        rows = pl.DataFrame({"group": states.batch.groups.ids_N(), "code": states.codes_N})
        taking_part = rows.filter(pl.Series(states.included_N)).unique(maintain_order=True)
        visited = taking_part.join(states.texts().drop_nulls(), on="code", how="inner", maintain_order="left")
        firsts: list[str] = []
        for texts in visited.group_by("group", maintain_order=True).agg("text")["text"]:
            first_text = cluster_representatives(texts, self.threshold)
            firsts.extend(first_text[text] for text in texts)
        keys = hash_texts(pl.Series(firsts, dtype=pl.String)).alias("key")
        table = visited.select("group", "code").with_columns(keys)
        found = rows.join(table, on=["group", "code"], how="left", maintain_order="left")["key"]
        return states.keyed(found).kept(pl.Series(states.included_N))
