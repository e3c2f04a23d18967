"""agent-lightning: archives and events of v1, spans of v0."""
