"""Environment variables by which the command tells the pages, which run in the same process, what to show."""

ENVIRONMENT = "TRAJLAKE_LAKE"
"""The lake."""
READ_ONLY = "TRAJLAKE_VIEW_READ_ONLY"
"""`1` for a viewer that writes no annotations."""
