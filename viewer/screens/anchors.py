"""Anchor states over a whole credit: which make the step advantages, and which of them may be false."""

import shlex

import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.cli.options import lake_flags
from lake.judgements.credit import Credit
from viewer import choices, tables, taking
from viewer import components as ui
from viewer.links import Page, given
from viewer.locked_sql import MOST_ROWS
from viewer.navigation import changed, href
from viewer.pinned import lakes, read
from viewer.plain import chip, number, percent, visible
from viewer.queries import anchors, definitions, training

_MEANING = (
    "**A_S** compares the steps that siblings took from the same state. It misleads where one text stands for several "
    "situations. **Ways in** counts the distinct actions that led there: many are a sign of it. **Doubt** marks error "
    "texts and empty states: anything may lead to them. **Share of \\|A_S\\|** says how much of all step advantages a "
    "state makes."
)


def show() -> None:
    """The page."""
    ui.header("Anchors")
    chosen = choices.named_credit("credit") or read(training.credit_named)
    if chosen is None:
        ui.empty("This lake holds no advantages yet.", "trajlake credit gigpo --lake LAKE")
        return
    choices.explain(chosen)
    total = read(anchors.explored_total, chosen)
    if not total["anchors"]:
        st.info("No state was passed by two siblings or more.", icon=":material/info:")
    else:
        _states(chosen, total["anchors"], total["shared"], total["steps"])
        _groups(chosen)
    _definitions(chosen)


def _states(chosen: Credit, found: int, shared: int, steps: int) -> None:
    st.caption(
        f"{number(shared)} of {number(steps)} steps ({percent(shared / steps)}) were taken from one of {number(found)} "
        "states that siblings of a group share.",
        help=_MEANING,
    )
    columns = {
        "state": tables.wide("State"),
        "share": tables.Column("Share of |A_S|", tables.Kind.SHARE, "Of the sum over all steps.", 3),
        "size": tables.value("Steps"),
        "episodes": tables.value("Episodes"),
        "groups": tables.value("Groups", "In which siblings share the state."),
        "spread": tables.value("Return spread", "Largest minus smallest return-to-go of a group, mean over groups."),
        "actions": tables.value("Actions", f"Distinct actions taken there, of at most {anchors.SAMPLE} steps."),
        "ways_in": tables.value("Ways in", f"Distinct actions that led there, of at most {anchors.SAMPLE} steps."),
        "states": tables.value("Texts", "Distinct texts: several where the definition leaves something out."),
        "doubt": tables.text("Doubt", "Error texts and empty states make false anchors: anything may lead to them."),
        "anchor_key": tables.ident("Anchor"),
    }
    order = tables.ordered_by()
    tables.table(
        read(anchors.explored, chosen, ui.pager(found, "states"), order),
        columns,
        label="States",
        href=lambda row: changed(anchor=row["anchor_key"], groups=None),
        key="anchor_key",
        chosen=given("anchor"),
        sortable=(*anchors.EXPLORED_ORDERS, *(anchors.SEEN_ORDERS if found <= anchors.MOST_SEEN else ())),
    )
    taking.rows("anchors", order, credit=chosen.text)


def _groups(chosen: Credit) -> None:
    """The groups of the state that the address names."""
    text = given("anchor")
    if text is None:
        st.caption("Choose a state to see the groups whose siblings share it.")
        return
    if not ids.is_text(text):
        ui.missing(f"{chip(text)} is not the id of an anchor.")
        return
    anchor_key = ids.from_text(text)
    total = read(anchors.sharing, chosen, anchor_key)
    if not total["groups"]:
        ui.missing(f"No siblings share a state with anchor {chip(text)}.")
        return
    st.subheader("Groups that share this state", anchor=False)
    window = ui.pager(total["groups"], "groups", name="groups")
    frame = read(anchors.groups_of, chosen, anchor_key, window, tables.ordered_by("by"))
    columns = {
        "run_id": tables.text("Run"),
        "task_id": tables.text("Task"),
        "collection_round": tables.value("Round"),
        "size": tables.value("Steps"),
        "episodes": tables.value("Siblings"),
        "spread": tables.value("Return spread"),
        "weight": tables.value("Sum of |A_S|"),
        "group_id": tables.ident("Group"),
    }
    tables.table(
        frame,
        tables.known(frame, columns),
        label="Groups of the state",
        href=lambda row: href(Page.GROUP, group=row["group_id"], anchor=text, credit=chosen.text),
        key="group_id",
        sortable=anchors.GROUP_ORDERS,
        parameter="by",
        page="groups",
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("A row opens the steps that its siblings took from the state.", width="content")
        if total["episodes"] <= MOST_ROWS:
            taking.as_list(sql=anchors.passed(chosen, anchor_key), about=f"passed state {text}")


def _definitions(chosen: Credit) -> None:
    """What other definitions of the same state would give, and the commands that measure and use them."""
    st.subheader("Under another definition", anchor=False)
    lake = lake_flags(lakes())
    found = read(definitions.measured)
    if found is None:
        st.caption(
            "What other definitions of the same state would give (without counters, without error texts, the last "
            "states together), measured on a sample of groups. With `--keep` the figures are shown here."
        )
        st.code(f"trajlake anchors --keep {lake}", language=None)
        return
    steps = int(found.figures["steps"].max() or 0)  # type: ignore[arg-type]
    later = " Episodes were recorded since." if found.is_outdated else ""
    st.caption(f"Measured at {found.ended_at:%Y-%m-%d %H:%M} UTC on {number(steps)} steps.{later} To measure again:")
    st.code(" ".join(filter(None, (f"trajlake anchors --keep {lake}", found.options))), language=None)
    columns = {
        "anchors": tables.text("Definition"),
        "shared": tables.share("Shared steps", "Steps whose state a sibling visited, too: they have an A_S."),
        "singleton": tables.share("Alone", "Steps in a state that no other step of the group has: their A_S is 0."),
        "known": tables.share("Compared", "Steps that the definition gives a state."),
        "errors": tables.share("In error texts", "Of the shared steps."),
        "ways_in": tables.value("Ways in", "Mean number of distinct actions that led to a shared state.", digits=1),
        "states": tables.value("States"),
        "definition": tables.wide("As JSON"),
    }
    tables.table(
        found.figures,
        columns,
        label="Definitions",
        href=lambda row: changed(definition=row["anchors"]),
        key="anchors",
        chosen=given("definition"),
    )
    wanted = found.figures.filter(anchors=given("definition") or "")
    if wanted.is_empty():
        st.caption("Choose a definition to see the command that computes with it.")
        return
    estimator = str(chosen.parameters.get("estimator") or "gigpo")
    setting = shlex.quote(f"anchors={wanted['definition'][0]}")
    st.code(visible(f"trajlake credit {shlex.quote(estimator)} {lake} --set {setting}"), language=None)


show()
