"""The file-system floor under a lake: whole objects by path, in a local folder or in a bucket.

Everything in a lake that is not a Delta table's own read or write goes through here: looking for a lake, commits of
compaction, pins, orphans. A local lake uses file operations and never loads obstore.
"""

import builtins
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lake.errors import TrajlakeError
from lake.storage import addresses
from lake.storage.addresses import explained

if TYPE_CHECKING:
    from lake.storage.bucket_files import BucketFiles
    from lake.storage.buckets import Bucket

_STAGING = re.compile(r"#\d+$")


class Folder:
    """The objects under a local folder, with the guarantees of an object store and nothing but file operations.

    An object is written to a staging file beside its place and linked or renamed into it, so a process that is killed
    leaves a staging file, never half an object. The link fails if the name is taken: that is put-if-absent, and it is
    what delta-rs does, so either may race the other. Staging files are named as object_store names its own
    (`NAME#DIGITS`), which delta-rs and every listing skip.
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
        return Path(self._root, path).is_file()

    def create(self, path: str, data: bytes) -> bool:
        """Write an object if there is none, atomically; False if it exists. Of several that race, one succeeds."""
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
                Path(self._root, path).unlink()

    def _place(self, path: str, data: bytes, move: Callable[[Path, Path], None]) -> None:
        target = Path(self._root, path)
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


_SECRET = re.compile(
    r"secret|token|password|access_?key|account_?key|master_?key|customer_key|sas|service_account_key|connection_string"
    r"|credential|signature",
    re.IGNORECASE,
)
_PLACE = re.compile(r"_(file|path|uri|url|endpoint|format|provider)$|_allow_|_skip_|application_credentials$", re.I)
_FAMILIES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_")
_SHORTEST_SECRET = 4


@dataclass(frozen=True, slots=True)
class Found:
    """An object that a listing found."""

    path: str
    """Relative to the root, with slashes."""
    bytes: int
    modified: datetime
    """By the store's clock, UTC."""


class Objects:
    """The objects under a root. Paths are relative to it and use slashes.

    Args:
        root: a local folder or the URI of an object store's prefix; see `lake.storage.addresses`.
        options: storage options by the names of delta-rs and Polars, for example `aws_endpoint_url`; what is not
            given comes from the environment.

    Raises:
        UsageError: no usable root, or an unknown option.
        LakeAccessError: credentials that cannot be read.

    Every method raises:
        NotALakeError: the bucket does not exist.
        LakeAccessError: no access, no credentials, no network, a full disk. No message holds a secret.
    """

    def __init__(self, root: str | Path, options: Mapping[str, str] | None = None) -> None:
        self._address = addresses.parse(root)
        self._options = {name.lower(): str(value) for name, value in (options or {}).items()}
        self._failures: tuple[type[Exception], ...] = (OSError,)
        self._bucket: Bucket | None = None
        if self._address.scheme:
            from lake.storage import buckets

            self._failures = buckets.FAILURES
            with self._explaining():
                self._bucket = buckets.Bucket(self._address, self._options)
        self._floor = self._bucket or Folder(self._address.root)

    def __repr__(self) -> str:
        return f"Objects({self.root!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """By address and options: what they open is not carried to another process."""
        return Objects, (self.root, self._options)

    @property
    def root(self) -> str:
        """The absolute path or the URI, without a slash at the end and without credentials."""
        return self._address.root

    @property
    def roots(self) -> tuple[str, ...]:
        """Every root that files are read from: this one (`lake.storage.joined_objects` has several)."""
        return (self.root,)

    @property
    def options(self) -> dict[str, str]:
        """The storage options that were given, secrets included: never print them."""
        return self._options

    @property
    def folder(self) -> Path | None:
        """The local folder; None in an object store."""
        return self._address.folder

    @property
    def delta_options(self) -> dict[str, str]:
        """Storage options for delta-rs; empty for a local folder."""
        return self._bucket.delta_options if self._bucket else {}

    @property
    def polars_options(self) -> dict[str, Any]:
        """Storage options for Polars; empty for a local folder."""
        return self._bucket.polars_options if self._bucket else {}

    @property
    def reached_by(self) -> builtins.list[tuple[str, str]]:
        """All that says where the objects are and who asks for them: options, and what the environment has of them."""
        environment = {name: value for name, value in os.environ.items() if name.upper().startswith(_FAMILIES)}
        return [*environment.items(), *self._options.items()]

    def uri(self, path: str) -> str:
        """Full address of an object: an absolute path, or scheme://bucket/key."""
        return f"{self.root}/{path}" if path else self.root

    def list(self, prefix: str = "", *, staging: bool = False) -> list[Found]:
        """Objects under a folder, by path; none if the folder is missing.

        Args:
            staging: also what writers that were killed left half-written beside their target; only a local folder
                can have such files.
        """
        prefix = prefix.rstrip("/")
        with self._explaining():
            found = [Found(*entry) for entry in self._floor.list(prefix, staging=staging)]
        return sorted(found, key=lambda entry: entry.path)

    def names(self) -> set[str]:
        """What lies right under the root: names of objects and of folders."""
        with self._explaining():
            return self._floor.names()

    def get(self, path: str) -> bytes | None:
        """An object's bytes; None if there is none."""
        with self._explaining():
            return self._floor.get(path)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        with self._explaining():
            return self._floor.exists(path)

    def create(self, path: str, data: bytes) -> bool:
        """Write an object if there is none, atomically; False if it exists. Of several that race, one succeeds."""
        with self._explaining():
            return self._floor.create(path, data)

    def put(self, path: str, data: bytes) -> None:
        """Write an object, atomically, over another one if need be."""
        with self._explaining():
            self._floor.put(path, data)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""
        with self._explaining():
            self._floor.delete(paths)

    def filesystem(self, sizes: Mapping[str, int]) -> "BucketFiles | None":
        """The fsspec file system through which DuckDB (`register_filesystem`) and pyarrow read a bucket's files.

        Args:
            sizes: URI -> bytes of the files that may be read, as the Delta log tells; looked up at each use, so it may
                grow after the call.

        Returns:
            None for a local folder, which needs none.
        """
        if (bucket := self._bucket) is None:
            return None
        from lake.storage.bucket_files import BucketFiles

        def read(uri: str, start: int, end: int) -> bytes:
            with self._explaining():
                return bucket.read(uri.removeprefix(f"{self.root}/"), start, end)

        return BucketFiles(self._address.scheme, sizes, read)

    def redacted(self, text: str) -> str:
        """A text with every secret of the options and of the environment replaced by ***."""
        values = {value for name, value in self.reached_by if _SECRET.search(name) and not _PLACE.search(name)}
        secrets = {value for value in values if len(value) >= _SHORTEST_SECRET}
        # As they are and as a URL spells them, the longest first.
        for secret in sorted(secrets | {quote(value, safe="") for value in secrets}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def explained(self, error: BaseException) -> TrajlakeError:
        """What to raise for a failure of storage, whichever engine met it: one line, what to do, no secrets.

        Raise it `from None`: the traceback of a cause prints the cause's text, secrets and all.
        """
        known = explained(error, self._address)
        return type(known)(self.redacted(str(known)))

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except TrajlakeError:
            raise
        except self._failures as error:
            raise self.explained(error) from None
