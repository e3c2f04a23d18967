"""Commits that race others: look at what is there, commit on top of it, and if somebody was first, do it again."""

import random
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from lake.errors import ConflictError

_T = TypeVar("_T")
_LONGEST_WAIT = 0.1
"""Seconds."""


class CommitLostError(ConflictError):
    """Another process committed first: look again and retry."""


def until_committed(attempt: Callable[[], _T], *, tries: int | None = None, busy: str = "") -> _T:
    """Call `attempt` until nobody is quicker, waiting a little longer each time.

    Args:
        attempt: refreshes what it relies on, checks it again and commits; raises CommitLostError if it was too late.
        tries: how often; without a limit unless given, as somebody else gets on each time.
        busy: what to say after the last.

    Returns:
        What `attempt` does.

    Raises:
        ConflictError: every try was too late.
    """
    for done in count(1):
        try:
            return attempt()
        except CommitLostError as lost:
            if done == tries:
                msg = f"{busy} ({lost})"
                raise ConflictError(msg) from lost
        # Two that collide at the same pace would collide again; the first retry is at once.
        time.sleep(random.uniform(0, min(_LONGEST_WAIT, 0.001 * (2 ** min(done - 1, 10) - 1))))
    raise AssertionError
