"""The choice of siblings to put side by side, on the group's page and on theirs."""

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer.components import first_page
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import number, one_line
from viewer.queries import Row, Window, groups, side_by_side

_MOST_LISTED = 1000


def name(facts: Row) -> str:
    """A sibling among its siblings: `rollout 3`, with the attempt if it was retried."""
    again = f", attempt {facts['attempt']}" if facts["attempt"] else ""
    return f"rollout {facts['rollout_index']}{again}"


def choose(group_id: int, score: str | None, chosen: list[int], *, leads: bool = False) -> list[int]:
    """The siblings side by side, as the reader chooses them: two to eight; `chosen` at first.

    Args:
        leads: the address follows, as on the page that shows them.
    """
    frame = read(groups.siblings, group_id, None, Window(_MOST_LISTED), score)
    rows = {row["episode_id"]: row for row in frame.iter_rows(named=True)}
    labels = {one: f"{name(row)}: {number(row['outcome'])} ({one_line(row['status'])})" for one, row in rows.items()}
    key = f"beside-{'-'.join(map(str, chosen))}"

    def follow() -> None:
        if leads and len(wanted := st.session_state[key]) > 1:
            st.query_params["episode"] = [ids.to_text(one) for one in wanted]
            first_page()

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
