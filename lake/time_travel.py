"""The versions of all tables at an earlier moment, consistently.

Only the tables that decide what is visible (and those that are visible as they are) are taken at their old versions.
The others are taken at their newest: facts are never rewritten, so the rows that were visible then are in them now,
and those that were not are told by their write_ids. So clocks that disagree between writers cannot tear an episode
from its steps, and only few old files have to be kept.
"""

from datetime import datetime

from lake.columns import Visibility
from lake.errors import UsageError
from lake.store import Store
from lake.tables import EPISODES, RESOLUTION_ORDER, TABLES


def versions_at_time(store: Store, moment: datetime) -> dict[str, int]:
    """Table -> version, as of a moment.

    Raises:
        UsageError: before the lake was made.
    """
    versions = {}
    for name in RESOLUTION_ORDER:
        decides = TABLES[name].visibility is Visibility.ALWAYS
        versions[name] = store.version_at(name, moment) if decides else store.refresh(name)
    if versions[EPISODES.name] == -1:
        msg = f"{store.root} did not exist at {moment.isoformat()}; it was made at {store.committed_at('episodes', 0)}"
        raise UsageError(msg)
    return versions


def versions_at_episodes(store: Store, version: int) -> dict[str, int]:
    """Table -> version, as of when `episodes` came to a version.

    Raises:
        UsageError: no such version.
    """
    newest = store.refresh(EPISODES.name)
    if not 0 <= version <= newest:
        msg = f"`episodes` has no version {version}; valid: 0 to {newest}"
        raise UsageError(msg)
    return versions_at_time(store, store.committed_at(EPISODES.name, version)) | {EPISODES.name: version}
