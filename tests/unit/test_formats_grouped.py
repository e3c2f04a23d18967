"""Pieces by key: order, keys of any text, and memory that does not grow with the file."""

import subprocess
import sys

from lake.formats.base.grouped import grouped


def test_keys_come_in_the_order_of_their_first_piece_and_pieces_in_theirs() -> None:
    items = [("b", b"1"), ("a", b"2"), ("b", b"3"), ("c", b"4"), ("a", b"5"), ("b", b"6")]
    assert list(grouped(items)) == [("b", [b"1", b"3", b"6"]), ("a", [b"2", b"5"]), ("c", [b"4"])]


def test_nothing_gives_no_group() -> None:
    assert list(grouped([])) == []


def test_a_key_is_any_text_and_a_piece_any_bytes() -> None:
    keys = ["", "a\x00b", "half \ud800", "\U0001f600", "A", "a"]
    assert list(grouped([(key, b"\x00\xff") for key in keys])) == [(key, [b"\x00\xff"]) for key in keys]


def test_two_groupings_at_once_do_not_meet() -> None:
    first, second = grouped([("a", b"1"), ("b", b"2")]), grouped([("a", b"3"), ("b", b"4")])
    assert list(zip(first, second, strict=True)) == [
        (("a", [b"1"]), ("a", [b"3"])),
        (("b", [b"2"]), ("b", [b"4"])),
    ]


def test_memory_is_bounded_by_the_cache_and_not_by_what_is_grouped() -> None:
    """300 MB in 3000 groups, in a process of its own."""
    script = """
import resource
from lake.formats.base import grouped
grouped._CACHE_KIB = 8 << 10
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items = ((str(number % 3000), bytes(10_000)) for number in range(30_000))
total = sum(len(piece) for _, pieces in grouped.grouped(items) for piece in pieces)
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    total, grown_mib = map(int, shown.split())
    assert total == 300_000_000
    assert grown_mib < 60
