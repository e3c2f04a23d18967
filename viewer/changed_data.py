"""Data that changed: deleted episodes with the reason, and credit that is older than the data."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements.credit import Credit
from lake.read.text_table import count_noun
from viewer import tables
from viewer.navigation import Page, anchor, href
from viewer.plain import chip, visible
from viewer.queries import Row, episodes, lineage, training
from viewer.queries.episodes import EpisodeFilter
from viewer.session import read


def describe_deleted_episodes(episode_ids: Sequence[int]) -> str:
    """Say of episodes that are not shown when and why each was deleted, or that it never existed."""
    retractions = {row["episode_id"]: row for row in read(lineage.read_retractions, tuple(episode_ids))}
    paragraphs = []
    for episode_id in map(ids.to_text, episode_ids):
        row = retractions.get(ids.from_text(episode_id))
        if row is None:
            paragraphs.append(f"This lake holds no episode {chip(episode_id)}.")
            continue
        text = f"Episode {chip(episode_id)} was {row['kind']} {_format_time_and_reason(row)}"
        if row["superseded_by"] is not None:
            newer = ids.to_text(row["superseded_by"])
            text += f"; [{newer}]({href(Page.EPISODE, episode=newer)}) took its place"
        if row["kind"] == "retracted":
            text += f"; `trajlake restore {episode_id}` shows it again"
        advice = f"An older snapshot may still have it: `trajlake show {episode_id} --as-of NAME`."
        paragraphs.append(f"{text}. {advice}")
    return "\n\n".join(paragraphs)


def describe_deleted_group(group_id: int) -> str:
    """Say of a group that is not shown when and why its episodes were deleted, or that it never existed."""
    name, rows = chip(ids.to_text(group_id)), read(lineage.read_group_retractions, group_id)
    if not rows:
        return f"This lake holds no group {name}."
    times = Counter((row["kind"], row["reason"]) for row in rows)
    last: dict[tuple[str, str | None], Row] = {}
    for row in rows:
        last.setdefault((row["kind"], row["reason"]), row)
    text = "; ".join(
        f"{count_noun(times[why], 'episode')} {row['kind']} {_format_time_and_reason(row)}" for why, row in last.items()
    )
    return (
        f"All of group {name} was taken back: {text}. An older snapshot may still have it, as **Data of ...** shows it."
    )


def _format_time_and_reason(row: Row) -> str:
    return f"at {row['at']:%Y-%m-%d %H:%M:%S} UTC" + (f": {chip(row['reason'])}" if row["reason"] else "")


MAX_EPISODES = 200_000
"""Largest lake, in episodes, for which every page warns of a stale credit."""
MAX_LISTED_GROUPS = 100
"""Maximum number of groups to list."""
_COLUMNS = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "collection_round": tables.value("Round"),
    "lost": tables.value("Lost", "Episodes that were retracted or replaced."),
    "joined": tables.value("Joined", "Episodes that have no advantages yet."),
    "replacing": tables.value("Replacing", "Joined episodes that are retries and replace others."),
    "why": tables.wide("Why"),
    "group_id": tables.ident("Group"),
}
_KINDS = {
    "superseded": "replaced by a later attempt",
    "retracted": "retracted",
    "forgotten": "forgotten",
    "restored": "shown again",
}


def warn_if_credit_is_stale(*shown_credits: Credit | None) -> None:
    """Draw one line if the current credit is older than the data, with a link to the changed groups.

    Finding the changes needs a scan of all advantages. For a large lake only the page on anchors does that.

    Args:
        shown_credits: credits of the page. If there are any, but not the current one, there is no warning.
    """
    if read(episodes.compute_totals, EpisodeFilter())["episodes"] > MAX_EPISODES:
        return
    current = read(training.look_up_credit)
    series = {credit.series_id for credit in shown_credits if credit is not None}
    if current is None or (shown_credits and current.series_id not in series):
        return
    changed = read(lineage.read_changed_groups, current).height
    if changed:
        groups = count_noun(changed, "group") + (" or more" if changed >= MAX_LISTED_GROUPS else "")
        link = anchor(f"{groups} changed since", href(Page.ANCHORS))
        st.html(f'<p class="trajlake-stale">The current credit is older than the data: {link}.</p>')


def draw_stale_warning(sentence: str) -> None:
    """Draw a warning that the page is older than the data; the plain text may hold foreign names."""
    text = escape(visible(sentence[:1].upper() + sentence[1:]))
    with_code = re.sub("`([^`]*)`", r"<code>\1</code>", text)
    st.html(f'<p class="trajlake-stale">{with_code}.</p>')


def list_changed_groups(credit: Credit) -> None:
    """Draw the groups that changed since the credit was computed, with links and reasons."""
    frame = read(lineage.read_changed_groups, credit)
    if frame.is_empty():
        return
    label, retractions = "Groups that changed since", read(lineage.count_retractions_since, credit)
    frame = frame.with_columns(
        why=pl.Series(list(map(_explain_change(retractions), frame.to_dicts())), dtype=pl.String)
    )
    tables.draw_table(
        frame,
        tables.select_filled(frame, _COLUMNS),
        label=label,
        href=lambda row: href(Page.GROUP, group=row["group_id"]),
    )
    reasons = []
    for row in retractions.iter_rows(named=True):
        why = f": {chip(row['reason'], 300)}" if row["reason"] else ""
        reasons.append(f"{count_noun(row['episodes'], 'episode')} {_KINDS[row['kind']]}{why}")
    if reasons:
        st.caption(f"In this lake since the credit was computed: {'; '.join(reasons)}.")


def _explain_change(retractions: pl.DataFrame) -> Callable[[Row], str | None]:
    """Return a function from a changed group to the reason in words.

    With several possible reasons the function returns None, because a retraction does not name its group.
    """
    deletions = retractions.filter(~pl.col("kind").is_in(("superseded", "restored"))).to_dicts()
    reason = None
    if len(deletions) == 1:
        reason = f"{_KINDS[deletions[0]['kind']]}{': ' if deletions[0]['reason'] else ''}{deletions[0]['reason'] or ''}"

    def why(row: Row) -> str | None:
        is_replaced, is_taken = row["replacing"] > 0, row["lost"] > row["replacing"]
        if is_taken and reason is None:
            return None
        causes = [_KINDS["superseded"]] if is_replaced else []
        causes += [reason] if is_taken and reason is not None else []
        causes += ["new episodes"] if row["joined"] > row["replacing"] else []
        return "; ".join(causes) or None

    return why
