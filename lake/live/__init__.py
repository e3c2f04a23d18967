"""Live recording of agents: a spool on disk, and its delivery to the lake, each episode exactly once."""
