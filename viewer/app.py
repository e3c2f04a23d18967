"""The viewer's main script: page configuration and navigation, nothing else. `trajlake view` runs it."""

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.write.jobs import get_package_version
from viewer import navigation
from viewer.components import show_errors
from viewer.navigation import Page
from viewer.screens import PAGES

# With an entry of our own the bar shows Streamlit's menu, in which light and dark are chosen.
_ABOUT = f"Trajlake {get_package_version()}. Reads the lake; writes nothing but the annotations that you make."
st.set_page_config(page_title="Trajlake", page_icon="\N{WATER WAVE}", layout="wide", menu_items={"About": _ABOUT})

page = st.navigation(
    [
        st.Page(
            show,
            title=title,
            icon=icon,
            url_path=name,
            default=name is Page.RUNS,
            visibility="hidden" if icon is None else "visible",
        )
        for name, (show, title, icon) in PAGES.items()
    ],
    position="top",
)
navigation.install(page.url_path)
with show_errors(), navigation.unbind_parameters():
    page.run()
