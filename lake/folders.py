"""Objects in a local folder, with the guarantees of an object store and nothing but file operations.

An object is written to a staging file beside its place and linked or renamed into it, so a process that is killed
leaves a staging file, never half an object. The link fails if the name is taken: that is put-if-absent, and it is
what delta-rs does, so either may race the other. Staging files are named as object_store names its own
(`NAME#DIGITS`), which delta-rs and every listing skip.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

_STAGING = re.compile(r"#\d+$")


class Folder:
    """The objects under a local folder.

    Args:
        root: absolute path; made by the first write.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def list(self, prefix: str, *, staging: bool) -> Iterator[tuple[str, int, datetime]]:
        """Path, bytes and time of every object under a folder."""
        try:
            entries = list(os.scandir(f"{self._root}/{prefix}" if prefix else self._root))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            path = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self.list(path, staging=staging)
            elif staging or not _STAGING.search(entry.name):
                with suppress(FileNotFoundError):  # deleted since
                    found = entry.stat()
                    yield path, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC)

    def names(self) -> set[str]:
        """Names right under the root."""
        try:
            return {entry.name for entry in Path(self._root).iterdir()}
        except FileNotFoundError:
            return set()

    def get(self, path: str) -> bytes | None:
        """An object's bytes; None if there is none."""
        try:
            # A Path costs more than a small file's bytes.
            with open(f"{self._root}/{path}", "rb") as file:  # noqa: PTH123
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        return self._path(path).is_file()

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist; False if it does."""
        try:
            self._place(path, data, os.link)
        except FileExistsError:
            return False
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write an object, over another one if need be."""
        self._place(path, data, os.replace)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        for path in paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._path(path).unlink()

    def _place(self, path: str, data: bytes, move: Callable[[Path, Path], None]) -> None:
        target = self._path(path)
        staging = target.with_name(f"{target.name}#{secrets.randbits(63)}")
        try:
            try:
                staging.write_bytes(data)
            except FileNotFoundError:
                target.parent.mkdir(parents=True, exist_ok=True)
                staging.write_bytes(data)
            move(staging, target)
        finally:
            staging.unlink(missing_ok=True)

    def _path(self, path: str) -> Path:
        return Path(self._root, path)
