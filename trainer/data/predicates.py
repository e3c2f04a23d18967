"""Episodes by a user's SQL predicate."""

import polars as pl

from lake.errors import QueryError, UsageError
from lake.reading import collected
from lake.snapshot import Snapshot


def matching(snapshot: Snapshot, predicate: str | None, place: str = "--where") -> pl.DataFrame:
    """The episodes that satisfy a predicate: episode_id and num_steps, sorted by id.

    Args:
        snapshot: the data.
        predicate: SQL over `episodes`; None takes them all.
        place: where it stands, for the message.

    Raises:
        UsageError: it is no SQL over `episodes`.
    """
    if predicate is None:
        return collected(snapshot.scan("episodes").select("episode_id", "num_steps").sort("episode_id"))
    if not predicate.strip():
        msg = f"{place} is empty: give a predicate over `episodes`, or leave it out to take them all"
        raise UsageError(msg)
    query = f"SELECT episode_id, num_steps FROM episodes WHERE (\n{predicate}\n) ORDER BY episode_id"
    try:
        return snapshot.sql(query)
    except QueryError as error:
        msg = f"{place} {predicate!r} is no predicate over `episodes`: {error}"
        raise UsageError(msg) from error
