"""Episodes side by side as HTML: a column each, a line for steps from the same state, and every cell a link.

Everything that models and environments wrote is escaped, its control characters visible.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from viewer.alignment import Line, Stretch, align
from viewer.plain import call, number, one_line, signed
from viewer.queries import EXCERPT, Row
from viewer.transcript.ledger import Mark

_UNKNOWN = '<span class="unknown" title="not known">\N{EN DASH}</span>'
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")


@dataclass(frozen=True, slots=True)
class Column:
    """An episode."""

    title: str
    """Foreign text."""
    facts: Row
    """Of `viewer.queries.side_by_side.facts`."""
    address: Callable[[int | None], str]
    """Where it is shown, at a step."""
    without: str | None
    """Address of the comparison without it; None: too few would be left."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A step."""

    step: int
    action: str
    """What was done, in a line; foreign text."""
    state: str | None
    """Foreign text."""
    choice: int
    """Equal where the same was done."""
    advantage: float | None
    marks: tuple[Mark, ...]
    """What went wrong there, in the words of the transcript."""


def done(action: str | None, tool_calls: str | None) -> str:
    """What a step did, in a line: its text, or else its tool calls as `name(arguments)`."""
    if action and action.strip():
        return one_line(action, EXCERPT)
    try:
        calls: Any = json.loads(tool_calls or "[]")
    except (ValueError, RecursionError):
        return one_line(tool_calls or "", EXCERPT)
    named = [call(one) for one in (calls if isinstance(calls, list) else [calls])]
    return one_line("; ".join(f"{name}({arguments})" for name, arguments in named), EXCERPT)


def table(
    columns: Sequence[Column],
    lines: Sequence[Line],
    stretches: Sequence[Stretch],
    cells: Callable[[int, int], Cell],
    *,
    divergence: int | None,
    unfold: Callable[[Stretch], str],
) -> str:
    """The page of a comparison.

    Args:
        columns: the episodes.
        lines: all lines of their alignment.
        stretches: those that the page has; of more than one line only where they start and end is told.
        cells: the step of a column at a position of its walk.
        divergence: the first line where they part.
        unfold: the address that shows the lines of a stretch.
    """
    heads = "".join(f'<th scope="col">{_head(column)}</th>' for column in columns)
    body = []
    for stretch in stretches:
        if divergence == stretch.first:
            body.append(f'<tr class="parting"><td colspan="{len(columns)}">First divergence</td></tr>')
        if stretch.first == stretch.last:
            body.append(_line(columns, lines[stretch.first], cells))
        else:
            steps = zip(lines[stretch.first].steps, lines[stretch.last].steps, strict=True)
            spans = {f"steps {first} to {last}" for first, last in steps}
            where = spans.pop() if len(spans) == 1 else "in a row"
            many = stretch.last - stretch.first + 1
            body.append(
                f'<tr class="folded"><td colspan="{len(columns)}"><a href="{escape(unfold(stretch))}">'
                f"{many} steps alike, {where}: the same states and actions. Show them</a></td></tr>"
            )
    return (
        '<div class="trajlake-beside" role="region" aria-label="Side by side"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _head(column: Column) -> str:
    """Who it is, how it ended, and the way to take it out."""
    facts = column.facts
    away = ""
    if column.without is not None:
        away = f' <a class="away" href="{escape(column.without)}" title="Take this one out">\N{MULTIPLICATION SIGN}</a>'
    told = [
        ("", escape(one_line(facts["status"]))),
        ("outcome", _UNKNOWN if facts["outcome"] is None else number(facts["outcome"])),
        ("steps", number(facts["num_steps"])),
        ("A_E", _UNKNOWN if facts["a_episode"] is None else signed(facts["a_episode"])),
        ("mean A", _UNKNOWN if facts["mean_advantage"] is None else signed(facts["mean_advantage"])),
    ]
    shown = " \N{MIDDLE DOT} ".join(f"{label} <b>{value}</b>".strip() for label, value in told)
    return f'<a href="{escape(column.address(None))}">{escape(one_line(column.title))}</a>{away}<div>{shown}</div>'


def _line(columns: Sequence[Column], line: Line, cells: Callable[[int, int], Cell]) -> str:
    """The state where it is shared, then what each did."""
    found = [None if step is None else cells(number, step) for number, step in enumerate(line.steps)]
    there = [cell for cell in found if cell is not None]
    rows = ""
    if line.is_shared:
        who = "all" if len(there) == len(columns) else f"{len(there)} of {len(columns)}"
        state = escape(one_line(there[0].state or "", EXCERPT)) or "(empty state)"
        rows = f'<tr class="state"><td colspan="{len(columns)}"><span>{who}</span> {state}</td></tr>'
    differ = line.is_shared and len({cell.choice for cell in there}) > 1
    marks = iter(marked([cell.action for cell in there]) if differ else [escape(cell.action) for cell in there])
    inner = []
    for column, cell in zip(columns, found, strict=True):
        if cell is None:
            inner.append('<td class="none"></td>')
            continue
        kind = "differs" if differ else "alike" if line.is_shared else "alone"
        inner.append(f'<td class="{kind}">{_cell(column, cell, next(marks), own_state=not line.is_shared)}</td>')
    return f"{rows}<tr>{''.join(inner)}</tr>"


def _cell(column: Column, cell: Cell, action: str, *, own_state: bool) -> str:
    """A step: its state where it is its own, its number, what was done, its advantage."""
    above = ""
    if own_state and cell.state is not None:
        above = f"<small>{escape(one_line(cell.state, EXCERPT // 2)) or '(empty state)'}</small>"
    weight = f" <em>{signed(cell.advantage)}</em>" if cell.advantage is not None else ""
    marks = "".join(
        f' <span class="mark {colour}" title="{escape(why or "")}">{escape(label)}</span>'
        for label, colour, why in cell.marks
    )
    return (
        f'<a href="{escape(column.address(cell.step))}">{above}<b>{cell.step}</b> '
        f"{action or '(nothing said)'}{weight}{marks}</a>"
    )


def marked(texts: Sequence[str]) -> list[str]:
    """Texts as HTML in which the words that not all of them share are marked."""
    words = [_WORDS.findall(text) for text in texts]
    common: list[set[int]] = [set() for _ in texts]
    for line in align([[word.strip() for word in own] for own in words]):
        if line.is_shared and None not in line.steps:
            for own, step in zip(common, line.steps, strict=True):
                own.add(step if step is not None else -1)
    return [_with_marks(own, shared) for own, shared in zip(words, common, strict=True)]


def _with_marks(words: Sequence[str], shared: set[int]) -> str:
    """Words with marks around those that are not shared; what stands side by side has one mark."""
    parts: list[tuple[bool, str]] = []
    for position, word in enumerate(words):
        is_odd = position not in shared
        if parts and parts[-1][0] == is_odd:
            parts[-1] = (is_odd, parts[-1][1] + word)
        else:
            parts.append((is_odd, word))
    return "".join(f"<mark>{escape(text)}</mark>" if is_odd else escape(text) for is_odd, text in parts)
