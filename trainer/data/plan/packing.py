"""Best-fit-decreasing packing: few micro-batches under a token budget, spread evenly over ranks, the same every time.

Longest first; each atom goes into the fullest micro-batch that still has room for it. An atom longer than the budget
gets a micro-batch of its own. Best fit decreasing needs at most 11/9 of the optimal number plus a constant (Johnson
1974); TRL packs the same way. Ranks get equally many micro-batches, since each one is a round of collectives, and
rounds of about equal cost, since a round takes as long as its slowest rank.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items of so many tokens each into bins of `budget` tokens; every item is in exactly one.

    Bins are lists of item numbers, in the order in which they were opened.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # equal ones stay in order
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


def spread(lengths: Sequence[int], costs: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Pack items into bins and give each rank equally many of them, of about equal cost; every item is in exactly one.

    There are as few rounds as best fit decreasing allows. Where the budget permits it, items go, the costliest first,
    to the cheapest bin with room; else bins are split, the costliest first, until each rank has one in each round. Then
    rounds are dealt out in order of cost, in each round the costliest bin to the rank with the least so far. Where
    there are too few items, ranks have empty bins at their end.
    """
    bins = pack(lengths, budget)
    wanted = -(-len(bins) // ranks) * ranks
    if ranks > 1:
        bins = _evened(lengths, costs, budget, wanted) or _split(bins, costs, wanted)
    pieces = [(sum(costs[item] for item in items), items) for items in bins]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    pieces += [(0, [])] * (wanted - len(pieces))
    load = [0] * ranks
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for first in range(0, wanted, ranks):
        by_load = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, (cost, items) in zip(by_load, pieces[first : first + ranks], strict=True):
            dealt[rank].append(items)
            load[rank] += cost
    return dealt


def _evened(lengths: Sequence[int], costs: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Bins of about equal cost (longest processing time first, Graham 1969); none if some item finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    cost, used = [0] * count, [0] * count
    for item in sorted(range(len(lengths)), key=lambda item: (-costs[item], item)):
        room = [n for n in range(count) if not bins[n] or used[n] + lengths[item] <= budget]
        if not room:
            return []
        into = min(room, key=lambda n: (cost[n], n))
        bins[into].append(item)
        cost[into] += costs[item]
        used[into] += lengths[item]
    return [items for items in bins if items]


def _split(bins: list[list[int]], costs: Sequence[int], count: int) -> list[list[int]]:
    """The bins, some of them in two, so that there are `count`, or one for each item."""
    bins = list(bins)
    while len(bins) < count and any(len(items) > 1 for items in bins):
        several = [n for n, items in enumerate(bins) if len(items) > 1]
        costliest = max(several, key=lambda n: (sum(costs[item] for item in bins[n]), -n))
        items = bins.pop(costliest)
        # As an even split without a budget: each half holds less than the whole, which kept it.
        bins += _evened([0] * len(items), [costs[item] for item in items], 0, 2)
        bins[-2:] = [[items[at] for at in half] for half in bins[-2:]]
    return bins
