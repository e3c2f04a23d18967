"""Folders and files that are either there in full or not at all, also after a power cut.

A file is written under a temporary name beside its target, flushed to disk, then renamed. So is a folder. No portable
call puts it in the place of another that holds files, so the former one gets a name of its own first:

    .NAME.partial     is being written
    .NAME.replaced    the former folder, in full, while the new one gets its name; then it is removed

A kill between the two renames leaves no NAME, and both others in full: readers take `.NAME.replaced` (`settled`), and
the next writer gives it its name back (`recover`). What is only removed is renamed to `.NAME.removed` first.

Each folder lists its files and their sizes in `.files.json`, so that a copy of it with files missing is noticed.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from lake.errors import UsageError

PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"
"""Ends of the names of what is being written, replaced and removed."""
FILES = ".files.json"
"""Name of a folder's list of files with their sizes."""
_WEIGHTS = ".safetensors"
"""End of files that nobody edits by hand: these must have their size."""
_READS = 5
"""Times that a folder is read which is replaced meanwhile."""
_Content = TypeVar("_Content")


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A fresh folder to write into; it becomes `target`, in place of what was there, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = partial_place(target), _hidden(target, _REPLACED)
    _recover(target)
    _remove(partial)
    partial.mkdir()
    yield partial
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
    (partial / FILES).write_bytes(msgspec.json.format(msgspec.json.encode(sizes)))
    for path in sorted(partial.rglob("*"), reverse=True):
        sync_path(path)
    sync_path(partial)
    if os.path.lexists(target):
        target.rename(replaced)
    partial.rename(target)
    sync_path(target.parent)
    _remove(replaced)


def remove_folder(target: Path) -> None:
    """Remove a folder: a kill leaves all of it under its name, or nothing."""
    removed = _hidden(target, _REMOVED)
    _remove(removed)
    target.rename(removed)
    _remove(removed)


def recover(parent: Path) -> None:
    """Finish what killed processes left in a folder of folders; nobody else may be writing there."""
    for end in (_REPLACED, PARTIAL, _REMOVED):
        for path in parent.glob(f".*{end}"):
            name = path.name.removeprefix(".").removesuffix(end)
            if end == _REPLACED:
                _recover(path.with_name(name))
            elif path.is_dir():
                _remove(path)


def settled(target: Path) -> Path:
    """Where the content of a folder lies: in the one set aside if its writer was killed between two renames."""
    replaced = _hidden(target, _REPLACED)
    return replaced if not os.path.lexists(target) and replaced.is_dir() else target


def read_whole(target: Path, read: Callable[[Path], _Content]) -> _Content:
    """What `read` makes of a folder, or of a file; it reads again where the folder was replaced meanwhile.

    Raises:
        UsageError: each time it was replaced before all of it was read.
    """
    for _ in range(_READS):
        place = settled(target)
        before = _identity(place)
        try:
            content = read(place)
        except Exception:
            if _identity(settled(target)) == before:
                raise
        else:
            if _identity(settled(target)) == before:
                return content
    raise UsageError(f"{target} was replaced {_READS} times while it was read; read a copy of it")


def check_whole(folder: Path) -> None:
    """Refuse (UsageError) a folder that lacks files of those which it was written with, or has weights cut short."""
    path = folder / FILES
    if not path.is_file():
        return  # of another program, or written before there was a list
    try:
        sizes = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged: {error}; copy the whole folder again") from error
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise UsageError(
                f"{folder} was written with {len(sizes)} files, and {name} is not there; copy the whole folder again, "
                f"or remove {path} if it is to be without"
            )
        if name.endswith(_WEIGHTS) and (has := file.stat().st_size) != size:
            raise UsageError(f"{file} has {has:,} bytes, and {size:,} were written; copy the whole folder again")


def partial_place(target: Path) -> Path:
    """Where a folder or file is written before it gets its name."""
    return _hidden(target, PARTIAL)


def atomic_text(target: Path, text: str) -> None:
    """Write a text file in one piece."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_place(target)
    partial.write_text(text, encoding="utf-8")
    sync_path(partial)
    partial.replace(target)
    sync_path(target.parent)


def _hidden(target: Path, end: str) -> Path:
    return target.with_name(f".{target.name}{end}")


def _recover(target: Path) -> None:
    """Give a folder that was set aside its name back, or remove it if the new one has the name."""
    replaced = _hidden(target, _REPLACED)
    if not os.path.lexists(replaced):
        return
    if os.path.lexists(target):
        _remove(replaced)
    else:
        replaced.rename(target)
        sync_path(target.parent)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILES)


def _identity(folder: Path) -> list[tuple[int, int] | None]:
    """What tells a folder from another of its name: the inode is not enough, as it is used again."""
    return [_inode(folder), _inode(folder / FILES)]


def _inode(path: Path) -> tuple[int, int] | None:
    """Inode and time of a file, the inode alone of a folder, which others may write into; None if it is not there."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_ino, 0 if path.is_dir() else known.st_mtime_ns


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
