"""Writing exactly once: ingest, the writer of episodes, and jobs with their lineage."""
