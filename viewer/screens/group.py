"""One group: the siblings' rewards, and the anchor states that they share."""

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.judgements.credit import Credit
from viewer import choices, figures, links
from viewer.components import (
    advantage_column,
    badge,
    count_column,
    header,
    id_column,
    not_found,
    number_column,
    pager,
    table,
    tiles,
    wanted_id,
)
from viewer.links import Page, given, parameters
from viewer.pinned import read
from viewer.plain import chip, number, percent, visible
from viewer.queries import credit, episodes, groups
from viewer.queries.base import Row, Window
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import Signal

_MOST_SIBLINGS = 256
_MOST_VISITS = 200
_SIGNALS = {
    Signal.LIVE: ("live group", "green", "Outcomes differ: there is something to learn from."),
    Signal.DEAD: ("dead group", "orange", "All scored siblings scored the same: episode advantages are 0."),
    Signal.UNJUDGED: ("unjudged group", "gray", "Fewer than two scored siblings: nothing to compare."),
}


def show() -> None:
    """The page."""
    group_id = wanted_id("group", Page.GROUPS, "All groups")
    facts = read(groups.group, group_id)
    if facts is None:
        not_found(f"This lake holds no group {chip(ids.to_text(group_id))}.", Page.GROUPS, "All groups")
    header(f"Group {chip(links.group(facts), links.NAME)}")
    _facts(facts)
    chosen = choices.credit(read(credit.of_group, group_id), "group")
    if chosen is not None:
        st.caption(f"Advantages by {chip(chosen.title, 300)}.")
    _siblings(facts, chosen)
    if chosen is None:
        st.info("No credit job has covered this group: there are no anchor states to show.", icon=":material/info:")
    else:
        _anchors(group_id, chosen)


def _facts(facts: Row) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        label, colour, explanation = _SIGNALS[Signal(facts["signal"])]
        badge(label, colour, explanation=explanation)
        if facts["first_version"] != facts["last_version"]:
            badge("mixes policy versions", "red", explanation="Its siblings were played by different weights.")
        expected = facts["expected_size"]
        if expected is not None and facts["size"] < expected:
            badge(f"{facts['size']} of {expected} siblings", "orange", explanation="The collector meant to run more.")
        st.markdown(f":gray[id] {chip(ids.to_text(facts['group_id']))}", width="content")
        st.page_link(
            Page.GROUPS,
            label="Groups of the run",
            icon=":material/arrow_back:",
            query_params=parameters(run=facts["run_id"]),
        )
    tiles(
        [
            ("Siblings", number(facts["size"]), None),
            ("Scored", number(facts["scored"]), None),
            ("Mean return", number(facts["mean_return"]), None),
            ("Std", number(facts["sd_return"]), "Sample standard deviation of the returns."),
            ("Lowest", number(facts["lowest"]), None),
            ("Highest", number(facts["highest"]), None),
        ]
    )


def _siblings(facts: Row, chosen: Credit | None) -> None:
    frame = read(groups.siblings, facts["group_id"], chosen, Window(_MOST_SIBLINGS))
    left, right = st.columns([2, 3])
    with left:
        chart = figures.returns(frame, facts["mean_return"], facts["sd_return"])
        st.altair_chart(chart, key="returns")
        st.caption("Dashed: mean. Shaded: one standard deviation. ?: not scored.")
    with right:
        clicked = table(
            frame,
            "siblings",
            {
                "rollout_index": count_column("Rollout"),
                "status": "Status",
                "env_return": number_column("Return", "A dash means not scored, which is not 0."),
                "num_steps": count_column("Steps"),
                "a_episode": advantage_column("A_E"),
                "mean_advantage": advantage_column("Mean A"),
                "policy_version": count_column("Policy version"),
                "episode_id": id_column("Episode"),
            },
            opens="Open the episode",
        )
        if frame.height < facts["size"]:
            st.caption(f"{frame.height} of {facts['size']} siblings")
    if clicked is not None:
        _open(facts["group_id"], frame["episode_id"][clicked], chosen)


def _anchors(group_id: int, chosen: Credit) -> None:
    st.subheader("Anchor states shared by siblings", anchor=False)
    shares = read(groups.anchor_shares, group_id, chosen)
    total = read(groups.anchors_total, group_id, chosen)
    whole = max(shares["steps"], 1)
    st.caption(
        f"{total} states were passed by two siblings or more; {percent(shares['shared'] / whole)} of "
        f"{number(shares['steps'])} steps were taken from them, {percent(shares['alone'] / whole)} from a state that "
        "no other step has (their A_S is 0)."
    )
    if not total:
        st.info("No two siblings passed the same state.", icon=":material/info:")
        return
    frame = read(groups.anchors, group_id, chosen, pager(total, "shared states"))
    clicked = table(
        frame,
        "anchors",
        {
            "state": st.column_config.TextColumn("State", width="large"),
            "size": count_column("Steps"),
            "episodes": count_column("Siblings", "Distinct episodes that passed the state."),
            "actions": count_column("Actions", "Distinct actions taken there."),
            "spread": number_column("Return spread", "Largest minus smallest return-to-go: 0 tells nothing apart."),
            "lowest": number_column("Lowest"),
            "highest": number_column("Highest"),
            "mean_step": number_column("Mean step", format="%.1f"),
            "is_error": st.column_config.CheckboxColumn("Error text", help="Error texts make false anchors."),
            "anchor_key": id_column("Anchor"),
        },
        opens="Show the steps in this state",
    )
    if clicked is not None:
        st.query_params["anchor"] = ids.to_text(frame["anchor_key"][clicked])
        st.rerun()
    _visits(group_id, chosen)


def _visits(group_id: int, chosen: Credit) -> None:
    """The steps in the anchor state that the address names."""
    text = given("anchor")
    if text is None:
        st.caption("Choose a state to see every step taken from it.")
        return
    if not ids.is_text(text):
        st.warning(f"{chip(text)} is not the id of an anchor.", icon=":material/search_off:")
        return
    frame = read(groups.visits, group_id, ids.from_text(text), chosen, Window(_MOST_VISITS))
    if frame.is_empty():
        st.warning(f"No step of this group was taken from anchor {chip(text)}.", icon=":material/search_off:")
        return
    st.subheader("Steps taken from this state", anchor=False)
    state = read(episodes.text, frame["episode_id"][0], frame["step_index"][0], "state", episodes.TEXT)
    st.code(visible(state), language=None, wrap_lines=True)
    actions = pl.coalesce(pl.col("action").replace("", None), "tool_calls").fill_null("")
    clicked = table(
        frame.with_columns(action=actions),
        "visits",
        {
            "rollout_index": count_column("Rollout"),
            "step_index": count_column("Step"),
            "action": st.column_config.TextColumn("Action", width="large"),
            "reward": number_column("Reward"),
            "return_to_go": number_column("Return-to-go"),
            "a_step": advantage_column("A_S"),
            "advantage": advantage_column("A"),
            "env_return": number_column("Episode return"),
            "episode_id": id_column("Episode"),
        },
        opens="Open the episode",
    )
    if clicked is not None:
        _open(group_id, frame["episode_id"][clicked], chosen, frame["step_index"][clicked])


def _open(group_id: int, episode_id: int, chosen: Credit | None, step: int | None = None) -> None:
    """Open a sibling, at a step. Previous and next then walk through the group."""
    values = parameters(
        episode=ids.to_text(episode_id),
        step=step,
        credit=None if chosen is None else chosen.text,
        list=choices.packed(EpisodeFilter(group=group_id)),
    )
    st.switch_page(Page.EPISODE, query_params=values)


show()
