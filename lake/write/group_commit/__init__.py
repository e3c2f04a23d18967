"""Group commit: one process commits the batches of several writers of a machine; see `client` and `server`."""
