"""What became of calls, as the command tells it at its end."""

import msgspec


class Counts(msgspec.Struct):
    """What became of calls so far."""

    calls: int = 0
    steps: int = 0
    failed: int = 0
    episodes: int = 0
    ended: int = 0
    crowded_out: int = 0
    """Episodes that ended because too many were open."""
    stopped: int = 0
    """Episodes that were open when the proxy was stopped."""
    left_out: int = 0
    """Episodes that were open when the proxy was stopped, and are to be played anew."""
    dropped: int = 0
    """Episodes that were left out because the spool was full."""
    unreadable: int = 0
    """Calls that went through and could not be recorded; the log says why."""
