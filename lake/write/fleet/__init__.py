"""Fleets: writers of one machine whose batches one process commits together; see `client` and `server`."""
