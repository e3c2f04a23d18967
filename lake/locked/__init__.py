"""Processes that are locked in: SQL that nobody vouches for, and the isolation that reward functions share."""
