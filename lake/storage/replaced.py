"""What `forget` put in the place of files of earlier versions: the same rows without those of the forgotten episodes.

A log is never rewritten, so an earlier version goes on naming files that held something forgotten and are deleted.
Whoever opens such a version is led to the files without it; named snapshots and interrupted runs keep the rest of what
they held, and know how much was taken from them. A record is published before the file it stands for is deleted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from lake import ids
from lake.storage.data_files import FileEntry
from lake.storage.objects import Objects

_FOLDER = "_trajlake/replaced"


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted file and the one that holds its other rows."""

    old: str
    """Its path below the lake."""
    new: str | None
    """Name of the other in the same table; None if no row is left."""
    rows: int
    bytes: int
    emptied: tuple[int, ...]
    """Write attempts that have no row left in it: they were accepted all the same."""


class Replacements:
    """The replaced files of a lake."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read: dict[str, list[Replacement]] = {}

    def publish(self, replaced: Sequence[Replacement]) -> None:
        """Let readers of earlier versions know, before the old files are deleted."""
        if replaced:
            self._objects.put(f"{_FOLDER}/{ids.to_text(ids.fresh_id())}.json", msgspec.json.encode(replaced))

    def known(self) -> dict[str, Replacement]:
        """Replacements by the old file's path; each record is read once."""
        for found in self._objects.list(_FOLDER):
            if found.path not in self._read and (data := self._objects.get(found.path)) is not None:
                self._read[found.path] = msgspec.json.decode(data, type=list[Replacement])
        return {one.old: one for path in sorted(self._read) for one in self._read[path]}


def applied(
    objects: Objects, name: str, entries: Iterable[FileEntry], known: Mapping[str, Replacement]
) -> tuple[list[FileEntry], list[FileEntry]]:
    """Files of a version as they are read now, by path, and those of which nothing is left.

    A replacement may have been replaced again. What the log says of ranges still holds: they only shrink.
    """
    if not known:
        return list(entries), []
    there, gone = [], []
    for entry in entries:
        found = entry
        while (one := known.get(f"{name}/{found.name}")) is not None:
            emptied = found.emptied | frozenset(one.emptied)
            if one.new is None:
                gone.append(replace(found, emptied=emptied))
                break
            path = objects.uri(f"{name}/{one.new}")
            found = replace(found, path=path, name=one.new, rows=one.rows, bytes=one.bytes, emptied=emptied)
        else:
            there.append(found)
    return sorted(there, key=lambda entry: entry.path), gone
