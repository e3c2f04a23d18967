"""Greedy clustering of texts by difflib similarity, as the reference code does it.

Texts are visited in a given order; each joins the first cluster whose first member is similar enough, else opens one.
The outcome depends on the visiting order and on difflib's own quirks (autojunk stays on: it makes two nearly equal
texts of 200 characters or more look different), so a faster ratio from another library would be another algorithm.
What is safe, and done: ask difflib's own upper bounds first, and index each first member once instead of once per
comparison.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher


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
    found: dict[str, str] = {}
    clusters: dict[str, SequenceMatcher[str]] = {}  # first member -> what holds its index
    for text in dict.fromkeys(texts):
        joined = next((first for first, cluster in clusters.items() if _joins(text, cluster, threshold)), text)
        if joined == text:
            clusters[text] = SequenceMatcher(None, "", text)
        found[text] = joined
    return found


def _joins(text: str, cluster: "SequenceMatcher[str]", threshold: float) -> bool:
    """Whether a text is similar enough; the upper bounds cost less, and use the arithmetic of the ratio."""
    cluster.set_seq1(text)
    return (
        cluster.real_quick_ratio() >= threshold and cluster.quick_ratio() >= threshold and cluster.ratio() >= threshold
    )
