"""What of a credit is older than the data: the groups that changed since, by name, and why episodes were taken back."""

import re
from collections.abc import Callable
from html import escape

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.judgements.credit import Credit
from lake.read.text_table import counted
from viewer import tables
from viewer.links import Page
from viewer.navigation import anchor, href
from viewer.pinned import read
from viewer.plain import chip, visible
from viewer.queries import Row, episodes, lineage, training
from viewer.queries.episodes import EpisodeFilter

MOST = 200_000
"""Episodes of a lake of which every page says what changed."""
LISTED = 100
"""Groups that are listed at most."""
_COLUMNS = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "collection_round": tables.value("Round"),
    "lost": tables.value("Lost", "Episodes that were retracted or replaced."),
    "joined": tables.value("Joined", "Episodes that have no advantages yet."),
    "replacing": tables.value("Replacing", "Of those that joined: retries that took the place of others."),
    "why": tables.wide("Why"),
    "group_id": tables.ident("Group"),
}
_KINDS = {"superseded": "replaced by a later attempt", "retracted": "retracted", "forgotten": "forgotten"} | {
    "restored": "shown again"
}


def line(*used: Credit | None) -> None:
    """One line where the current credit is older than the data, with the way to its groups.

    Of a large lake nothing is said: what changed is found by going through all of its advantages, which the page on
    anchors does.

    Args:
        used: whose advantages the page shows; it says nothing where none of them is the current one. Without any: it
            is about the current one whatever the page shows.
    """
    if read(episodes.totals, EpisodeFilter())["episodes"] > MOST:
        return
    current = read(training.credit_named)
    if current is None or (used and current.series_id not in {one.series_id for one in used if one is not None}):
        return
    changed = read(lineage.changed_groups, current).height
    if changed:
        told = counted(changed, "group") + (" or more" if changed >= LISTED else "")
        link = anchor(f"{told} changed since", href(Page.ANCHORS))
        st.html(f'<p class="trajlake-stale">The current credit is older than the data: {link}.</p>')


def warning(sentence: str) -> None:
    """That what is shown is older than the data; plain text, which may hold foreign names."""
    shown = escape(visible(sentence[:1].upper() + sentence[1:]))
    with_code = re.sub("`([^`]*)`", r"<code>\1</code>", shown)
    st.html(f'<p class="trajlake-stale">{with_code}.</p>')


def groups(credit: Credit) -> None:
    """The groups that changed since the credit was computed, each a link, and why."""
    frame = read(lineage.changed_groups, credit)
    if frame.is_empty():
        return
    label, taken_back = "Groups that changed since", read(lineage.taken_back_since, credit)
    frame = frame.with_columns(why=pl.Series(list(map(_why(taken_back), frame.to_dicts())), dtype=pl.String))
    tables.table(
        frame, tables.known(frame, _COLUMNS), label=label, href=lambda row: href(Page.GROUP, group=row["group_id"])
    )
    said = []
    for row in taken_back.iter_rows(named=True):
        why = f": {chip(row['reason'], 300)}" if row["reason"] else ""
        said.append(f"{counted(row['episodes'], 'episode')} {_KINDS[row['kind']]}{why}")
    if said:
        st.caption(f"In this lake since the credit was computed: {'; '.join(said)}.")


def _why(taken_back: pl.DataFrame) -> Callable[[Row], str | None]:
    """Why a group changed, in words; None where more than one reason fits: a retraction does not say of which group."""
    others = taken_back.filter(~pl.col("kind").is_in(("superseded", "restored"))).to_dicts()
    reason = None
    if len(others) == 1:
        reason = f"{_KINDS[others[0]['kind']]}{': ' if others[0]['reason'] else ''}{others[0]['reason'] or ''}"

    def why(row: Row) -> str | None:
        is_replaced, is_taken = row["replacing"] > 0, row["lost"] > row["replacing"]
        if is_taken and reason is None:
            return None
        found = [_KINDS["superseded"]] if is_replaced else []
        found += [reason] if is_taken and reason is not None else []
        found += ["new episodes"] if row["joined"] > row["replacing"] else []
        return "; ".join(found) or None

    return why
