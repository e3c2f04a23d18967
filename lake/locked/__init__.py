"""Locked processes: untrusted SQL, and the isolation that reward functions share."""
