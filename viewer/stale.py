"""What of a credit is older than the data: the groups that changed since, by name, and why episodes were taken back."""

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.judgements.credit import Credit
from lake.read.text_table import counted
from viewer import tables
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import chip
from viewer.queries import lineage

_COLUMNS = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task"),
    "collection_round": tables.value("Round"),
    "lost": tables.value("Lost", "Episodes that were retracted or replaced."),
    "joined": tables.value("Joined", "Episodes that have no advantages yet."),
    "replacing": tables.value("Replacing", "Of those that joined: retries that took the place of others."),
    "group_id": tables.ident("Group"),
}
_KINDS = {"superseded": "replaced by a later attempt", "retracted": "retracted", "forgotten": "forgotten"}


def groups(credit: Credit) -> None:
    """The groups that changed since the credit was computed, each a link, and why."""
    frame = read(lineage.changed_groups, credit)
    if frame.is_empty():
        return
    label = "Groups that changed since"
    tables.table(
        frame, tables.known(frame, _COLUMNS), label=label, href=lambda row: href(Page.GROUP, group=row["group_id"])
    )
    said = []
    for row in read(lineage.taken_back_since, credit).iter_rows(named=True):
        why = f": {chip(row['reason'], 300)}" if row["reason"] else ""
        said.append(f"{counted(row['episodes'], 'episode')} {_KINDS[row['kind']]}{why}")
    if said:
        st.caption(f"Taken back in this lake since the credit was computed: {'; '.join(said)}.")
