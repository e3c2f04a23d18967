"""Repeats in a sequence of steps: `attic, cellar, attic, cellar, attic, cellar` is two steps, three times."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LONGEST = 4
"""Steps of a repeated part at most."""
FEWEST = 3
"""Times that a part must stand in a row to be folded."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A part of `period` steps that stands `times` times in a row from position `first` on."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.period * self.times


def folds(values: Sequence[Hashable], longest: int = LONGEST, fewest: int = FEWEST) -> list[Fold]:
    """The repeats of a sequence, from the left: each the one that covers most, of equals the one of the shortest part.

    They do not overlap, and what lies between them repeats nothing `fewest` times.
    """
    found: list[Fold] = []
    position = 0
    while position < len(values):
        fold = _longest_at(values, position, longest)
        if fold.times >= fewest:
            found.append(fold)
            position = fold.end
        else:
            position += 1
    return found


def _longest_at(values: Sequence[Hashable], first: int, longest: int) -> Fold:
    """The repeat that begins at a position and covers most; one of `times` 1 where nothing repeats."""
    best = Fold(first, 1, 1)
    for period in range(1, longest + 1):
        end = first + period
        while end < len(values) and values[end] == values[end - period]:
            end += 1
        times = (end - first) // period
        if times > 1 and times * period > best.times * best.period:
            best = Fold(first, period, times)
    return best
