"""One group: the siblings' rewards, and the anchor states that they share."""

from collections.abc import Callable

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.judgements.credit import Credit, covering
from lake.judgements.scores import ENV_RETURN
from lake.read.text_table import counted
from viewer import choices, gone, links, siblings, tables, taking
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import changed, href
from viewer.pinned import read
from viewer.plain import chip, number, percent, visible
from viewer.queries import Row, Sort, anchors, episodes, groups, outcomes, side_by_side
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import Signal

_SIGNALS = {
    Signal.LIVE: ("live group", "green", "Outcomes differ: there is something to learn from."),
    Signal.DEAD: ("dead group", "orange", "All scored siblings scored the same: episode advantages are 0."),
    Signal.UNJUDGED: ("unjudged group", "gray", "Fewer than two scored siblings: nothing to compare."),
}


def show() -> None:
    """The page."""
    group_id = ui.wanted_id("group", Page.GROUPS, "All groups")
    facts = read(groups.group, group_id, ENV_RETURN)
    if facts is None:
        ui.not_found(gone.group(group_id), Page.GROUPS, "All groups")
    ui.header(f"Group {chip(links.group(facts), links.NAME)}")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        with st.container(width=260):
            score = read(outcomes.of_run, facts["run_id"], choices.outcome(facts["run_id"]))
        with st.container():
            found = read(covering, group_id=group_id)
            chosen = choices.credit(found, "group")
    facts = read(groups.group, group_id, score) or facts
    _facts(facts, chosen)
    choices.explain(chosen, group_id=group_id)
    _siblings(facts, chosen, score)
    _beside(group_id, chosen, score)
    if chosen is None:
        said = (
            "Choose a credit above to see the anchor states that siblings share."
            if found
            else "No credit job has covered this group: there are no anchor states to show."
        )
        st.info(said, icon=":material/info:")
    else:
        _anchors(group_id, chosen, score)


def _facts(facts: Row, chosen: Credit | None) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        label, colour, explanation = _SIGNALS[Signal(facts["signal"])]
        ui.badge(label, colour, explanation=explanation)
        if facts["first_version"] != facts["last_version"]:
            ui.badge("mixes policy versions", "red", explanation="Its siblings were played by different weights.")
        expected = facts["expected_size"]
        if expected is not None and facts["size"] < expected:
            ui.badge(
                f"{facts['size']} of {expected} siblings", "orange", explanation="The collector meant to run more."
            )
        ui.fact("id", chip(ids.to_text(facts["group_id"])))
        ui.link(Page.GROUPS, "Groups of the run", "arrow_back", run=facts["run_id"], score=given("score"))
        taking.one_file(chosen, group=ids.to_text(facts["group_id"]))
    ui.facts(
        ("Siblings", number(facts["size"])),
        ("Scored", number(facts["scored"])),
        ("Mean outcome", number(facts["mean_return"])),
        ("Std", number(facts["sd_return"]), "Sample standard deviation of the outcomes."),
        ("Lowest", number(facts["lowest"])),
        ("Highest", number(facts["highest"])),
    )


def _siblings(facts: Row, chosen: Credit | None, score: str) -> None:
    order = tables.ordered_by()
    opened = _sibling(facts["group_id"], chosen, score, order)
    st.html(
        siblings.strip(read(groups.strip, facts["group_id"], score), facts["mean_return"], facts["sd_return"], opened)
    )
    window = ui.pager(facts["size"], "siblings", name="siblings")
    columns = {
        "rollout_index": tables.value("Rollout"),
        "status": tables.text("Status"),
        "outcome": tables.value("Outcome", "A dash means not scored, which is not 0."),
        "num_steps": tables.value("Steps"),
        "a_episode": tables.advantage("A_E"),
        "mean_advantage": tables.advantage("Mean A"),
        "policy_version": tables.value("Policy version"),
        "episode_id": tables.ident("Episode"),
    }
    frame = read(groups.siblings, facts["group_id"], chosen, window, score, order)
    tables.table(
        frame,
        tables.known(frame, columns, order),
        label="Siblings",
        href=opened,
        key="episode_id",
        sortable=groups.SIBLING_ORDERS,
        page="siblings",
    )
    credit = None if chosen is None else chosen.text
    with st.container(horizontal=True, vertical_alignment="center"):
        group = ids.to_text(facts["group_id"])
        taking.rows("siblings", order, group=group, credit=credit, score=score)
        taking.as_list(group=group, score=given("score"))


