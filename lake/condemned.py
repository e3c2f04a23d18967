"""Write attempts that are dropped: published before anything is taken out of a table, and for good.

A writer that lost a compare-and-swap looks here before it tries again. Whoever drops rows publishes their write_ids
first and fences the writers after, so a write attempt that is not accepted by then can no longer be.
"""

import msgspec

from lake import ids
from lake.objects import Objects

_FOLDER = "_trajlake/condemned"


def condemn(objects: Objects, write_ids: frozenset[int]) -> None:
    """Let writers know that these write attempts must not be accepted any more."""
    if write_ids:
        objects.put(f"{_FOLDER}/{ids.to_text(ids.fresh_id())}.json", msgspec.json.encode(sorted(write_ids)))


def condemned(objects: Objects) -> frozenset[int]:
    """Write attempts that were dropped, or are about to be."""
    found = (objects.get(entry.path) for entry in objects.list(_FOLDER))
    return frozenset().union(*(msgspec.json.decode(data, type=list[int]) for data in found if data is not None))
