"""verifiers: results of old, traces of now."""
