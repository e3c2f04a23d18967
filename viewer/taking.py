"""What a reader takes away from a list: the whole of it as a file, and the command that exports its episodes."""

import shlex

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.export import TARGETS
from viewer import choices, download, pinned
from viewer.navigation import anchor, query
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
        found = read(whole.predicate, wanted)
        if found is None:
            st.caption("No command can name so many episodes that a search found: search for less.")
        else:
            st.code(_command(wanted, name, found), language="bash", wrap_lines=True)


def _command(wanted: EpisodeFilter, name: str, predicate: str) -> str:
    """The command line that exports exactly the list's episodes."""
    words = ["trajlake", "export", "--lake", pinned.uri(), "--format", name, "--out", f"exported-{name}"]
    words += ["--score", wanted.score] if wanted.score is not None else []
    words += ["--where", predicate] if predicate else []
    return shlex.join(words)
