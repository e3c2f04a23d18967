"""The versions of all tables at an earlier moment, consistently.

Only the tables that decide what is visible (and those that are visible as they are) are taken at their old versions.
The others are taken at their newest: facts are never rewritten, so the rows that were visible then are in them now,
and those that were not are told by their write_ids. So clocks that disagree between writers cannot tear an episode
from its steps, and only few old files have to be kept.
"""

from datetime import UTC, datetime

import msgspec

from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from lake.storage.log_check import NOTE
from lake.storage.store import Store
from lake.tables import EPISODES, JOBS, RESOLUTION_ORDER, TABLES
from lake.tables.columns import Visibility


def versions_at_time(store: Store, moment: datetime) -> dict[str, int]:
    """Table -> version, as of a moment.

    Raises:
        UsageError: before the lake was made.
    """
    versions = _versions(store, moment)
    if versions[EPISODES.name] == -1:
        made = committed_at(store, EPISODES.name, 0).isoformat()
        raise UsageError(f"{store.root} did not exist at {moment.isoformat()}; it was made at {made}")
    return versions


def versions_at_episodes(store: Store, version: int) -> dict[str, int]:
    """Table -> version, as of when `episodes` came to a version.

    Raises:
        UsageError: no such version.
    """
    newest = store.refresh(EPISODES.name)
    if not 0 <= version <= newest:
        raise UsageError(f"`episodes` has no version {version}; valid: 0 to {newest}")
    # Its own clock may have been behind the one that made the lake.
    versions = _versions(store, committed_at(store, EPISODES.name, version))
    return versions | {EPISODES.name: version}


def _versions(store: Store, moment: datetime) -> dict[str, int]:
    versions = {}
    for name in RESOLUTION_ORDER:
        decides = TABLES[name].visibility is Visibility.ALWAYS
        versions[name] = version_at(store, name, moment) if decides else store.refresh(name)
    return versions


def consistent(store: Store, versions: dict[str, int]) -> dict[str, int]:
    """The versions, with `jobs` no newer than `episodes`.

    A terminal row may name the writes that brought episodes: that of `forget` does, for what else these brought. If
    its clock was behind theirs, the row is there before they are: their steps would be seen without them.
    """

    def episodes_writes(version: int) -> frozenset[int]:
        return Snapshot(store, {EPISODES.name: version}).accepted_write_ids

    later = episodes_writes(store.refresh(EPISODES.name)) - episodes_writes(versions[EPISODES.name])

    def is_ahead(version: int) -> bool:
        deciding = {EPISODES.name: versions[EPISODES.name], JOBS.name: version}
        return not later.isdisjoint(Snapshot(store, deciding).accepted_write_ids)

    low, high = -1, versions[JOBS.name]
    if not later or not is_ahead(high):
        return versions
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_ahead(middle) else (middle, high)
    return versions | {JOBS.name: low}


def version_at(store: Store, name: str, moment: datetime) -> int:
    """The newest version of a table that was there at a moment; -1 before the table was."""
    low, high = -1, store.refresh(name)
    while low < high:
        middle = (low + high + 1) // 2
        if committed_at(store, name, middle) <= moment:
            low = middle
        else:
            high = middle - 1
    return low


def committed_at(store: Store, name: str, version: int) -> datetime:
    """When a version was committed, by its writer's clock."""
    data = store.objects.get(f"{name}/_delta_log/{version:020d}.json")
    for line in (data or b"").splitlines():
        info = msgspec.json.decode(line).get("commitInfo")
        if info is not None:
            at = (info.get(NOTE) or {}).get("at")
            return datetime.fromisoformat(at) if at else datetime.fromtimestamp(info["timestamp"] / 1000, UTC)
    # Its entry was cleaned up: older than anything that can be asked for.
    return datetime.min.replace(tzinfo=UTC)
