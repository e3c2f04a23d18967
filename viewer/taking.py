"""What a reader takes away: a list as a file, the commands that act on its episodes, a transcript as one file to send.

Commands are shown to be copied, never run here: a page cannot retract by mistake, and what was done stands in the
reader's own shell history.
"""

import shlex
from collections.abc import Sequence

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.export import TARGETS
from lake.export.job import NO_CREDIT
from lake.judgements.credit import Credit
from viewer import choices, download, pinned
from viewer import components as ui
from viewer.links import Page
from viewer.navigation import Value, anchor, query
from viewer.pinned import read
from viewer.plain import number
from viewer.queries import Sort, whole
from viewer.queries.episodes import EpisodeFilter


def offered(wanted: EpisodeFilter, order: Sort | None, total: int) -> None:
    """A button that opens both."""
    with st.popover("Download", icon=":material/download:"):
        of, packed = pinned.name(), choices.packed(wanted, order)
        links = [
            anchor(ending, download.PATH + query(format=ending, of=of, list=packed)) for ending in download.FORMATS
        ]
        said = f"The list, all {number(total)} rows, as {', '.join(links)}"
        st.html(f'<span class="trajlake-turn">{said}</span>', width="content")
        st.caption("What the tables say of each episode, in the order of the list, without documents.")
        name = st.selectbox("Or the episodes themselves, as", list(TARGETS), key="export")
        st.caption(TARGETS[name].description)
        _commands(wanted, name)


def rows(name: str, order: Sort | None, **what: Value) -> None:
    """The link to a whole list of `viewer.lists` as CSV: what its page shows, in that order."""
    sort = None if order is None else str(order)
    target = download.PATH + query(format="csv", rows=name, of=pinned.name(), sort=sort, **what)
    st.html(f'<span class="trajlake-turn">{anchor("The whole list as CSV", target)}</span>', width="content")


def as_list(**wanted: Value) -> None:
    """The link from the episodes that a page shows to just these on the page of episodes, with facets and downloads."""
    ui.link(Page.EPISODES, "As a list of episodes", "format_list_bulleted", **wanted)


def one_file(credit: Credit | None, **what: str) -> None:
    """The link to an `episode`, or the siblings of a `group`, as one HTML file, which is made when it is followed.

    Its advantages are those that the page shows: none, where that shows none.
    """
    named = NO_CREDIT if credit is None else credit.text
    target = download.PATH + query(format=download.HTML, of=pinned.name(), credit=named, **what)
    st.html(f'<span class="trajlake-turn">{anchor("Save as HTML", target)}</span>', width="content")


def _commands(wanted: EpisodeFilter, name: str) -> None:
    """The command lines for exactly the list's episodes."""
    found = read(whole.predicate, wanted)
    if found is None:
        st.caption("No command can name so many episodes that a search or a query found: find fewer.")
        return
    addresses = pinned.addresses()
    lake_ = [word for address in addresses for word in ("--lake", address)]
    score = ["--score", wanted.score] if wanted.score is not None else []
    where = ["--where", found] if found else []
    export = ["trajlake", "export", *lake_, "--format", name, "--out", f"exported-{name}", *score, *where]
    st.code(shlex.join(export), language="bash", wrap_lines=True)
    # A filter without limits drops nothing; it stands for those that the reader adds.
    select = ["trajlake", "select", "chosen", *lake_, "--filter", "length", *score, *where]
    st.caption("Or name them for training, as a selection; further filters drop more:")
    st.code(shlex.join(select), language="bash", wrap_lines=True)
    if found:
        _retracting(wanted, where, addresses)
    st.caption("Commands go by the newest state of the lake when they are run.")


def _retracting(wanted: EpisodeFilter, where: Sequence[str], addresses: Sequence[str]) -> None:
    """The command that hides the list's episodes; of several lakes one for each, as each alone takes its rows back.

    There the episodes are named: what a predicate finds in one of the lakes is not what it finds in all, as the score
    of an episode may stand in another lake.
    """
    if len(addresses) > 1:
        found = read(whole.by_ids, wanted)
        if found is None:
            st.caption("To hide them, find fewer, or open their lake alone: no command can name so many episodes.")
            return
        where = ["--where", found]
    st.caption("Or hide them from every later snapshot, for a reason; `trajlake restore` takes it back:")
    for address in addresses:
        retract = ["trajlake", "retract", "--lake", address, *where, "--reason", "why"]
        st.code(shlex.join(retract), language="bash", wrap_lines=True)
