"""Whose frames a spool holds: the lake that they were recorded for.

A path is no name of a lake: it may be deleted and another one made in its place, moved, or copied. So each spool says
in a file of its own which lake it belongs to: by the lake's id, and by the address that it had. A lake in a bucket is
not asked before there is something to deliver; until then its spool has the address alone.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lake.errors import LakeAccessError, TrajlakeError
from lake.storage.identity import identity, is_known_as, reserve
from lake.storage.objects import Objects

if TYPE_CHECKING:
    from lake.lake import Lake

FILE = "lake.json"
"""In the folder of a spool."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The lake of a spool."""

    address: str
    """Folder or URI that it was recorded into."""
    lake: str | None = None
    """Its id; None as long as that is not known."""

    def is_at_another_place(self) -> bool:
        """Whether the lake of this id does not lie at its address, as far as that can be told without a network."""
        if "://" in self.address:
            return False
        try:
            return identity(Objects(self.address)) != self.lake
        except TrajlakeError:
            return False


def address_of(lake_uri: str | Path) -> str:
    """The one spelling of a lake's address: an absolute path, or the URI without a slash at its end."""
    text = str(lake_uri)
    return text.rstrip("/") if "://" in text else str(Path(text).expanduser().resolve())


def owner_at(lake_uri: str | Path) -> Owner:
    """The lake at an address; of a local one that is not there yet the id is reserved. A bucket is not asked.

    Raises:
        LakeAccessError: the folder cannot be read or written.
    """
    address = address_of(lake_uri)
    return Owner(address=address, lake=None if "://" in address else reserve(Objects(address)))


def asked_owner(lake_uri: str, root: Path) -> Owner:
    """As `owner_at`; a bucket is asked if dead processes left something below `root`. Raises LakeAccessError."""
    owner = owner_at(lake_uri)
    if owner.lake is None and root.is_dir() and any(path.is_dir() for path in root.iterdir()):
        with contextlib.suppress(TrajlakeError):  # it may be reached later
            owner = msgspec.structs.replace(owner, lake=identity_at(lake_uri))
    return owner


def identity_at(lake_uri: str, storage_options: Mapping[str, str] | None = None) -> str | None:
    """The id of the lake at an address, which is asked; None: there is none. Raises LakeAccessError."""
    return identity(Objects(lake_uri, storage_options))


def owner_of(lake: "Lake") -> Owner:
    """An open lake. Raises LakeAccessError: it cannot be reached."""
    return Owner(address=address_of(lake.uri), lake=lake.identity)


def open_owned(owner: Owner, lake_uri: str, storage_options: Mapping[str, str] | None = None) -> "Lake":
    """Open the lake of a spool; one that is made now gets the id that was reserved for it.

    Raises:
        LakeAccessError: another lake lies there by now.
        TrajlakeError: as `lake.open`.
    """
    from lake.opening import open as open_lake
    from lake.opening import require_room

    objects = Objects(lake_uri, storage_options)
    if owner.lake is not None and identity(objects) is None:
        require_room(objects, create=True)
        reserve(objects, owner.lake)
    lake = open_lake(lake_uri, create=True, storage_options=storage_options)
    if owner.lake is not None and not is_known_as(objects, owner.lake):
        raise LakeAccessError(
            f"the lake at {lake.uri} was made after recording into another one had begun there; what was recorded "
            f"stays in its spool: `trajlake spools --lake {lake.uri}`"
        )
    return lake


def read_owner(folder: Path) -> Owner | None:
    """The lake that a spool says it belongs to; None: it was written by an earlier version. Raises OSError."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Owner)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError) as error:
        raise OSError(f"{folder / FILE} is damaged: {error}") from error


def write_owner(folder: Path, owner: Owner) -> None:
    """Say durably which lake a spool belongs to. Raises OSError."""
    staging = folder / f"{FILE}#"
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(owner))
        file.flush()
        os.fsync(descriptor)
    staging.replace(folder / FILE)


def is_taken_by(owner: Owner, other: Owner | None) -> bool:
    """Whether what a dead process recorded for `other` is delivered by who records for `owner`.

    The lake has to be the same. At another address it is the same lake if it was moved: a copy of it has the id too,
    and then the lake at the old address is still there.
    """
    if other is None:
        return True
    if other.lake is None or owner.lake is None:
        return other.lake is None and other.address == owner.address
    return other.lake == owner.lake and (other.address == owner.address or other.is_at_another_place())


def is_orphan(owner: Owner, other: Owner | None) -> bool:
    """Whether what was recorded for `other` is of a lake that lay where another one lies now."""
    return (
        other is not None
        and None not in (owner.lake, other.lake)
        and (other.address, other.lake == owner.lake) == (owner.address, False)
    )
