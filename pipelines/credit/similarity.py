"""Greedy clustering of texts by difflib similarity, as the reference code does it.

Texts are visited in a given order; each joins the first cluster whose first member is similar enough, else opens one.
The outcome depends on the visiting order and on difflib's own quirks (autojunk stays on: it makes two nearly equal
texts of 200 characters or more look different), so a faster ratio from another library would be another algorithm.
What is safe: the bounds below never underestimate difflib's ratio, so skipping on them cannot change the outcome.
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
    representative: dict[str, str] = {}
    clusters: list[tuple[str, SequenceMatcher[str]]] = []
    for text in texts:
        if text in representative:
            continue
        for first_member, matcher in clusters:
            matcher.set_seq1(text)
            # By length, by letters, exactly: cheapest first, and each is an upper bound of the next.
            if (
                matcher.real_quick_ratio() >= threshold
                and matcher.quick_ratio() >= threshold
                and matcher.ratio() >= threshold
            ):
                representative[text] = first_member
                break
        else:
            clusters.append((text, SequenceMatcher(None, "", text)))
            representative[text] = text
    return representative
