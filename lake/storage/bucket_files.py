"""A lake's Parquet files in a bucket as files that DuckDB and pyarrow can read.

DuckDB reads s3:// with an extension that has to be downloaded; through an fsspec file system it needs none. obstore's
own (`obstore.fsspec`) returns short reads, which DuckDB takes for damaged files, and asks for every size again. This
one serves the files of a snapshot, whose sizes the Delta log tells, by exact ranges; to anything else, and to
writing, it says no (docs/decisions/0009).
"""

import io
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem

from lake.errors import TrajlakeError

Read = Callable[[str, int, int], bytes]
"""Bytes of a file: its URI, the first and the last plus one."""

_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
"""A Delta file never changes, so the cache of its bytes never expires."""


class BucketFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files of a snapshot, reading only. `sizes`: URI -> bytes of every file that may be read; may grow."""

    cachable = False

    def __init__(self, protocol: str, sizes: Mapping[str, int], read: Read) -> None:
        super().__init__()
        self.protocol = protocol
        self.failure: TrajlakeError | None = None
        """Why the last read that failed did; DuckDB reports a traceback as text instead."""
        self._sizes = sizes
        self.read = read

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def unstrip_protocol(self, name: str) -> str:
        """A URI is its own name here."""
        return name

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size and type of a file. Raises FileNotFoundError: no file of the snapshot."""
        size = self._sizes.get(path)
        if size is None:
            raise FileNotFoundError(f"{path} is no file of this snapshot")
        return {"name": path, "size": size, "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The file itself: folders are not shown."""
        entry = self.info(path)
        return [entry] if detail else [path]

    def glob(self, path: str, **_: Any) -> list[str]:
        """The file itself, if it is one of the snapshot."""
        return [path] if path in self._sizes else []

    def modified(self, path: str) -> datetime:
        """The same time for every file."""
        self.info(path)
        return _LONG_AGO

    def _open(self, path: str, mode: str = "rb", **_: Any) -> "BucketFile":
        if mode != "rb":
            raise PermissionError(f"{path}: a snapshot is read, not written")
        return BucketFile(path, self.info(path)["size"], self._range)

    def _range(self, uri: str, start: int, end: int) -> bytes:
        try:
            return self.read(uri, start, end)
        except TrajlakeError as error:
            self.failure = error
            raise


class BucketFile(io.RawIOBase):
    """One file; every read is one request for exactly its range."""

    def __init__(self, uri: str, size: int, read: Read) -> None:
        self._uri = uri
        self._size = size
        self._range = read
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read starts."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, fewer only at the end of the file; all that are left if no number is given."""
        rest = max(0, self._size - self._position)
        wanted = rest if size is None or size < 0 else min(size, rest)
        if not wanted:
            return b""
        found = self._range(self._uri, self._position, self._position + wanted)
        self._position += len(found)
        return found

    def readall(self) -> bytes:
        """All bytes from here on."""
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer."""
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)
