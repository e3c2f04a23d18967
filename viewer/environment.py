"""Environment variables by which the command tells the pages, which run in the same process, what to show."""

import os

ENVIRONMENT = "TRAJLAKE_LAKE"
"""The lake."""
READ_ONLY = "TRAJLAKE_VIEW_READ_ONLY"
"""`1` for a viewer that writes nothing, neither annotations nor saved views."""


def is_read_only() -> bool:
    """Whether this viewer offers no writing."""
    return os.environ.get(READ_ONLY) == "1"
