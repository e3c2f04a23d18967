"""Sibling episodes side by side: their outcomes, the choice of some, their alignment, and the page as HTML.

The page has a column for each episode and a line for steps from one state. Text of models and environments is escaped,
with visible control characters.

A walk is an episode as the keys of the states that it passed: `anchor_key` of a credit job, or `state_hash`. None is an
unknown state; it equals no state, not even itself.
"""

import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import groupby

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.cli.options import format_ids
from lake.read.text_table import format_count
from viewer.navigation import go, name_sibling
from viewer.plain import chip, describe_calls, number, one_line, signed
from viewer.queries import EXCERPT, Row, groups, transcripts
from viewer.session import read
from viewer.transcript.outline import Mark

Key = Hashable | None


@dataclass(frozen=True, slots=True)
class AlignmentLine:
    """Steps of the walks that stand in one line."""

    steps: tuple[int | None, ...]
    """For each walk, the position of its step in this line; None if it has none here."""
    is_shared: bool
    """Whether the steps were taken from one state. Otherwise they have different states, and share a line for room."""


def align(walks: Sequence[Sequence[Key]]) -> list[AlignmentLine]:
    """Put the steps of walks into lines, so that steps from one state share a line.

    The best alignment of many sequences takes too long to compute, so this one is progressive (Feng, Doolittle 1987).
    The profile begins as the first walk, one node per step. Each further walk is aligned with the profile by a longest
    common subsequence of their keys. A matched step joins its node; any other step becomes a node between its
    neighbours' nodes. Two walks share as many lines as in any alignment. With more, each walk is aligned as well as
    possible with those before it. States that all walks begin with are in the first lines.

    Steps that are not shared are put side by side between two shared nodes.

    Returns:
        Lines that have each step of each walk once, in order.
    """
    nodes: list[tuple[Key, dict[int, int]]] = []
    for index, walk in enumerate(walks):
        nodes = _add_walk(nodes, index, walk)
    lines: list[AlignmentLine] = []
    queues: list[deque[int]] = [deque() for _ in walks]

    def add_unshared_line() -> None:
        lines.append(AlignmentLine(tuple(queue.popleft() if queue else None for queue in queues), is_shared=False))

    for _, members in nodes:
        if len(members) == 1:
            ((index, step),) = members.items()
            queues[index].append(step)
            continue
        while any(queues[index] for index in members):
            add_unshared_line()
        lines.append(AlignmentLine(tuple(map(members.get, range(len(walks)))), is_shared=True))
    while any(queues):
        add_unshared_line()
    return lines


def find_first_divergence(lines: Sequence[AlignmentLine], choices: Sequence[Sequence[Hashable]]) -> int | None:
    """Return the position of the first line where the walks are not all in one state and action; None if alike.

    Walks that start from different states, as those of simulated users do, are compared from the first state that all
    of them pass. If there is none, they part at the start.

    Args:
        lines: lines of `align`.
        choices: for each walk and step, the action.
    """
    meeting = next((position for position, line in enumerate(lines) if line.is_shared and None not in line.steps), 0)
    return next((position for position in range(meeting, len(lines)) if not is_alike(lines[position], choices)), None)


class Parting(StrEnum):
    """Reason why walks part."""

    START = "they start from different states and pass no state together"
    ACTION = "they act differently in one state"
    ANSWER = "the same action is answered differently"
    END = "after the same action some are over"
    UNKNOWN = "what the same action led to is not known"


def explain_parting(
    lines: Sequence[AlignmentLine], choices: Sequence[Sequence[Hashable]], keys: Sequence[Sequence[Key]], position: int
) -> Parting:
    """Return why walks part at their first divergence, the line at `position` (see `find_first_divergence`)."""
    if lines[position].is_shared and None not in lines[position].steps:
        return Parting.ACTION
    if position == 0:
        return Parting.START
    # In the line before, all walks were in one state and took the same action.
    following = [step + 1 for step in lines[position - 1].steps if step is not None]
    if any(step == len(done) for step, done in zip(following, choices, strict=True)):
        return Parting.END
    if any(walk[step] is None for step, walk in zip(following, keys, strict=True)):
        return Parting.UNKNOWN
    return Parting.ANSWER


