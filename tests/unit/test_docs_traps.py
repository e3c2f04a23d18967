"""docs/guides/traps.md: every known trap has its row, and every test that a row names exists."""

import ast
import re
from functools import cache

import pytest

from testkit.shared import CHECKOUT

PAGE = (CHECKOUT / "docs" / "guides" / "traps.md").read_text("utf-8")
KNOWN = {
    "Tokens": 10,
    "Log-probabilities": 12,
    "Normalisation of the loss": 10,
    "Packing and padding": 7,
    "Weight transfer": 8,
}
"""Traps of each group in the collection that the page answers to; `Met here` may grow."""
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> dict[str, list[list[str]]]:
    """The cells of each row, by group."""
    rows_by_trap: dict[str, list[list[str]]] = {}
    for line in PAGE.splitlines():
        if not line.startswith("|") or line.startswith(("| trap |", "|---")):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        if heading := re.fullmatch(r"\*\*(.+)\*\*", cells[0]):
            rows_by_trap[heading[1]] = []
        else:
            rows_by_trap[list(rows_by_trap)[-1]].append(cells)
    return rows_by_trap


ROWS = rows()


@cache
def defined_in(file: str) -> set[str]:
    """Names of the tests that a file defines."""
    tree = ast.parse((CHECKOUT / file).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_known_trap_has_a_row() -> None:
    assert {group: len(ROWS[group]) for group in KNOWN} == KNOWN
    assert list(ROWS) == [*KNOWN, "Met here"]
    traps = [cells[0] for group in ROWS.values() for cells in group]
    assert len(set(traps)) == len(traps)


@pytest.mark.parametrize("group", ROWS)
def test_every_trap_names_tests_that_exist_or_says_why_there_are_none(group: str) -> None:
    for trap, done, covered in ROWS[group]:
        named = NAMED.findall(covered)
        for file, name in named:
            assert name in defined_in(file), f"{trap}: {file}::{name}"
        assert named or "not covered: " in covered, trap
        assert done or not named, f"{trap}: tested, and nothing is said about it"
        rest = NAMED.sub("", covered).strip(" ,;")
        assert not rest or re.search(r"not covered: \w+", rest), f"{trap}: {rest}"


def test_what_an_empty_answer_leaves_open_is_said() -> None:
    """A group without any test would be a list of wishes."""
    for group, cells in ROWS.items():
        assert sum(bool(NAMED.search(covered)) for _, _, covered in cells) > len(cells) / 2, group
