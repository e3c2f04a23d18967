"""The viewer: Streamlit pages over a lake; reads through lake alone."""

COMMANDS = {
    "view": ("viewer.launch:view", "Open the viewer on a lake."),
}