def is_alike(line: AlignmentLine, choices: Sequence[Sequence[Hashable]]) -> bool:
    """Return whether all walks were in one state and took the same action."""
    if not line.is_shared or None in line.steps:
        return False
    return len({done[step] for done, step in zip(choices, line.steps, strict=True) if step is not None}) == 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Lines from `first` to `last`, inclusive."""

    first: int
    last: int


MIN_FOLDED_LINES = 4
"""Minimum number of consecutive equal lines to fold."""


def fold_alike_lines(lines: Sequence[AlignmentLine], choices: Sequence[Sequence[Hashable]]) -> list[Stretch]:
    """Return all lines in order: `MIN_FOLDED_LINES` or more alike in a row as one stretch, each other line alone."""
    stretches: list[Stretch] = []
    for alike, positions in groupby(range(len(lines)), lambda position: is_alike(lines[position], choices)):
        run = list(positions)
        if alike and len(run) >= MIN_FOLDED_LINES:
            stretches.append(Stretch(run[0], run[-1]))
        else:
            stretches += [Stretch(line, line) for line in run]
    return stretches


def find_common_subsequence(keys: Sequence[Key], other_keys: Sequence[Key]) -> list[tuple[int, int]]:
    """Return positions (in keys, in other_keys) of a longest common subsequence, in order; it has equal beginnings.

    Uses bit vectors (Hyyro 2004). Bit i of row j is 0 where the i-th key of `other_keys` extends the subsequence with
    the first j keys of `keys`. Rows are Python integers, so a row costs len(other_keys) / 64 machine words. Of equal
    keys the earliest is taken, so equal beginnings are matched.
    """
    where: dict[Key, int] = {}
    for bit, key in enumerate(other_keys):
        if key is not None:
            where[key] = where.get(key, 0) | 1 << bit
    full = (1 << len(other_keys)) - 1
    rows = [full]
    for key in keys:
        row = rows[-1]
        met = row & where.get(key, 0)
        rows.append(((row + met) | (row - met)) & full)
    pairs: list[tuple[int, int]] = []
    line, bit = len(keys), len(other_keys) - 1
    while line > 0 and bit >= 0:
        if rows[line] >> bit & 1:
            bit -= 1
        elif rows[line - 1] >> bit & 1:
            pairs.append((line - 1, bit))
            line, bit = line - 1, bit - 1
        else:
            line -= 1
    return pairs[::-1]


def _add_walk(
    nodes: Sequence[tuple[Key, dict[int, int]]], index: int, walk: Sequence[Key]
) -> list[tuple[Key, dict[int, int]]]:
    """Return the nodes with one more walk; each unmatched step becomes a node before the next match."""
    pairs = find_common_subsequence([key for key, _ in nodes], walk)
    joined: list[tuple[Key, dict[int, int]]] = []
    node = step = 0
    for at_node, at_step in [*pairs, (len(nodes), len(walk))]:
        joined += nodes[node:at_node]
        joined += [(walk[position], {index: position}) for position in range(step, at_step)]
        if at_node < len(nodes):
            key, members = nodes[at_node]
            joined.append((key, members | {index: at_step}))
        node, step = at_node + 1, at_step + 1
    return joined


_UNKNOWN = '<span class="unknown" title="not known">\N{EN DASH}</span>'
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")


@dataclass(frozen=True, slots=True)
class EpisodeColumn:
    """An episode."""

    title: str
    """Foreign text."""
    facts: Row
    """A row of `viewer.queries.transcripts.read_facts`."""
    address: Callable[[int | None], str]
    """Function from a step, or None, to the address of the episode there."""
    without: str | None
    """Address of the comparison without this episode; None if too few would remain."""


@dataclass(frozen=True, slots=True)
class StepCell:
    """A step."""

    step: int
    action: str
    """The action in one line; foreign text."""
    state: str | None
    """Foreign text."""
    choice: int
    """Equal for equal actions."""
    advantage: float | None
    marks: tuple[Mark, ...]
    """Faults of the step, as in the transcript."""


def describe_action(action: str | None, tool_calls: str | None) -> str:
    """Return the action of a step in one line: its text, or else its tool calls as `name(arguments)`."""
    if action and action.strip():
        return one_line(action, EXCERPT)
    return describe_calls(tool_calls or "[]", EXCERPT)


def render_comparison(
    columns: Sequence[EpisodeColumn],
    lines: Sequence[AlignmentLine],
    stretches: Sequence[Stretch],
    cells: Callable[[int, int], StepCell],
    *,
    divergence: int | None,
    unfold: Callable[[Stretch], str],
) -> str:
    """Return a comparison as HTML.

    Args:
        columns: the episodes.
        lines: all lines of their alignment.
        stretches: stretches of the page; one with several lines is folded.
        cells: function from a column and a position of its walk to the step.
        divergence: the first line where they part.
        unfold: function from a stretch to the address that shows its lines.
    """
    heads = "".join(f'<th scope="col">{_render_head(column)}</th>' for column in columns)
    body = []
    for stretch in stretches:
        if divergence == stretch.first:
            body.append(f'<tr class="parting"><td colspan="{len(columns)}">First divergence</td></tr>')
        if stretch.first == stretch.last:
            body.append(_render_line(columns, lines[stretch.first], cells))
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
        f'<div class="trajlake-beside{" wide" if len(columns) > 4 else ""}" role="region" aria-label="Side by side">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _render_head(column: EpisodeColumn) -> str:
    """Return the heading of a column: the episode, its outcome, and the link that removes it."""
    facts = column.facts
    away = ""
    if column.without is not None:
        away = f' <a class="away" href="{escape(column.without)}" title="Take this one out">\N{MULTIPLICATION SIGN}</a>'
    figures = [
        ("", escape(one_line(facts["status"]))),
        ("outcome", _UNKNOWN if facts["outcome"] is None else number(facts["outcome"])),
        ("", format_count(facts["num_steps"], "step")),
    ]
    advantages = (("A_E", facts["a_episode"]), ("mean A", facts["mean_advantage"]))
    figures += [(label, signed(amount)) for label, amount in advantages if amount is not None]
    line = " \N{MIDDLE DOT} ".join(f"{label} <b>{value}</b>".strip() for label, value in figures)
    return f'<a href="{escape(column.address(None))}">{escape(one_line(column.title))}</a>{away}<div>{line}</div>'


def _render_line(columns: Sequence[EpisodeColumn], line: AlignmentLine, cells: Callable[[int, int], StepCell]) -> str:
    """Return the row of a shared state, then the row of the steps."""
    cells_of_line = [None if step is None else cells(number, step) for number, step in enumerate(line.steps)]
    taken_steps = [cell for cell in cells_of_line if cell is not None]
    rows = ""
    if line.is_shared:
        count = "all" if len(taken_steps) == len(columns) else f"{len(taken_steps)} of {len(columns)}"
        state = escape(one_line(taken_steps[0].state or "", EXCERPT)) or "(empty state)"
        rows = f'<tr class="state"><td colspan="{len(columns)}"><span>{count}</span> {state}</td></tr>'
    differ = line.is_shared and len({cell.choice for cell in taken_steps}) > 1
    marks = iter(
        mark_differences([cell.action for cell in taken_steps])
        if differ
        else [escape(cell.action) for cell in taken_steps]
    )
    inner = []
    for column, cell in zip(columns, cells_of_line, strict=True):
        if cell is None:
            inner.append('<td class="none"></td>')
            continue
        kind = "differs" if differ else "alike" if line.is_shared else "alone"
        inner.append(f'<td class="{kind}">{_render_cell(column, cell, next(marks), own_state=not line.is_shared)}</td>')
    return f"{rows}<tr>{''.join(inner)}</tr>"


def _render_cell(column: EpisodeColumn, cell: StepCell, action: str, *, own_state: bool) -> str:
    """Return a step: its state unless shared, its number, action and advantage."""
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


def mark_differences(texts: Sequence[str]) -> list[str]:
    """Return texts as HTML, with marks on the words that are not in all of them."""
    words = [_WORDS.findall(text) for text in texts]
    common: list[set[int]] = [set() for _ in texts]
    for line in align([[word.strip() for word in text_words] for text_words in words]):
        if line.is_shared and None not in line.steps:
            for shared, step in zip(common, line.steps, strict=True):
                shared.add(step if step is not None else -1)
    return [_mark_words(text_words, shared) for text_words, shared in zip(words, common, strict=True)]


def _mark_words(words: Sequence[str], shared: set[int]) -> str:
    """Return words with marks around those that are not shared; adjacent ones have one mark."""
    pieces: list[tuple[bool, str]] = []
    for position, word in enumerate(words):
        is_odd = position not in shared
        if pieces and pieces[-1][0] == is_odd:
            pieces[-1] = (is_odd, pieces[-1][1] + word)
        else:
            pieces.append((is_odd, word))
    return "".join(f"<mark>{escape(text)}</mark>" if is_odd else escape(text) for is_odd, text in pieces)


def describe_prompts(prompts: Sequence[tuple[str, str]]) -> str | None:
    """Return in Markdown where system prompts first differ; None if they are alike.

    Args:
        prompts: title of an episode, and its prompt; foreign text.
    """
    titles_by_prompt: dict[str, list[str]] = {}
    for title, prompt in prompts:
        titles_by_prompt.setdefault(prompt, []).append(title)
    if len(titles_by_prompt) < 2:
        return None
    letters = enumerate(zip(*titles_by_prompt, strict=False))
    end = next((place for place, others in letters if len(set(others)) > 1), min(map(len, titles_by_prompt)))
    start = end - len(re.split(r"\s", prompts[0][1][:end])[-1])  # the beginning of the word
    versions = (
        f"{chip(prompt[start:], 80) if prompt[start:].strip() else 'nothing more'} in {chip(', '.join(titles), 120)}"
        for prompt, titles in titles_by_prompt.items()
    )
    return f"The system prompts differ, first at character {start:,}: {'; '.join(versions)}."


_MAX_SIBLINGS = 1000


MAX_OUTCOME_MARKS = 600
"""Maximum number of outcomes that a strip draws; of more siblings every second, third, ..."""


def render_outcomes(
    frame: pl.DataFrame, mean: float | None, deviation: float | None, address: Callable[[Row], str]
) -> str:
    """Return outcomes from the lowest to the highest as HTML: marks that open the episode, ? if not scored.

    Args:
        frame: rows of `viewer.queries.groups.read_outcomes`.
        mean: drawn as a dashed line, with one `deviation` shaded around it.
        address: function from a row, with ids as text, to the address of its episode.
    """
    stride = -(-frame.height // MAX_OUTCOME_MARKS)
    rows = format_ids(frame.gather_every(max(stride, 1))).to_dicts()
    outcomes: list[float] = [row["outcome"] for row in rows if row["outcome"] is not None]
    low, high = min([0.0, *outcomes]), max([0.0, *outcomes])
    height = (high - low) or 1.0

    def up(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / height

    html = []
    if mean is not None:
        below, above = up(mean - (deviation or 0.0)), up(mean + (deviation or 0.0))
        html.append(f'<div class="deviation" style="bottom:{below:.2f}%;height:{above - below:.2f}%"></div>')
        html.append(f'<div class="mean" style="bottom:{up(mean):.2f}%"></div>')
    for row in rows:
        label = f"{name_sibling(row)}: {number(row['outcome'])}"
        where = "" if row["outcome"] is None else f' style="--up:{up(row["outcome"]):.2f}%"'
        kind = "unscored" if row["outcome"] is None else "above" if row["outcome"] >= (mean or 0.0) else "below"
        mark = "?" if row["outcome"] is None else ""
        html.append(
            f'<a class="{kind}" href="{escape(address(row))}" title="{label}" aria-label="{label}"{where}>{mark}</a>'
        )
    legend = "" if mean is None else f"Dashed: mean {number(mean)}, shaded: one standard deviation {number(deviation)}."
    some = "" if stride < 2 else f" One sibling in {stride} is drawn."
    return (
        f'<div class="trajlake-strip"><div class="ends"><span>{number(high)}</span><span>{number(low)}</span></div>'
        f'<div class="marks">{"".join(html)}</div></div>'
        f'<div class="trajlake-note">Outcomes in order. {legend}{some} ? means not scored.</div>'
    )


def choose_siblings(
    group_id: int, score: str | None, episode_ids: list[int], *, changes_address: bool = False
) -> list[int]:
    """Draw the choice of two to eight siblings to compare; `changes_address` writes it to the address."""
    outcomes = read(groups.read_outcomes, group_id, score)
    siblings = outcomes.sort("rollout_index", "attempt", "episode_id", nulls_last=True).head(_MAX_SIBLINGS)
    labels = {
        row["episode_id"]: f"{name_sibling(row)}: {number(row['outcome'])} ({one_line(row['status'])})"
        for row in siblings.iter_rows(named=True)
    }
    key = f"beside-{'-'.join(map(str, episode_ids))}"

    def follow() -> None:
        if changes_address and len(choice := st.session_state[key]) > 1:
            go(episode=[ids.to_text(episode_id) for episode_id in choice], page=None)

    chosen, total = len(episode_ids), outcomes.height
    return st.multiselect(
        "Side by side" if chosen >= total else f"Side by side: {chosen} of {total:,} siblings",
        list(labels),
        default=[episode_id for episode_id in episode_ids if episode_id in labels],
        key=key,
        on_change=follow,
        format_func=labels.__getitem__,
        max_selections=transcripts.MOST_SIDE_BY_SIDE,
        help="Two to eight rollouts of this group, each with its outcome.",
        placeholder="choose two to eight rollouts",
    )
