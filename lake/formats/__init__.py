"""Formats: one file per format, each a reader from a file to records; and sniffing, which tells them apart.

A reader yields `(position, EpisodeRecord)` or a `Reject`, in file order, in bounded memory, and never raises for what
a record contains: a bad record becomes a reject and the rest goes on.
"""

from lake.formats.registry import FORMATS, Format, sniff

__all__ = ["FORMATS", "Format", "sniff"]
