"""What a user's own definitions may be called, groupings and selections for example, and how that reads in words."""

NAME = r"^[A-Za-z0-9][\w.-]*$"
"""No slash, which separates a grouping's draws."""
NAME_IN_WORDS = "letters, digits, `_`, `.` and `-`, beginning with a letter or a digit"
