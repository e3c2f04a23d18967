"""What a person names to be read, as local files: files, folders, globs, `-`, named pipes, objects in a bucket.

Standard input, pipes and objects of a bucket are spooled to disk, so that formats can look at them more than once. A
folder is walked in the order of its names; what lies in it is called by its path below the folder, which is the same on
every machine.
"""

import glob
import os
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from lake.errors import FormatError
from lake.records import printable
from lake.storage.objects import Objects

PATIENCE_SECONDS = 1.0
"""How long a named pipe may stay silent before the user hears of it."""
_NEVER_ENTERED = frozenset((".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__"))
_WILD = frozenset("*?[")
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A local file to be read."""

    path: Path
    name: str
    """What it is called in the lake: the file's name, or its path below the folder that was named."""
    folder: str | None = None
    """Name of the folder or bucket prefix that it was found in; None for a file that was named itself."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One thing that a person named, and the files that it stands for."""

    name: str
    files: list[File]


@contextmanager
def located(
    names: Sequence[str], stdin: BinaryIO, tell: Callable[[str], None] = lambda _: None
) -> Iterator[list[Argument]]:
    """The files that arguments name; spooled ones are deleted afterwards. `tell` hears of a pipe that waits.

    Raises:
        FormatError: nothing is there, or a folder or a glob without a file.
        UsageError, LakeAccessError: a URI that is none, or cannot be read.
    """
    with ExitStack() as stack:

        def spool(name: str) -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trajlake-")), name)

        yield [Argument(name, _files(name, stdin, tell, spool)) for name in names]


def _files(name: str, stdin: BinaryIO, tell: Callable[[str], None], spool: Callable[[str], Path]) -> list[File]:
    path = Path(name)
    if "://" in name:
        return _objects(name, spool)
    if name == "-" or path.is_fifo():
        target = spool("stdin" if name == "-" else path.name)
        with target.open("wb") as file:
            if name == "-":
                shutil.copyfileobj(stdin, file)
            else:
                with _opened(path, tell) as pipe:
                    shutil.copyfileobj(pipe, file)
        return [File(target, target.name)]
    if path.is_dir():
        if not (found := walked(path)):
            raise FormatError(f"{name} is a folder without a file in it; there is nothing to ingest")
        return found
    if not path.exists() and _WILD & set(name):
        if not (matches := sorted(glob.glob(name, recursive=True))):  # noqa: PTH207 - a pattern may be absolute
            raise FormatError(f"no file matches {name!r}; there is nothing to ingest")
        return [
            found
            for match in matches
            for found in (walked(Path(match)) if Path(match).is_dir() else [File(Path(match), Path(match).name)])
        ]
    return [File(path, printable(path.name))]


def walked(folder: Path) -> list[File]:
    """The files of a folder and of those below it, by name."""
    label = folder.resolve().name
    found = []
    for where, folders, names in os.walk(folder):
        if "_delta_log" in folders:
            folders.clear()  # a table, of a lake perhaps
            continue
        folders[:] = sorted(inner for inner in folders if inner not in _NEVER_ENTERED)
        for name in sorted(names):
            path = Path(where, name)
            if path.is_file():
                found.append(File(path, printable(path.relative_to(folder).as_posix()), label))
    return found


def _objects(uri: str, spool: Callable[[str], Path]) -> list[File]:
    """The objects that a URI names: one, those that match its pattern, or all below it."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    store = Objects(f"{scheme}://{bucket}")
    key = key.rstrip("/")
    fixed = PurePosixPath(*_before_wild(PurePosixPath(key).parts))
    prefix = "" if str(fixed) == "." else str(fixed)
    is_pattern = prefix != key
    parent = str(PurePosixPath(key).parent)
    sizes = {found.path: found.bytes for found in store.list(prefix if is_pattern else "" if parent == "." else parent)}
    if is_pattern:
        chosen, base = [path for path in sizes if fnmatchcase(path, key)], prefix
    elif key in sizes:
        chosen, base = [key], str(PurePosixPath(key).parent)
    else:
        sizes = {found.path: found.bytes for found in store.list(key)}
        chosen, base = list(sizes), key
    if not chosen:
        raise FormatError(f"there is no object at {uri}; there is nothing to ingest")
    root = spool("objects")
    files = store.filesystem({store.uri(path): size for path, size in sizes.items()})
    assert files is not None
    label = None if chosen == [key] else PurePosixPath(base or bucket).name
    found = []
    for path in chosen:
        below = PurePosixPath(path).relative_to(base) if base not in ("", ".") else PurePosixPath(path)
        target = root / below
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.open(store.uri(path), "rb") as remote, target.open("wb") as local:
            shutil.copyfileobj(remote, local, _PIECE)
        found.append(File(target, printable(str(below)), label))
    return found


def _before_wild(parts: Sequence[str]) -> list[str]:
    fixed = []
    for part in parts:
        if _WILD & set(part):
            break
        fixed.append(part)
    return fixed


def _opened(fifo: Path, tell: Callable[[str], None]) -> BinaryIO:
    """A named pipe, once there is something to read, or a writer has come and gone."""
    # Opened as a blocking file it would wait for its writer inside open(), where nobody can say so.
    pipe = open(fifo, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        look = select.poll()
        look.register(pipe, select.POLLIN)
        if not look.poll(PATIENCE_SECONDS * 1000):
            tell(f"{fifo} is a named pipe into which nobody has written yet: waiting for a writer (Ctrl-C gives up)")
            look.poll()
        os.set_blocking(pipe.fileno(), True)
    except BaseException:
        pipe.close()
        raise
    return pipe
