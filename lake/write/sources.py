"""What a person names to be read, as local files: files, folders, globs, `-`, named pipes, objects in a bucket.

Standard input, pipes and objects of a bucket are spooled to disk, so that formats can look at them more than once. A
folder is walked in the order of its names; what lies in it is called by its path below the folder, which is the same on
every machine. A file that is named twice, or that links lead to, is read once.

A link in a folder to a file outside of it is followed only on request: somebody who can write to the folder, but not
read that file, could have it read.
"""

import os
import select
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO

from lake.errors import FormatError, UsageError
from lake.records import printable
from lake.storage.identity import OWN_FOLDER
from lake.storage.objects import Found, Objects

PATIENCE_SECONDS = 1.0
"""How long a named pipe may stay silent before the user hears of it."""
_NEVER_ENTERED = frozenset(("venv", "node_modules", "__pycache__", OWN_FOLDER))
_TABLE = "_delta_log"
"""A folder that holds this one is a table, of a lake perhaps."""
_UNFINISHED = ("~", ".tmp", ".part", ".partial", ".crdownload")
"""Endings of files that somebody is still writing under another name than theirs."""
_WILD = frozenset("*?[")
_PIECE = 8 << 20
_OUTSIDE = "is a link to a file outside of the folder; name that file, or add --follow-links"


@dataclass(frozen=True, slots=True)
class File:
    """A local file to be read."""

    path: Path
    name: str
    """What it is called in the lake: the file's name, or its path below the folder that was named."""
    place: PurePath
    """Where it lies, from the root; spooled files have the place that they come from."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One thing that a person named, and the files that it stands for."""

    name: str
    """As it was written."""
    files: list[File]
    """Those that no argument before it stands for."""
    label: str = ""
    """What a folder or a pattern is called in the lake; empty for a file."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What was found and is no file to be read -> why."""

    @property
    def source(self) -> str:
        """What it is called in the lake."""
        return self.label or (self.files[0].name if self.files else printable(Path(self.name).name))


@contextmanager
def located(
    names: Sequence[str],
    stdin: BinaryIO,
    tell: Callable[[str], None] = lambda _: None,
    *,
    follow_links: bool = False,
) -> Iterator[list[Argument]]:
    """Yield the files that arguments name; spooled ones are deleted afterwards.

    Args:
        names: files, folders, globs, `-` and URIs.
        stdin: what `-` stands for.
        tell: receives a message about a pipe that waits.
        follow_links: whether links in folders to files outside of them are followed.

    Raises:
        FormatError: nothing is there, or a folder or a glob without a file.
        UsageError, LakeAccessError: a URI that is none, or cannot be read.
    """
    met: set[object] = set()
    with ExitStack() as stack:

        def room() -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trajlake-")))

        found = []
        for name in names:
            if "://" in name:
                found.append(_objects(name, room, met))
            elif name == "-" or is_(Path(name).is_fifo):
                found.append(_piped(name, stdin, tell, room()))
            else:
                found.append(local(name, met, follow_links=follow_links))
        yield found


def local(name: str, met: set[object], *, may_be_empty: bool = False, follow_links: bool = False) -> Argument:
    """The files of this machine that a name stands for, without those that were met before.

    Raises:
        FormatError: a folder or a glob without a file, unless it `may_be_empty`. A file that is not there is for its
            reader to tell.
        UsageError: no name.
    """
    if not name:
        raise UsageError("the name of a file is empty; give the path of a file or a folder")
    path = Path(name)
    if is_(path.is_dir):
        label = printable(path.resolve().name or name)
        left_out: dict[str, str] = {}
        files = _walked(path, label, left_out, home=None if follow_links else path)
        if not files and not may_be_empty:
            if is_(Path(path, "episodes", _TABLE).is_dir):
                raise FormatError(f"{name} is a lake; name files of trajectories, such as an export of it")
            why = "".join(f"; {found} {reason}" for found, reason in list(left_out.items())[:1])
            raise FormatError(f"{name} is a folder without a file in it; there is nothing to ingest{why}")
        return Argument(name, _unmet(files, met), label, left_out)
    if not os.path.lexists(name) and _WILD & set(name):
        return _matched(name, met, may_be_empty=may_be_empty, follow_links=follow_links)
    return Argument(name, _unmet([_file(path, printable(path.name))], met))


