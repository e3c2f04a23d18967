"""Siblings side by side: which of their steps were taken from the same state, and where they part.

A walk is an episode as the keys of the states that it passed: `anchor_key` of a credit job, or `state_hash`. None is a
state that is not known; it equals nothing, not even itself.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

Key = Hashable | None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the alignment."""

    steps: tuple[int | None, ...]
    """By walk, the position of its step in this line; None: it has none here."""
    is_shared: bool
    """The steps were taken from one state, which two walks or more passed. If not, each was taken from a state of its
    own, and they stand side by side to save room."""


def align(walks: Sequence[Sequence[Key]]) -> list[Line]:
    """Put the steps of walks into lines, those from one state into the same line.

    The best alignment of many sequences is not found in reasonable time, so this one is progressive (Feng, Doolittle
    1987). The profile begins as the first walk, one node per step. Each further walk is aligned with the profile by a
    longest common subsequence of their keys: a step that is matched joins its node, any other becomes a node between
    its neighbours'. For two walks the lines that they share are as many as any alignment has; for more, each walk is
    aligned as well as it can be with those before it. States that all walks begin with are in the first lines.

    Between two nodes that are shared, the steps that are not shared are put side by side.

    Returns:
        Lines in which each step of each walk stands once, and in order.
    """
    nodes: list[tuple[Key, dict[int, int]]] = []
    for number, walk in enumerate(walks):
        nodes = _joined(nodes, number, walk)
    lines: list[Line] = []
    waiting: list[deque[int]] = [deque() for _ in walks]

    def put_down() -> None:
        lines.append(Line(tuple(own.popleft() if own else None for own in waiting), is_shared=False))

    for _, members in nodes:
        if len(members) == 1:
            ((number, step),) = members.items()
            waiting[number].append(step)
            continue
        while any(waiting[number] for number in members):
            put_down()
        lines.append(Line(tuple(map(members.get, range(len(walks)))), is_shared=True))
    while any(waiting):
        put_down()
    return lines


def first_divergence(lines: Sequence[Line], choices: Sequence[Sequence[Hashable]]) -> int | None:
    """The first line where the walks are not all in one state, or are, and do not all do the same.

    Args:
        lines: of `align`.
        choices: by walk and step, what was done there.

    Returns:
        Its position, or None if the walks are alike to their ends.
    """
    return next((position for position, line in enumerate(lines) if not is_alike(line, choices)), None)


class Parting(StrEnum):
    """What sets walks apart where they part."""

    START = "they start from different states"
    ACTION = "they act differently in one state"
    ANSWER = "the same action is answered differently"
    END = "after the same action some are over"
    UNKNOWN = "what the same action led to is not known"


def parting(
    lines: Sequence[Line], choices: Sequence[Sequence[Hashable]], keys: Sequence[Sequence[Key]], position: int
) -> Parting:
    """Why walks part in their first line that is not alike (`first_divergence`).

    Args:
        lines: of `align`.
        choices: by walk and step, what was done there.
        keys: the walks.
        position: of the line.
    """
    if lines[position].is_shared and None not in lines[position].steps:
        return Parting.ACTION
    if position == 0:
        return Parting.START
    # All were in one state before, and did the same there.
    following = [step + 1 for step in lines[position - 1].steps if step is not None]
    if any(step == len(done) for step, done in zip(following, choices, strict=True)):
        return Parting.END
    if any(walk[step] is None for step, walk in zip(following, keys, strict=True)):
        return Parting.UNKNOWN
    return Parting.ANSWER


def is_alike(line: Line, choices: Sequence[Sequence[Hashable]]) -> bool:
    """Whether all walks were in one state and did the same."""
    if not line.is_shared or None in line.steps:
        return False
    return len({done[step] for done, step in zip(choices, line.steps, strict=True) if step is not None}) == 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Lines from `first` to `last`, the last included."""

    first: int
    last: int


LEAST_FOLDED = 4
"""Lines that are alike in a row, from which on they are folded."""


def folded(lines: Sequence[Line], choices: Sequence[Sequence[Hashable]]) -> list[Stretch]:
    """All lines in order: each alone, but `LEAST_FOLDED` lines or more in a row that are alike as one stretch."""
    found: list[Stretch] = []
    for alike, positions in groupby(range(len(lines)), lambda position: is_alike(lines[position], choices)):
        run = list(positions)
        if alike and len(run) >= LEAST_FOLDED:
            found.append(Stretch(run[0], run[-1]))
        else:
            found += [Stretch(one, one) for one in run]
    return found


def longest_common(one: Sequence[Key], other: Sequence[Key]) -> list[tuple[int, int]]:
    """Positions (in one, in the other) of a longest common subsequence, in order; equal beginnings are in it.

    By bits (Hyyro 2004): bit i of row j is 0 where the i-th key of `other` makes the subsequence with the first j keys
    of `one` longer. Rows are Python integers, so that a row costs len(other) / 64 machine words. Where an equal key
    would do as well, the earliest is taken, which is why equal beginnings are matched.
    """
    where: dict[Key, int] = {}
    for bit, key in enumerate(other):
        if key is not None:
            where[key] = where.get(key, 0) | 1 << bit
    full = (1 << len(other)) - 1
    rows = [full]
    for key in one:
        row = rows[-1]
        met = row & where.get(key, 0)
        rows.append(((row + met) | (row - met)) & full)
    pairs: list[tuple[int, int]] = []
    line, bit = len(one), len(other) - 1
    while line > 0 and bit >= 0:
        if rows[line] >> bit & 1:
            bit -= 1
        elif rows[line - 1] >> bit & 1:
            pairs.append((line - 1, bit))
            line, bit = line - 1, bit - 1
        else:
            line -= 1
    return pairs[::-1]


def _joined(
    nodes: Sequence[tuple[Key, dict[int, int]]], number: int, walk: Sequence[Key]
) -> list[tuple[Key, dict[int, int]]]:
    """The nodes with one more walk: nodes as they were, a matched step in its node, any other before the next match."""
    pairs = longest_common([key for key, _ in nodes], walk)
    joined: list[tuple[Key, dict[int, int]]] = []
    node = step = 0
    for at_node, at_step in [*pairs, (len(nodes), len(walk))]:
        joined += nodes[node:at_node]
        joined += [(walk[own], {number: own}) for own in range(step, at_step)]
        if at_node < len(nodes):
            key, members = nodes[at_node]
            joined.append((key, members | {number: at_step}))
        node, step = at_node + 1, at_step + 1
    return joined
