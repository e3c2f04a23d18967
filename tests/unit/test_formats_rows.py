"""Pieces by key: order, keys of any text, and memory that does not grow with the file."""

import sqlite3
import subprocess
import sys

import pytest

from lake.errors import LakeAccessError
from lake.formats.base.rows import group_pieces


def test_keys_come_in_the_order_of_their_first_piece_and_pieces_in_theirs() -> None:
    items = [("b", b"9"), ("a", b"2"), ("b", b"3"), ("c", b"4"), ("a", b"1"), ("b", b"6")]
    assert list(group_pieces(items)) == [("b", [b"9", b"3", b"6"]), ("a", [b"2", b"1"]), ("c", [b"4"])]


def test_nothing_gives_no_group() -> None:
    assert list(group_pieces([])) == []


def test_a_key_is_any_text_and_a_piece_any_bytes() -> None:
    keys = ["", "a\x00b", "half \ud800", "\U0001f600", "A", "a"]
    assert list(group_pieces([(key, b"\x00\xff") for key in keys])) == [(key, [b"\x00\xff"]) for key in keys]


def test_two_groupings_at_once_do_not_meet() -> None:
    first, second = group_pieces([("a", b"1"), ("b", b"2")]), group_pieces([("a", b"3"), ("b", b"4")])
    assert list(zip(first, second, strict=True)) == [
        (("a", [b"1"]), ("a", [b"3"])),
        (("b", [b"2"]), ("b", [b"4"])),
    ]


def test_a_disk_that_is_full_is_told_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(*arguments: object, **options: object) -> sqlite3.Connection:
        spool: sqlite3.Connection = connect(*arguments, **options)  # type: ignore[call-overload]
        spool.execute("PRAGMA max_page_count = 8")
        return spool

    monkeypatch.setattr(sqlite3, "connect", small)
    monkeypatch.setenv("TMPDIR", "/small")
    with pytest.raises(LakeAccessError, match=r"folder /small cannot hold .* is full; .* set TMPDIR"):
        list(group_pieces([("a", bytes(1 << 20))]))


def test_memory_is_bounded_by_the_cache_and_not_by_what_is_grouped() -> None:
    """100 MB in 1000 groups, in its own process."""
    script = """
import resource
from lake.formats.base import rows
rows._CACHE_KIB = 8 << 10
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items = ((str(number % 1000), bytes(10_000)) for number in range(10_000))
total = sum(len(piece) for _, pieces in rows.group_pieces(items) for piece in pieces)
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    total, grown_mib = map(int, printed.split())
    assert total == 100_000_000
    assert grown_mib < 60
