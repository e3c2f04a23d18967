"""The viewer's main script: page configuration and navigation, nothing else. `trajlake view` runs it."""

import streamlit as st  # noqa: TID253 - this is the Streamlit script

from lake.write.jobs import package_version
from viewer import navigation
from viewer.components import friendly
from viewer.links import Page

# With an entry of our own the bar shows Streamlit's menu, in which light and dark are chosen.
_ABOUT = f"Trajlake {package_version()}. Reads the lake; writes nothing but the annotations that you make."
st.set_page_config(page_title="Trajlake", page_icon="\N{WATER WAVE}", layout="wide", menu_items={"About": _ABOUT})

page = st.navigation(
    [
        st.Page(Page.RUNS, title="Runs", icon=":material/monitoring:", default=True),
        st.Page(Page.EPISODES, title="Episodes", icon=":material/format_list_bulleted:"),
        st.Page(Page.GROUPS, title="Groups", icon=":material/workspaces:"),
        st.Page(Page.ANCHORS, title="Anchors", icon=":material/anchor:"),
        st.Page(Page.TRAINING, title="Training", icon=":material/model_training:"),
        st.Page(Page.CHANGE, title="What changed", icon=":material/compare_arrows:"),
        st.Page(Page.JOBS, title="Jobs", icon=":material/account_tree:"),
        st.Page(Page.ANNOTATIONS, title="Annotations", icon=":material/edit_note:"),
        st.Page(Page.SQL, title="SQL", icon=":material/database:"),
        st.Page(Page.REJECTS, title="Rejects", icon=":material/block:"),
        st.Page(Page.EPISODE, title="Episode", visibility="hidden"),
        st.Page(Page.GROUP, title="Group", visibility="hidden"),
        st.Page(Page.COMPARE, title="Side by side", visibility="hidden"),
        st.Page(Page.JOB, title="Job", visibility="hidden"),
        st.Page(Page.SINCE, title="What changed since", visibility="hidden"),
    ],
    position="top",
)
navigation.install(page.url_path)
with friendly(), navigation.parameters_of_its_own():
    page.run()
