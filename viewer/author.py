"""Who writes: the name that annotations and saved views bear. Nobody is asked to prove it."""

import getpass

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

_AUTHOR = "author"


def author() -> str:
    """Who wrote last in this session, else whoever runs the viewer; nothing where the system knows no name."""
    try:
        return st.session_state.get(_AUTHOR) or getpass.getuser()
    except (OSError, KeyError):
        return ""


def remember(name: str) -> None:
    """Whoever writes once writes again."""
    st.session_state[_AUTHOR] = name
