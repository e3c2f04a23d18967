"""Buffers: memory is used again when, and only when, nothing refers to it any more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from trainer.data.batch import Buffers


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.allocate_arena(1000).allocate(10, np.int64)
    start = address(first)
    del first
    assert address(buffers.allocate_arena(900).allocate(10, np.int64)) == start


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[3:5],
        lambda array: array.view(np.uint8)[8:],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2:4],
        lambda array: torch.split(torch.from_numpy(array), [4, 6])[1],
        lambda array: torch.from_numpy(array)[1:].numpy()[2:],
        memoryview,
    ],
    ids=["array", "slice", "view of a slice", "tensor", "slice of it", "part of it", "back and forth", "memoryview"],
)
def test_what_is_still_referred_to_is_left_alone(hold: Callable[[Any], Any]) -> None:
    buffers = Buffers()
    array = buffers.allocate_arena(1000).allocate(10, np.int64)
    array[:] = 7
    view = hold(array)
    start = address(array)
    del array
    other_array = buffers.allocate_arena(1000).allocate(10, np.int64)
    assert address(other_array) != start
    other_array[:] = 1
    assert set(np.asarray(view).tolist()) <= {7, 0}, "bytes of 7, or 7 itself"
    del view
    assert address(buffers.allocate_arena(1000).allocate(10, np.int64)) == start


def test_arrays_of_an_arena_do_not_overlap_and_are_aligned() -> None:
    arena = Buffers().allocate_arena(4096)
    arrays = [arena.allocate(n, dtype) for n, dtype in ((3, np.bool_), (5, np.int64), (0, np.int32), (7, np.float32))]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array.tolist()) for array in arrays] == [{False}, {1}, set(), {3.0}]
    base = address(arrays[0])
    assert all((address(array) - base) % 64 == 0 for array in arrays)


def test_an_arena_that_is_used_up_still_gives_arrays() -> None:
    arena = Buffers().allocate_arena(64)
    arrays = [arena.allocate(1000, np.int32) for _ in range(3)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [int(array.sum()) for array in arrays] == [0, 1000, 2000]


def test_a_buffer_that_is_too_small_makes_room_for_a_larger_one() -> None:
    buffers = Buffers()
    small = buffers.allocate_arena(100).allocate(4, np.int64)
    del small
    large = buffers.allocate_arena(10_000).allocate(1000, np.int64)
    large[:] = 3
    start = address(large)
    del large
    assert address(buffers.allocate_arena(100).allocate(4, np.int64)) == start
