"""A round: everything that waits is looked up at once, and committed at once, first come, first served."""

import logging
from collections.abc import Sequence

from lake.errors import TrajlakeError
from lake.write.fleet.messages import Answer, Bring, Done, Failed, Found, Look, Request
from lake.write.index import Known
from lake.write.ledger import Ledger

_log = logging.getLogger("trajlake")


def answered(ledger: Ledger, requests: Sequence[Request]) -> list[Answer]:
    """Do what is asked for, and say of each request what became of it.

    The lake is looked at once, after all of the requests came, so nobody is told of an earlier state than it could
    have seen itself. What goes wrong goes wrong for all: each of them then finds out by itself. Raises nothing.
    """
    if not requests:
        return []
    attempts = [request.attempt() for request in requests if isinstance(request, Bring)]
    looks = [request for request in requests if isinstance(request, Look)]
    try:
        accepted = ledger.accept(attempts) if attempts else set()
        all_of = (
            {one for look in looks for one in look.episode_ids},
            {one for look in looks for one in look.group_ids},
        )
        known = ledger.remembered(*all_of) if attempts else ledger.look(*all_of)
    except (TrajlakeError, OSError) as error:
        return [Failed(str(error)) for _ in requests]
    except Exception as error:
        # A fault of ours, or of a request that was not to come: the committer goes on for whoever comes next.
        _log.exception("a round failed")
        return [Failed(f"{type(error).__name__}: {error}") for _ in requests]
    return [
        Found(_of(known, request)) if isinstance(request, Look) else Done(request.write_id in accepted)
        for request in requests
    ]


def _of(known: Known, look: Look) -> Known:
    """What one of them asked for."""
    groups = set(look.group_ids)
    return Known(
        known.version,
        {one: known.contents[one] for one in look.episode_ids if one in known.contents},
        {slot: last for slot, last in known.newest.items() if slot[0] in groups},
        known.forgotten.intersection(look.episode_ids),
    )