def _file(path: Path, name: str) -> File:
    """A file of this machine. Links are not followed: a run is called as people see it."""
    return File(path, name, PurePath(printable(os.path.normpath(path.absolute()))))


def _matched(pattern: str, met: set[object], *, may_be_empty: bool, follow_links: bool) -> Argument:
    """What a glob matches; a file is called by its path below what is fixed of the pattern."""
    parts = Path(pattern).parts
    fixed = _before_wild(parts)
    base = Path(*fixed)
    found: dict[Path, File] = {}
    left_out: dict[str, str] = {}
    for match in _expanded(base, parts[len(fixed) :], left_out):
        below = match.relative_to(base).as_posix()
        if is_(match.is_dir):
            inside = _walked(
                match,
                printable(match.resolve().name),
                left_out,
                "" if below == "." else below,
                home=None if follow_links else match,
            )
            found |= {file.path: file for file in inside}
        elif is_(match.is_file):
            if not follow_links and _leads_out(match, base):
                left_out[printable(below)] = _OUTSIDE
            else:
                found.setdefault(match, _file(match, printable(below)))
    if not found and not may_be_empty:
        why = "".join(f"; {name} {reason}" for name, reason in list(left_out.items())[:1])
        raise FormatError(f"no file matches {pattern!r}; there is nothing to ingest{why}")
    files = sorted(found.values(), key=lambda file: file.path)
    return Argument(pattern, _unmet(files, met), printable(parts[-1]), left_out)


def _expanded(base: Path, pattern: Sequence[str], left_out: dict[str, str]) -> Iterator[Path]:
    """The files and folders below a folder that a pattern matches; `**` stands for any folders but links to them."""
    waiting = [(base, pattern)]
    while waiting:
        path, parts = waiting.pop()
        if not parts or list(parts) == ["**"]:
            yield path
            continue
        here, rest = parts[0], parts[1:]
        entries = _listed(path, path.name, left_out)
        if here == "**":
            folders = (entry for entry in entries if entry.is_dir(follow_symlinks=False) and _is_entered(entry.name))
            inner = [(path, rest), *((Path(entry), parts) for entry in folders)]
        else:
            inner = [
                (Path(entry), rest) for entry in entries if fnmatchcase(entry.name, here) and _goes_on(entry, rest)
            ]
        waiting += reversed(inner)


def _goes_on(entry: os.DirEntry[str], rest: Sequence[str]) -> bool:
    """Whether what matches a part of a pattern is a folder to be entered, or a file where the pattern ends."""
    return _is_entered(entry.name) if is_(entry.is_dir) else not rest and not _is_unfinished(entry.name)


def _walked(
    folder: Path | str, label: str, left_out: dict[str, str], below: str = "", *, home: Path | None
) -> list[File]:
    """Return the files of a folder and of those below it, by name.

    Args:
        folder: where to begin.
        label: what messages call it.
        left_out: gets what is no file to be read, with the reason.
        below: path to the folder that the names of its files begin with.
        home: folder that links must not lead out of; None follows them anywhere.
    """
    found: list[File] = []
    waiting = [(str(folder), below)]
    while waiting:
        here, below = waiting.pop()
        folders: list[tuple[str, str]] = []
        for entry in _listed(here, below or label, left_out):
            called = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders += [(entry.path, called)] if _is_entered(entry.name) else []
            elif _is_unfinished(entry.name):
                continue
            elif is_(entry.is_file):
                if home is not None and entry.is_symlink() and _leads_out(Path(entry.path), home):
                    left_out[printable(called)] = _OUTSIDE
                else:
                    found.append(_file(Path(entry.path), printable(called)))
            elif is_(entry.is_dir):
                left_out[printable(called)] = "is a link to a folder; name the folder to have it read"
            else:
                left_out[printable(called)] = "is no file: a pipe, a socket, or a link to nothing"
        waiting += reversed(folders)
    return found


def _listed(folder: Path | str, called: str, left_out: dict[str, str]) -> list[os.DirEntry[str]]:
    """What lies in a folder, by name; nothing of a table, nor of a folder that cannot be listed, which is told."""
    try:
        with os.scandir(folder) as entries:
            inner = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        left_out[printable(called)] = f"cannot be read: {error.strerror}"
        return []
    return [] if any(entry.name == _TABLE for entry in inner) else inner


def _leads_out(path: Path, home: Path) -> bool:
    """Return whether links on the way to a file lead out of a folder."""
    return not path.resolve().is_relative_to(home.resolve())


