"""The viewer: Streamlit pages over a lake; reads through lake alone."""
