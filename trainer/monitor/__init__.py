"""Watching a run: held-out episodes, alarms, speed, and where the figures are shown."""
