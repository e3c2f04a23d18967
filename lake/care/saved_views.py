"""Saved views: names for addresses of the viewer, kept with the lake, so that whoever shares it has them.

Each is a small JSON object under `_trajlake/views/`, as named snapshots are, and no row of a table: a view says nothing
of the data, and a new table would lock older versions out of the lake. The last one saved under a name counts. What
such an object holds is checked by whoever follows it (`viewer.views`): anybody who can write to the lake can write one.
"""

from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlsplit

import msgspec

from lake import ids
from lake.documents import decode_document
from lake.errors import LakeAccessError, UsageError
from lake.records import printable
from lake.storage.objects import Objects

LONGEST = 80
"""Characters of a name."""
LONGEST_ADDRESS = 16_000
MOST = 500
"""Views that are read."""
_FOLDER = "_trajlake/views"


class SavedView(msgspec.Struct, frozen=True, kw_only=True):
    """A name for an address."""

    name: str
    address: str
    """Path and query of a page, as `/episodes?run=a`."""
    author: str
    at: datetime


def saved_views(objects: Objects) -> list[SavedView]:
    """The views of a lake, by name; what is damaged is left out."""
    found = []
    for entry in objects.list(_FOLDER)[:MOST]:
        with suppress(LakeAccessError):
            found.append(decode_document(objects.get(entry.path) or b"", SavedView, entry.path, "delete it"))
    return sorted(found, key=in_order)


def in_order(view: SavedView) -> tuple[str, str]:
    """What views are sorted by."""
    return view.name.lower(), view.name


def words_of(view: SavedView) -> frozenset[str]:
    """Return the values of a view's parameters, and of the filters that are packed into some of them."""
    words: set[str] = set()
    with suppress(ValueError):
        outer = [value for _, value in parse_qsl(urlsplit(view.address).query)]
        words.update(outer, (value for packed in outer for _, value in parse_qsl(packed)))
    return frozenset(words)


def has_view(objects: Objects, name: str) -> bool:
    """Whether there is such a view. Raises UsageError: it is no name."""
    return objects.exists(_path(_named(name)))


def save_view(objects: Objects, name: str, address: str, author: str) -> None:
    """Give an address a name, in place of the one that the name stood for. Raises UsageError: no name, or too long."""
    name = _named(name)
    if len(address) > LONGEST_ADDRESS:
        raise UsageError(f"the address has {len(address):,} characters; a view keeps {LONGEST_ADDRESS:,}")
    view = SavedView(name=name, address=address, author=printable(author.strip())[:LONGEST], at=datetime.now(UTC))
    objects.put(_path(name), msgspec.json.encode(view))


def drop_view(objects: Objects, name: str) -> None:
    """Take a name back. Raises UsageError: it is none, or there is no such view."""
    name = _named(name)
    if not has_view(objects, name):
        raise UsageError(f"there is no view {name!r}")
    objects.delete([_path(name)])


def _named(text: str) -> str:
    name = printable(text.strip())
    if not name or len(name) > LONGEST or not name.isprintable():
        raise UsageError(f"{text!r} is no name of a view; valid: 1 to {LONGEST} printable characters on one line")
    return name


def _path(name: str) -> str:
    return f"{_FOLDER}/{ids.to_text(ids.key_hash('view', name))}.json"
