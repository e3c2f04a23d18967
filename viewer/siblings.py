"""The siblings of a group: all their outcomes at a glance, and the choice of some to put side by side."""

from collections.abc import Callable
from html import escape

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.cli.options import readable
from viewer.links import Page
from viewer.navigation import go, href
from viewer.pinned import read
from viewer.plain import number, one_line
from viewer.queries import Row, groups, side_by_side

_MOST_LISTED = 1000


def name(facts: Row) -> str:
    """A sibling among its siblings: `rollout 3`, with the attempt if it was retried."""
    again = f", attempt {facts['attempt']}" if facts["attempt"] else ""
    return f"rollout {facts['rollout_index']}{again}"


MARKS = 600
"""Outcomes that a strip draws; of more siblings every second, third, ..."""


def strip(frame: pl.DataFrame, mean: float | None, deviation: float | None, address: Callable[[Row], str]) -> str:
    """Outcomes from the lowest to the highest, as HTML: a mark each that opens the episode, ? where it is not scored.

    Args:
        frame: of `viewer.queries.groups.strip`.
        mean: drawn as a dashed line, with one `deviation` shaded around it.
        address: of a row with ids as text.
    """
    every = -(-frame.height // MARKS)
    rows = readable(frame.gather_every(max(every, 1))).to_dicts()
    known: list[float] = [row["outcome"] for row in rows if row["outcome"] is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    height = (high - low) or 1.0

    def up(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / height

    parts = []
    if mean is not None:
        below, above = up(mean - (deviation or 0.0)), up(mean + (deviation or 0.0))
        parts.append(f'<div class="deviation" style="bottom:{below:.2f}%;height:{above - below:.2f}%"></div>')
        parts.append(f'<div class="mean" style="bottom:{up(mean):.2f}%"></div>')
    for row in rows:
        said = f"{name(row)}: {number(row['outcome'])}"
        where = "" if row["outcome"] is None else f' style="--up:{up(row["outcome"]):.2f}%"'
        kind = "unscored" if row["outcome"] is None else "above" if row["outcome"] >= (mean or 0.0) else "below"
        mark = "?" if row["outcome"] is None else ""
        parts.append(
            f'<a class="{kind}" href="{escape(address(row))}" title="{said}" aria-label="{said}"{where}>{mark}</a>'
        )
    told = "" if mean is None else f"Dashed: mean {number(mean)}, shaded: one standard deviation {number(deviation)}."
    some = "" if every < 2 else f" One sibling in {every} is drawn."
    return (
        f'<div class="trajlake-strip"><div class="ends"><span>{number(high)}</span><span>{number(low)}</span></div>'
        f'<div class="marks">{"".join(parts)}</div></div>'
        f'<div class="trajlake-note">Outcomes in order. {told}{some} ? means not scored.</div>'
    )


def choose(group_id: int, score: str | None, chosen: list[int], *, leads: bool = False) -> list[int]:
    """The siblings side by side, as the reader chooses them: two to eight; `chosen` at first.

    Args:
        leads: the address follows, as on the page that shows them.
    """
    listed = read(groups.strip, group_id, score).sort("rollout_index", "attempt", "episode_id", nulls_last=True)
    frame = listed.head(_MOST_LISTED)
    rows = {row["episode_id"]: row for row in frame.iter_rows(named=True)}
    labels = {one: f"{name(row)}: {number(row['outcome'])} ({one_line(row['status'])})" for one, row in rows.items()}
    key = f"beside-{'-'.join(map(str, chosen))}"

    def follow() -> None:
        if leads and len(wanted := st.session_state[key]) > 1:
            go(episode=[ids.to_text(one) for one in wanted], page=None)

    return st.multiselect(
        "Side by side",
        list(labels),
        default=[one for one in chosen if one in labels],
        key=key,
        on_change=follow,
        format_func=labels.__getitem__,
        max_selections=side_by_side.MOST,
        help="Two to eight rollouts of this group, each with its outcome.",
        placeholder="choose two to eight rollouts",
    )


def address(chosen: list[int], score: str | None, credit: str | None) -> str:
    """The page that shows them side by side."""
    return href(Page.COMPARE, episode=[ids.to_text(one) for one in chosen], score=score, credit=credit)
