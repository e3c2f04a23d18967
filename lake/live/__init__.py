"""Recording agents while they run: a spool on disk, and its delivery to the writer that records exactly once."""
