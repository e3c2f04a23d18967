"""Commits that race others: look at what is there, commit on top of it, and if somebody was first, do it again.

Whoever drops rows of a write attempt publishes its write_id first, for good, and fences the writers after. A writer
that lost a compare-and-swap looks at what was published before it tries again, so a write attempt that is not accepted
by then can no longer be.
"""

import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import msgspec
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from lake import ids
from lake.errors import ConflictError
from lake.storage.objects import Objects

_T = TypeVar("_T")
_RETRIES = 200
"""Of delta-rs, which puts a commit on top of others that do not conflict with it."""
_LONGEST_WAIT = 0.1
"""Seconds."""


class CommitLostError(ConflictError):
    """Another process committed first: look again and retry."""


def commit(
    handle: DeltaTable,
    name: str,
    actions: Sequence[AddAction | RemoveAction],
    metadata: dict[str, Any],
    marks: list[Transaction] | None = None,
) -> None:
    """One commit on top of a handle's version; of two from one version that share a mark, only one can succeed.

    Raises:
        CommitLostError: another process was first.
    """
    properties = CommitProperties(custom_metadata=metadata, max_commit_retries=_RETRIES, app_transactions=marks)
    try:
        handle.create_write_transaction(
            list(actions),
            "append",
            handle.schema(),
            commit_properties=properties,
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
        )
    except CommitFailedError as error:
        raise CommitLostError(f"`{name}` changed after version {handle.version()}: {error}") from error


def until_committed(attempt: Callable[[], _T], *, tries: int | None = None, busy: str = "") -> _T:
    """Call `attempt` until nobody is quicker, waiting a little longer each time.

    Args:
        attempt: refreshes what it relies on, checks it again and commits; raises CommitLostError if it was too late.
        tries: how often; without a limit unless given, as somebody else gets on each time.

    Raises:
        ConflictError: every try was too late.
    """
    for done in count(1):
        try:
            return attempt()
        except CommitLostError as lost:
            if done == tries:
                raise ConflictError(f"{busy} ({lost})") from lost
        # Two that collide at the same pace would collide again; the first retry is at once.
        time.sleep(random.uniform(0, min(_LONGEST_WAIT, 0.001 * (2 ** min(done - 1, 10) - 1))))
    raise AssertionError


_REVOKED = "_trajlake/condemned"


def revoke(objects: Objects, write_ids: frozenset[int]) -> None:
    """Let writers know that these write attempts must not be accepted any more."""
    if write_ids:
        objects.put(f"{_REVOKED}/{ids.to_text(ids.fresh_id())}.json", msgspec.json.encode(sorted(write_ids)))


def revoked(objects: Objects) -> frozenset[int]:
    """Write attempts that were dropped, or are about to be."""
    found = (objects.get(entry.path) for entry in objects.list(_REVOKED))
    return frozenset().union(*(msgspec.json.decode(data, type=list[int]) for data in found if data is not None))
