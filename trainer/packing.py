"""Best-fit-decreasing packing: few micro-batches under a token budget, spread evenly over ranks, the same every time.

Longest first; each atom goes into the fullest micro-batch that still has room for it. An atom longer than the budget
gets a micro-batch of its own. Best fit decreasing needs at most 11/9 of the optimal number plus a constant (Johnson
1974); TRL packs the same way. Ranks get equally many micro-batches, since each one is a round of collectives, and
rounds of about equal cost, since a round takes as long as its slowest rank.
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


def spread(bins: Sequence[Sequence[int]], costs: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Give each rank equally many bins of about equal cost.

    Bins are split, the costliest first, until their number is a multiple of the ranks; where nothing is left to split,
    ranks get empty bins at their end. Then rounds are dealt out in order of cost, in each round the costliest bin to
    the rank with the least so far.

    Args:
        bins: items of each bin.
        costs: cost of each item, not negative.
        ranks: 1 or more.

    Returns:
        Bins of each rank; every item is in exactly one.
    """
    pieces = [(sum(costs[item] for item in items), list(items)) for items in bins]
    wanted = -(-len(pieces) // ranks) * ranks
    while len(pieces) < wanted and (whole := _costliest_to_split(pieces)) is not None:
        pieces[whole : whole + 1] = _halves(pieces[whole][1], costs)
    pieces += [(0, [])] * (wanted - len(pieces))
    pieces.sort(key=lambda piece: (-piece[0], piece[1][:1] or [len(costs)]))
    load = [0] * ranks
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for first in range(0, wanted, ranks):
        by_load = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, (cost, items) in zip(by_load, pieces[first : first + ranks], strict=True):
            dealt[rank].append(items)
            load[rank] += cost
    return dealt


def _costliest_to_split(pieces: Sequence[tuple[int, list[int]]]) -> int | None:
    """Position of the costliest bin of several items, if there is one."""
    several = [(-cost, number) for number, (cost, items) in enumerate(pieces) if len(items) > 1]
    return min(several)[1] if several else None


def _halves(items: Sequence[int], costs: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Two bins of about equal cost, neither empty: each item, the costliest first, to the cheaper one."""
    halves: list[tuple[int, list[int]]] = [(0, []), (0, [])]
    for item in sorted(items, key=lambda item: (-costs[item], item)):
        to = 0 if (halves[0][0], len(halves[0][1])) <= (halves[1][0], len(halves[1][1])) else 1
        cost, before = halves[to]
        halves[to] = (cost + costs[item], [*before, item])
    return halves
