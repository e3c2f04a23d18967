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
    """Windows of certain sizes, and how many of them were started."""

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
    """How many windows are started while one is in use."""
    n_started = used + 1
    while n_started < len(sizes) and (n_started - used < 2 or sum(sizes[used:n_started]) <= limit // 2):
        n_started += 1
    return n_started


@given(st.lists(st.integers(0, 12), max_size=10), st.integers(0, 24))
def test_while_the_model_has_a_window_the_next_are_begun_within_the_limit(sizes: list[int], limit: int) -> None:
    started, reads = Begun(sizes), []
    with ReadAhead(started.windows(), limit) as ahead:
        for step, window in ahead.steps():
            reads.append(step)
            number = expected(sizes, limit, step[0])  # type: ignore[index]
            assert started.becomes(number)
            if all(size <= limit // 2 for size in sizes):
                assert sum(sizes[step[0] : number]) <= limit  # type: ignore[index]
            assert window.bytes == sizes[step[0]]  # type: ignore[index]
    assert reads == [(number, half) for number in range(len(sizes)) for half in (0, 1)]


def test_nothing_is_begun_once_it_was_stopped() -> None:
    started = Begun([1] * 9)
    with ReadAhead(started.windows(), 4) as ahead:
        next(steps := ahead.steps())
        assert started.becomes(3)
        ahead.stop()
        assert [step[0] for step, _ in steps] == [0, 1, 1, 2, 2]  # type: ignore[index]
    assert started.becomes(3)


def test_what_fails_while_a_window_is_cut_is_told_where_it_is_needed() -> None:
    def windows() -> Iterator[Any]:
        yield from Begun([1]).windows()
        raise ValueError("no such row")

    with ReadAhead(windows(), 10) as ahead:
        steps = ahead.steps()
        assert [next(steps)[0], next(steps)[0]] == [(0, 0), (0, 1)]
        with pytest.raises(ValueError, match="no such row"):
            next(steps)
