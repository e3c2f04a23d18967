"""Greedy clustering of texts by difflib similarity, as the reference code does it.

Texts are visited in a given order; each joins the first cluster whose first member is similar enough, else opens one.
The outcome depends on the visiting order and on difflib's own quirks (autojunk stays on: it makes two nearly equal
texts of 200 characters or more look different), so a faster ratio from another library would be another algorithm.
What is safe, and done: skip what the upper bounds of `similarity_bounds.py` rule out, index each first member once
instead of once per comparison, and stop looking for blocks as soon as they decide (`matching_blocks.py`).
"""

from collections.abc import Iterable

from pipelines.credit.matching_blocks import Index, reaches
from pipelines.credit.similarity_bounds import Profiles, codes, letter_counts, needed_matches, pair_counts


def cluster_representatives(texts: Iterable[str], threshold: float) -> dict[str, str]:
    """Map each distinct text to the first member of its cluster.

    A text that was seen before joins the same cluster again: the clusters before its own still do not match, and its
    own still does. So only distinct texts are compared.

    Args:
        texts: the texts of one task group, in visiting order.
        threshold: smallest ratio in (0, 1] that joins a cluster.

    Returns:
        Distinct text -> representative of its cluster, in order of first visit.
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
        """The index of a cluster's first member, made when it is first needed."""
        if cluster not in self._indices:
            self._indices[cluster] = Index.of(codes(self._firsts[cluster]))
        return self._indices[cluster]
