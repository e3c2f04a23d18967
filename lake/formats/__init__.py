"""Formats: a reader from a file to records for each, and sniffing, which chooses one by the beginning of a file.

A reader yields `(position, EpisodeRecord)` or a `Reject`, in file order, in bounded memory, and never raises for the
content of a record: a bad record becomes a reject, and reading continues. All formats use `base`; `chat` has what chats
and calls share, `tracing` what traces share.
"""
