"""Best-fit-decreasing packing: few micro-batches under a token budget, the same ones every time.

Longest first; each sequence goes into the fullest micro-batch that still has room for it. A sequence longer than the
budget gets a micro-batch of its own. Best fit decreasing needs at most 11/9 of the optimal number plus a constant
(Johnson 1974); TRL packs the same way.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items into bins.

    Args:
        lengths: tokens of each item.
        budget: tokens of a bin.

    Returns:
        Bins as lists of item numbers, in the order in which they were opened; every item is in exactly one.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for item in order:
        length = lengths[item]
        place = bisect_left(room, (length, -1))
        if place == len(room):
            number, left = len(bins), budget
            bins.append([])
        else:
            left, number = room.pop(place)
        bins[number].append(item)
        if left > length:
            insort(room, (left - length, number))
    return bins
