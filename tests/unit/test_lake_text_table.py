"""Rows as text: they fit the terminal, ids and numbers are never cut, and what does not fit is a value a line."""

import time
import unicodedata
from itertools import pairwise

import pytest

from lake.read.text_table import count_noun, format_count, format_rows, format_table

ID = "046pfgs85g35q"


def printed(width: int | None, *rows: tuple[object, ...]) -> list[str] | None:
    """A table with an id, a number and two texts."""
    return format_table(["id", "n", "one", "two"], rows, [False, True, False, False], [True, True, False, False], width)


def test_columns_are_as_wide_as_their_longest_value() -> None:
    assert printed(None, (ID, 1.5, "a", None), (ID, 12, "bcd", "e")) == [
        "id               n  one  two",
        f"{ID}  1.5  a    -",
        f"{ID}   12  bcd  e",
    ]


@pytest.mark.parametrize("width", range(41, 130))
def test_a_table_fits_and_cuts_texts_alone(width: int) -> None:
    row = (ID, 123456.0, "x" * 50, "y" * 30)
    lines = printed(width, row)
    assert lines is not None
    assert all(len(line) <= width for line in lines)
    assert lines[1].startswith(f"{ID}  123456  x")
    first, two = lines[1].split()[2:]
    assert (first == "x" * 50 and two == "y" * 30) == (width >= 13 + 6 + 50 + 30 + 6), "no text is cut in vain"
    if len(first) < 50:
        assert first.endswith("\N{HORIZONTAL ELLIPSIS}")
        assert len(first) >= len(two) - 1, "the widest is cut first"


def test_what_cannot_fit_is_no_table() -> None:
    assert printed(40, (ID, 123456.0, "x" * 50, "y" * 30)) is None
    assert printed(10, (ID, 1, "a", "b")) is None


def test_a_pipe_gets_whole_texts_within_reason() -> None:
    """What doctor found and what a plan explains is read in a file as well."""
    text_table = format_table(["t"], [("x" * 500,), ("y" * 501,)], [False], [False], None)
    assert text_table is not None
    assert text_table[1:] == ["x" * 500, "y" * 499 + "\N{HORIZONTAL ELLIPSIS}"]


def test_a_value_a_line_is_printed_in_full() -> None:
    rows = [(ID, 1, "x" * 100, None), (ID, 2, "b", "c")]
    assert list(format_rows(["id", "n", "one", "two"], rows)) == [
        f" id = {ID}",
        "  n = 1",
        f"one = {'x' * 100}",
        "two = -",
        "",
        f" id = {ID}",
        "  n = 2",
        "one = b",
        "two = c",
    ]


def test_wide_characters_take_two_cells_and_control_characters_none() -> None:
    text_table = format_table(
        ["a", "b"], [("\u4f60\u597d", "x"), ("e\u0301", "\x1b[31m\n\u202e")], [False] * 2, [False] * 2, None
    )
    assert text_table == ["a     b", "\u4f60\u597d  x", "e\u0301     \ufffd[31m \ufffd"]


def test_rows_keep_their_order() -> None:
    text_table = format_table(["n"], [(n,) for n in range(20)], [True], [True], 80)
    assert text_table is not None
    assert all(int(first) < int(two) for first, two in pairwise(text_table[1:]))


@pytest.mark.parametrize(
    "text", ["Tür " * 100_000, "x" * 400_000, "日本" * 200_000, "e\N{COMBINING ACUTE ACCENT}" * 200_000]
)
@pytest.mark.parametrize("width", [None, 60])
def test_a_long_text_is_cut_in_time_that_grows_with_its_length(text: str, width: int | None) -> None:
    began = time.process_time()
    text_table = format_table(["text"], [(text,)], [False], [False], width)
    assert time.process_time() - began < 5, "one character at a time would take minutes"
    assert text_table is not None
    (_, line) = text_table
    assert line.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert text.startswith(line[:-1].rstrip())
    cells = sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) == "W" else 1 for c in line)
    assert (width or 500) - 1 <= cells <= (width or 500)


def test_counts_of_training_have_thousands_separators() -> None:
    assert [format_count(n, "step") for n in (0, 1, 2592)] == ["0 steps", "1 step", "2,592 steps"]
    assert count_noun(2592, "step") == "2592 steps"
