"""The viewer: Streamlit pages over a lake; reads through lake alone."""

COMMANDS = {
    "page": ("viewer.launch:page", "Write an episode or a group as one HTML file to send."),
    "view": ("viewer.launch:view", "Open the viewer on a lake."),
}