def _beside(group_id: int, chosen: Credit | None, score: str) -> None:
    """The way to the siblings side by side: at first the best and the worst of them."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        wanted = siblings.choose(group_id, score, read(side_by_side.contrast, group_id, score))
        if len(wanted) > 1:
            here = siblings.address(wanted, score, None if chosen is None else chosen.text)
            st.markdown(f":material/view_column: [Compare step by step]({here})", width="content")
        else:
            st.caption("Choose two or more.", width="content")


def _anchors(group_id: int, chosen: Credit, score: str) -> None:
    st.subheader("Anchor states shared by siblings", anchor=False)
    shares = read(anchors.shares, group_id, chosen)
    total = read(anchors.total, group_id, chosen)
    whole = max(shares["steps"], 1)
    st.caption(
        f"{counted(total, 'state')} shared by two siblings or more; {percent(shares['shared'] / whole)} of "
        f"{number(shares['steps'])} steps were taken from them, {percent(shares['alone'] / whole)} from a state that "
        "no other step has (their A_S is 0)."
    )
    if shares["doubted"]:
        weight = shares["doubted_weight"]  # None where every A_S is 0
        of_sum = "" if weight is None else f": {percent(weight)} of the sum of |A_S|"
        st.warning(
            f"{number(shares['doubted'])} of {number(shares['shared'])} shared steps are from error texts or empty "
            f"states, which anything may lead to{of_sum}.",
            icon=":material/report:",
        )
    if not total:
        st.info("No two siblings passed the same state.", icon=":material/info:")
        return
    order = tables.ordered_by("anchors")
    frame = read(anchors.page, group_id, chosen, ui.pager(total, "shared states"), order)
    columns = {
        "state": tables.wide("State"),
        "size": tables.value("Steps"),
        "episodes": tables.value("Siblings", "Distinct episodes that passed the state."),
        "actions": tables.value("Actions", "Distinct actions taken there."),
        "spread": tables.value("Return spread", "Largest minus smallest return-to-go: 0 tells nothing apart."),
        "lowest": tables.value("Lowest"),
        "highest": tables.value("Highest"),
        "mean_step": tables.value("Mean step", digits=1),
        "ways_in": tables.value(
            "Ways in", "Distinct actions that led there: many ways into one text, many situations."
        ),
        "doubt": tables.text("Doubt", "Error texts and empty states make false anchors: anything may lead to them."),
        "states": tables.value("Texts", "Distinct texts: several where the anchor's definition leaves something out."),
        "share": tables.share("Share of |A_S|", "Of the sum over the group's steps."),
        "anchor_key": tables.ident("Anchor"),
    }
    tables.table(
        frame,
        tables.known(frame, columns, order),
        label="Shared states",
        href=lambda row: changed(anchor=row["anchor_key"], steps=None),
        key="anchor_key",
        chosen=given("anchor"),
        sortable=anchors.ORDERS,
        parameter="anchors",
    )
    taking.rows("shared-states", order, group=ids.to_text(group_id), credit=chosen.text)
    _visits(group_id, chosen, score)


def _visits(group_id: int, chosen: Credit, score: str) -> None:
    """The steps in the anchor state that the address names."""
    text = given("anchor")
    if text is None:
        st.caption("Choose a state to see every step taken from it.")
        return
    if not ids.is_text(text):
        ui.missing(f"{chip(text)} is not the id of an anchor.")
        return
    anchor_key = ids.from_text(text)
    total = read(anchors.visits_total, group_id, anchor_key, chosen)
    if not total:
        ui.missing(f"No step of this group was taken from anchor {chip(text)}.")
        return
    st.subheader("Steps taken from this state", anchor=False)
    window = ui.pager(total, "steps", name="steps")
    frame = read(anchors.visits, group_id, anchor_key, chosen, window, score)
    state = read(episodes.text, frame["episode_id"][0], frame["step_index"][0], "state", episodes.TEXT)
    st.code(visible(state), language=None, wrap_lines=True)
    actions = pl.coalesce(pl.col("action").replace("", None), "tool_calls").fill_null("")
    columns = {
        "rollout_index": tables.value("Rollout"),
        "step_index": tables.value("Step"),
        "action": tables.wide("Action"),
        "reward": tables.value("Reward"),
        "return_to_go": tables.value("Return-to-go"),
        "a_step": tables.advantage("A_S"),
        "advantage": tables.advantage("A"),
        "outcome": tables.value("Outcome"),
        "episode_id": tables.ident("Episode"),
    }
    frame = frame.with_columns(action=actions)
    tables.table(frame, tables.known(frame, columns), label="Steps", href=_sibling(group_id, chosen, score))
    taking.as_list(sql=anchors.passed(chosen, anchor_key, group_id), about=f"passed state {text}")


def _sibling(group_id: int, chosen: Credit | None, score: str, order: Sort | None = None) -> Callable[[Row], str]:
    """The address of a row's episode, at its step. Previous and next then walk through the group."""
    credit_id = None if chosen is None else chosen.text
    here = choices.packed(EpisodeFilter(group=group_id, score=score), order)
    return lambda row: href(
        Page.EPISODE, episode=row["episode_id"], step=row.get("step_index"), credit=credit_id, list=here
    )


show()
