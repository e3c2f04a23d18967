"""Opening a lake, and making one."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lake.care import compaction
from lake.errors import LakeAccessError, NotALakeError, UsageError
from lake.lake import Lake
from lake.storage.commits import utc_now
from lake.storage.identity import OWN_FOLDER, RESERVED
from lake.storage.migrations import missing_table
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES

GROUP_COMMIT = "TRAJLAKE_GROUP_COMMIT"


def open(  # noqa: A001 - `lake.open` is the name people guess
    uri: str | Path | Sequence[str | Path],
    *,
    create: bool = False,
    storage_options: Mapping[str, str] | None = None,
    clock: Callable[[], datetime] = utc_now,
    compact_above: int = compaction.FEW_FILES,
    group_commit: bool | None = None,
) -> Lake:
    """Open a lake, or several as one.

    Args:
        uri: its folder, or s3://bucket/prefix, gs://..., az://...; several are read as one lake, and jobs write what
            they find into the first (`lake.joined`).
        create: make a lake if the folder is missing or empty.
        storage_options: of the object store, by the names of delta-rs and Polars; what is not given comes from the
            environment (AWS_*, GOOGLE_*, AZURE_*). They are never stored.
        clock: what time it is, with a timezone.
        compact_above: a job that leaves a table with this many small files merges them; 0 never does.
        group_commit: writers of this machine that get in each other's way let one process commit for all of them
            (`lake.write.fleet`). Unless given, TRAJLAKE_GROUP_COMMIT says it (on, off); else they do.

    Raises:
        NotALakeError: nothing there, or something that is not a lake.
        LakeVersionError: a lake of a newer format.
        LakeAccessError: no permission, damaged tables, no network.
        UsageError: a URI scheme that is not supported, no usable path, or lakes that cannot be read together.
    """
    if not isinstance(uri, str | Path):
        options = {"storage_options": storage_options, "clock": clock, "compact_above": compact_above}
        return _joined(uri, create=create, group_commit=group_commit, **options)
    objects = Objects(uri, storage_options)
    store = Store(objects, clock)
    if not store.exists():
        require_room(objects, create=create)
        if objects.folder is not None:
            try:
                objects.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or error
                msg = f"{objects.folder}: {reason}; choose another --lake or change the folder's permissions"
                raise LakeAccessError(msg) from error
        names = objects.names()
        has_own = OWN_FOLDER in names and any(found.path != RESERVED for found in objects.list(OWN_FOLDER))
        was_written = has_own or any(store.files(name)[1] for name in TABLES if name in names)
        if was_written and not store.exists():
            # Not half made, nor just made by another process: without `episodes` all of it would be dead.
            raise LakeAccessError(missing_table(objects.root, "episodes"))
        store.create()
    store.check_format()
    if group_commit is None:
        group_commit = _is_on(os.environ.get(GROUP_COMMIT, "on"))
    # A committer goes by the clock of its machine, and is found by sockets and locks of POSIX.
    group_commit = group_commit and clock is utc_now and os.name == "posix"
    return Lake(store, compact_above=compact_above, commits_in_groups=group_commit)


def _is_on(text: str) -> bool:
    if text not in ("on", "off"):
        raise UsageError(f"{GROUP_COMMIT} is {text!r}; valid: on, off")
    return text == "on"


def _joined(uris: Sequence[str | Path], *, create: bool, **options: Any) -> Lake:
    """Several lakes as one; of a single one that lake. Only the first is made, if it is not there."""
    if not isinstance(uris, Sequence) or not all(isinstance(uri, str | Path) for uri in uris):
        msg = f"{uris!r} is no address of a lake; give a text or a path, or a list of them, the first to write to"
        raise UsageError(msg)
    if not uris:
        raise UsageError("no lake is named; give one or more")
    from lake.joined import JoinedLake

    first, *others = (open(uri, create=create and not number, **options) for number, uri in enumerate(uris))
    return JoinedLake([first, *others]) if others else first


def require_room(objects: Objects, *, create: bool) -> None:
    """Raise unless a lake may be made there."""
    commands = "`trajlake ingest FILE --lake URI` or `trajlake demo --lake URI` makes one"
    advice = f"{commands}, and so does lake.open(URI, create=True)"
    path = objects.folder
    if path is not None and path.exists() and not path.is_dir():
        raise NotALakeError(f"{path} is a file, and a lake is a folder; {advice}")
    if create:
        # Another process may be making the lake, or an older package was killed while it made all tables.
        if not objects.names() <= TABLES.keys() | {OWN_FOLDER}:
            raise NotALakeError(f"{objects.root} is not a lake and not empty; name a new or an empty folder")
    elif path is not None and not path.exists():
        raise NotALakeError(f"{path} does not exist; {advice}")
    else:
        raise NotALakeError(f"{objects.root} is not a lake: it holds no `episodes` table; {advice}")