def is_(kind: Callable[[], bool]) -> bool:
    """Whether a path is a folder, say; not where that cannot be told: a closed folder, links that lead in a circle."""
    try:
        return kind()
    except OSError:
        return False


def _is_entered(folder: str) -> bool:
    return folder not in _NEVER_ENTERED and not folder.startswith(".")


def _is_unfinished(name: str) -> bool:
    """Whether a file's name says that it is hidden, or not yet what it will be."""
    return name.startswith(".") or name.endswith(_UNFINISHED)


def _unmet(files: list[File], met: set[object]) -> list[File]:
    """The files that were not met before, whatever they are called; of a file and links to it, the file."""
    keys: dict[File, object] = {}
    links: dict[File, object] = {}
    for file in files:
        try:
            seen = file.path.lstat()
            is_link = stat.S_ISLNK(seen.st_mode)
            seen = file.path.stat() if is_link else seen
        except OSError:
            keys[file] = file  # its reader tells
        else:
            (links if is_link else keys)[file] = seen.st_dev, seen.st_ino
    chosen = set()
    for file, key in (keys | links).items():
        if key not in met:
            met.add(key)
            chosen.add(file)
    return [file for file in files if file in chosen]


def _piped(name: str, stdin: BinaryIO, tell: Callable[[str], None], room: Path) -> Argument:
    """What comes out of standard input or a named pipe, until its end."""
    path = Path(name)
    target = room / ("stdin" if name == "-" else path.name)
    with target.open("wb") as file:
        if name == "-":
            shutil.copyfileobj(stdin, file)
        else:
            with _opened(path, tell) as pipe:
                shutil.copyfileobj(pipe, file)
    return Argument(name, [File(target, printable(target.name), PurePath(target.name))])


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


def _objects(uri: str, room: Callable[[], Path], met: set[object]) -> Argument:
    """The objects that a URI names: one, those that match its pattern, or all below it."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    store = Objects(f"{scheme}://{bucket}")
    parts = PurePosixPath(key).parts
    is_object = bool(key) and store.exists(key)
    base = PurePosixPath(*(parts[:-1] if is_object else _before_wild(parts)))
    listed = store.list("" if not base.parts else str(base))
    chosen = {key} if is_object else _chosen(listed, parts, len(base.parts))
    # A folder that somebody made in a console is an object of no bytes.
    sizes = {
        found.path: found.bytes
        for found in listed
        if found.path in chosen and (found.bytes or is_object or PurePosixPath(found.path).suffix)
    }
    if not sizes:
        raise FormatError(f"there is no object at {uri}; there is nothing to ingest")
    root = room()
    files = store.filesystem({store.uri(path): size for path, size in sizes.items()})
    assert files is not None
    argument = Argument(uri, [], "" if is_object else printable(parts[-1] if parts else bucket))
    for path in sizes:
        if (address := store.uri(path)) in met:
            continue
        met.add(address)
        name = PurePosixPath(path).relative_to(base)
        target = root / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with files.open(address, "rb") as remote, target.open("wb") as spooled:
                shutil.copyfileobj(remote, spooled, _PIECE)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            argument.left_out[printable(str(name))] = "is an object, and other objects lie below it"
            continue
        argument.files.append(File(target, printable(str(name)), PurePath(printable(f"{bucket}/{path}"))))
    return argument


def _chosen(listed: Iterable[Found], pattern: tuple[str, ...], fixed: int) -> set[str]:
    """Keys that a pattern matches, or that lie below what it matches."""
    paths = {found.path: PurePosixPath(found.path).parts for found in listed}
    tables = {parts[: parts.index(_TABLE)] for parts in paths.values() if _TABLE in parts}
    chosen = set()
    for path, parts in paths.items():
        below = range(fixed, len(parts) + 1)
        if any(parts[:end] in tables for end in below) or _is_unfinished(parts[-1]):
            continue
        if not all(map(_is_entered, parts[fixed:-1])) or ".." in parts:
            continue
        if any(_fits(parts[:end], pattern) for end in below):
            chosen.add(path)
    return chosen


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a pattern part by part; `**` stands for any number of parts."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _before_wild(parts: Sequence[str]) -> list[str]:
    """The parts of a path before the first that is a pattern."""
    return list(takewhile(lambda part: not _WILD & set(part), parts))
