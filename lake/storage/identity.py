"""What tells a lake from every other one: an id that it keeps wherever it is moved, and that no new lake gets.

It is the id of the Delta table `episodes`. A copy of a lake has it too. Recording may begin before there is a lake: the
id that the lake is going to have is then put under `_trajlake/` first, and whoever makes the lake takes it.
"""

import re
import uuid

import msgspec

from lake.errors import LakeAccessError
from lake.storage.objects import Objects
from lake.tables import EPISODES

OWN_FOLDER = "_trajlake"
"""Right under a lake, with what is no table: which tables it has had, snapshots by name, leases, its id to be."""
RESERVED = f"{OWN_FOLDER}/id"
_FIRST_COMMIT = f"{EPISODES.name}/_delta_log/{0:020d}.json"
_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


class _Metadata(msgspec.Struct):
    id: str = ""


class _Action(msgspec.Struct):
    """A line of a Delta log, as far as it says which table it is."""

    metadata: _Metadata | None = msgspec.field(name="metaData", default=None)


def identity(objects: Objects) -> str | None:
    """The id of the lake under `objects`, or the one that is reserved for it; None: neither is there.

    Raises:
        LakeAccessError: it cannot be reached, or the reserved id is damaged.
    """
    return _of_table(objects) or _reserved(objects)


def reserve(objects: Objects, wanted: str | None = None) -> str:
    """The id of the lake under `objects`; where there is no lake, reserve one for it, `wanted` if that is still free.

    Raises:
        LakeAccessError: as `identity`; or nothing can be written there.
    """
    found = identity(objects)
    if found is None:
        objects.create(RESERVED, (wanted or str(uuid.uuid4())).encode())
        found = identity(objects)
    if found is None:
        raise LakeAccessError(f"{objects.uri(RESERVED)} was deleted while it was being written; try again")
    return found


def is_known_as(objects: Objects, wanted: str) -> bool:
    """Whether the lake under `objects` has an id, or had it reserved while another process was making the lake."""
    return wanted in (_of_table(objects), _reserved(objects))


def _of_table(objects: Objects) -> str | None:
    for line in (objects.get(_FIRST_COMMIT) or b"").splitlines():
        try:
            found = msgspec.json.decode(line, type=_Action).metadata
        except (msgspec.DecodeError, RecursionError):
            continue  # `doctor` tells of a damaged log
        if found is not None and _ID.fullmatch(found.id):
            return found.id
    return None


def _reserved(objects: Objects) -> str | None:
    if (data := objects.get(RESERVED)) is None:
        return None
    text = data.decode(errors="replace")
    if not _ID.fullmatch(text):
        raise LakeAccessError(f"{objects.uri(RESERVED)} holds no id of a lake; delete it")
    return text
