"""Where the events of an OpenHands conversation lie: in a folder, a file each, or so in the archive that is downloaded.

.. code-block:: text

    events/event-00000-<id>.json (V1), events/0.json (V0)      base_state.json beside the folder
    archive: event_000000_<id>.json                            meta.json, what is said of the conversation
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from lake.formats.base.documents import companion
from lake.formats.base.json_array import Element
from lake.formats.base.look import Look
from lake.formats.base.rows import parsed, values
from lake.formats.base.source import Input
from lake.formats.base.zip_entries import Entry, EntryError, listed
from lake.records import Reject

_NUMBER = re.compile(r"(?:event-)?(\d+)(?:-[\w-]+)?\.json\Z")
_ENTRY = re.compile(r"(?:.*/)?event[-_](\d+)[-_][\w-]+\.json\Z")
_ABOUT = ("meta.json", "base_state.json")


def number_of(path: Path) -> int | None:
    """The number of an event's file; None for any other file."""
    found = _NUMBER.match(path.name)
    return int(found[1]) if found else None


def siblings(path: Path) -> list[Path]:
    """The events of a folder, in order."""
    found = [(number, other) for other in path.parent.glob("*.json") if (number := number_of(other)) is not None]
    return [other for _, other in sorted(found)]


def run_folder(place: PurePath) -> PurePath:
    """The folder of the file, or of the conversation whose events lie in `events`."""
    return place.parents[2] if place.parent.name == "events" and len(place.parents) > 2 else place.parent


def is_folder(path: Path) -> bool:
    """Whether a file is an event of a folder of them."""
    return path.parent.name == "events" and number_of(path) is not None


def is_archive(look: Look) -> bool:
    """Whether a file is an archive of events."""
    return look.kind == "zip" and any(map(_ENTRY.match, look.names))


def placed(file: Input) -> Iterator[Element | Reject]:
    """The values of a file, or of the folder or archive that it is: there, positions are the events' numbers."""
    if is_folder(file.path):
        yield from _folder(file)
    elif _is_zip(file.path):
        yield from _archive(file)
    else:
        yield from values(file)


def state_of(path: Path) -> tuple[Any, str | None]:
    """What is said of the conversation beside its events, and why it cannot be read."""
    if is_folder(path):
        return companion(path.parent.parent / _ABOUT[1])
    for entry in listed(path)[0] if _is_zip(path) else ():
        if entry.name.rpartition("/")[2] in _ABOUT:
            with path.open("rb") as source:
                found = _read(entry, 0, source)
            return (None, found.message) if isinstance(found, Reject) else (found.value, found.problem)
    return None, None


def _folder(file: Input) -> Iterator[Element | Reject]:
    for path in siblings(file.path):
        for item in values(Input(path, file.run_id)):
            if isinstance(item, Reject):
                item.position = number_of(path) or 0
            else:
                item.index = number_of(path) or 0
            yield item


def _archive(file: Input) -> Iterator[Element | Reject]:
    entries, fault = listed(file.path)
    events = sorted((int(found[1]), entry.name, entry) for entry in entries if (found := _ENTRY.match(entry.name)))
    with file.path.open("rb") as source:
        for number, _, entry in events:
            file.meter.done += entry.packed
            yield _read(entry, number, source)
    if fault is not None:
        yield Reject(position=len(events), reason="truncated", message=fault, raw="")


def _read(entry: Entry, number: int, source: Any) -> Element | Reject:
    try:
        item = parsed(number, entry.read(source))
    except EntryError as error:
        return Reject(position=number, reason="malformed", message=f"{entry.name}: {error}", raw="")
    if isinstance(item, Reject):
        item.message = f"{entry.name}: {item.message}"
    return item


def _is_zip(path: Path) -> bool:
    with path.open("rb") as source:
        return source.read(2) == b"PK"
