"""Reading ahead: as far as memory allows, however slow the model is, and no further."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.stream import ReadAhead


class Begun:
    """Windows of certain sizes, and how many of them were begun."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._number = 0
        self._changed = threading.Condition()

    def windows(self) -> Iterator[Any]:
        for number, size in enumerate(self._sizes):
            yield SimpleNamespace(bytes=size, steps=[(number, 0), (number, 1)], begin=self._count)

    def _count(self) -> None:
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def becomes(self, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._number >= number, 20) and self._number == number


def expected(sizes: list[int], limit: int, used: int) -> int:
    """How many windows are begun while one is in use."""
    begun = used + 1
    while begun < len(sizes) and (begun - used < 2 or sum(sizes[used:begun]) <= limit // 2):
        begun += 1
    return begun


@given(st.lists(st.integers(0, 12), max_size=10), st.integers(0, 24))
def test_while_the_model_has_a_window_the_next_are_begun_within_the_limit(sizes: list[int], limit: int) -> None:
    begun, seen = Begun(sizes), []
    with ReadAhead(begun.windows(), limit) as ahead:
        for step, window in ahead.steps():
            seen.append(step)
            number = expected(sizes, limit, step[0])  # type: ignore[index]
            assert begun.becomes(number)
            if all(size <= limit // 2 for size in sizes):
                assert sum(sizes[step[0] : number]) <= limit  # type: ignore[index]
            assert window.bytes == sizes[step[0]]  # type: ignore[index]
    assert seen == [(number, half) for number in range(len(sizes)) for half in (0, 1)]


def test_nothing_is_begun_once_it_was_stopped() -> None:
    begun = Begun([1] * 9)
    with ReadAhead(begun.windows(), 4) as ahead:
        next(steps := ahead.steps())
        assert begun.becomes(3)
        ahead.stop()
        assert [step[0] for step, _ in steps] == [0, 1, 1, 2, 2]  # type: ignore[index]
    assert begun.becomes(3)


def test_what_fails_while_a_window_is_cut_is_told_where_it_is_needed() -> None:
    def windows() -> Iterator[Any]:
        yield from Begun([1]).windows()
        raise ValueError("no such row")

    with ReadAhead(windows(), 10) as ahead:
        steps = ahead.steps()
        assert [next(steps)[0], next(steps)[0]] == [(0, 0), (0, 1)]
        with pytest.raises(ValueError, match="no such row"):
            next(steps)
