"""Objects in a bucket: S3, Google Cloud Storage or Azure, through obstore; and its files for DuckDB and pyarrow.

obstore, delta-rs and Polars are bindings of one library (object_store), so they share option names. Missing options
come from the environment (AWS_*, GOOGLE_*, AZURE_*).

Put-if-absent is the store's conditional put. A put whose answer was lost may have succeeded. So every put stores a
random mark in the object's metadata, and a put that is refused or fails checks whether the object has its mark.

DuckDB reads s3:// with an extension that must be downloaded; through an fsspec file system it needs none. obstore's own
file system (`obstore.fsspec`) returns short reads, which DuckDB takes for damaged files, and requests every size again.
`BucketFiles` reads exact ranges of the files of a snapshot, whose sizes are in the Delta log. It refuses all other
files and writes (docs/decisions/0009).
"""

import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from fsspec import AbstractFileSystem
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from lake.errors import TrajlakeError, UsageError
from lake.storage.addresses import Address

_MARK = "trajlakewrite"
_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
_S3 = (
    "access_key_id",
    "secret_access_key",
    "session_token",
    "region",
    "default_region",
    "endpoint_url",
    "endpoint_url_s3",
    "allow_http",
)
_PREFIXES = {"s3": "aws_", "gs": "google_", "az": "azure_", "abfss": "azure_"}
_MAX_RETRIES = 5
_RETRY_SECONDS = 15
FAILURES = (BaseError, OSError, ValueError)
"""Errors that obstore raises when a store fails."""
_TIMEOUTS = {"connect_timeout": "3s", "read_timeout": "10s"}


class Bucket:
    """The objects under a prefix of a bucket. Raises UsageError: an option that the store does not know."""

    def __init__(self, address: Address, options: Mapping[str, str]) -> None:
        self._address, self._options = address, options
        self._store = _open_store(address, options)

    @property
    def polars_options(self) -> dict[str, Any]:
        """Return the options for Polars.

        They include S3 credentials from the environment, because Polars would look for them with boto3 first.
        """
        environment = _read_environment("aws_", _S3) if self._address.scheme == "s3" else {}
        limits = {**_TIMEOUTS, "max_retries": _MAX_RETRIES}
        return {**limits, "retry_timeout_ms": _RETRY_SECONDS * 1000, **environment, **self._options}

    @property
    def delta_options(self) -> dict[str, str]:
        """Return the options for delta-rs."""
        limits = {**_TIMEOUTS, "max_retries": str(_MAX_RETRIES)}
        return {**limits, "retry_timeout": f"{_RETRY_SECONDS}s", **self._options}

    def list(self, prefix: str, *, staging: bool) -> Iterator[tuple[str, int, datetime]]:
        """Yield path, bytes and time of every object under a folder; a bucket lists no partial objects."""
        del staging
        for chunk in obstore.list(self._store, prefix or None):
            for entry in chunk:
                yield entry["path"], entry["size"], entry["last_modified"]

    def names(self) -> set[str]:
        """Return the names directly under the prefix."""
        listing = obstore.list_with_delimiter(self._store)
        return {*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])}

    def get(self, path: str) -> bytes | None:
        """Return an object's bytes; None if it does not exist."""
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            return None

    def read(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end` of an existing object."""
        return obstore.get_range(self._store, path, start=start, end=end).to_bytes()

    def exists(self, path: str) -> bool:
        """Return whether an object exists."""
        try:
            obstore.head(self._store, path)
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            # A head request does not reveal a missing bucket; a listing raises an error.
            next(iter(obstore.list(self._store, "-")), None)
            return False
        return True

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist; False if it does."""
        mark = secrets.token_hex(16)
        try:
            obstore.put(self._store, path, data, attributes={_MARK: mark}, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return self._has_mark(path, mark)
        except BaseError:
            if self._has_mark(path, mark):
                return True
            raise
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write an object, replacing an existing one."""
        obstore.put(self._store, path, data, mode="overwrite")

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are not an error."""
        if not paths:
            return
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            if len(paths) > 1:  # Google and Azure stop at the first missing object
                for path in paths:
                    self.delete([path])

    def _has_mark(self, path: str, mark: str) -> bool:
        """Return whether the object is the one that was put with this mark."""
        try:
            return obstore.get(self._store, path, options={"head": True}).attributes.get(_MARK) == mark
        except FileNotFoundError:
            return False


def _is_missing_bucket(error: BaseException) -> bool:
    """Return whether a store reports that the bucket is missing, not the object."""
    return any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not"))


def _open_store(address: Address, options: Mapping[str, str]) -> S3Store | GCSStore | AzureStore:
    """Open a store with the options in obstore's form: its options, those of its HTTP client, and retries."""
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore, "abfss": AzureStore}
    family = _PREFIXES[address.scheme]
    config = {"account_name": address.account} if address.account else {}
    # Client options given here replace those that obstore would read from the environment.
    client = {**_TIMEOUTS, **_read_environment(family, _CLIENT, prefixed=False)}
    for name, value in options.items():
        plain = name.removeprefix(family)
        if plain in _CLIENT:
            client[plain] = value
        else:
            config[name] = value
    retry = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    arguments = {"config": config, "client_options": client, "retry_config": retry}
    try:
        store: S3Store | GCSStore | AzureStore = kinds[address.scheme](
            address.bucket, prefix=address.prefix or None, **arguments
        )
    except UnknownConfigurationKeyError as error:
        unknown = str(error).partition("\n")[0]
        msg = f"{address.root}: {unknown} Storage options are those of delta-rs, for example aws_endpoint_url"
        raise UsageError(msg) from error
    return store


def _read_environment(family: str, names: Iterable[str], *, prefixed: bool = True) -> dict[str, str]:
    """Return the options that the environment sets."""
    values = {name: os.environ.get(f"{family}{name}".upper()) for name in names}
    return {f"{family}{name}" if prefixed else name: value for name, value in values.items() if value}


ReadRange = Callable[[str, int, int], bytes]
"""Reads bytes of a file: its URI, the first byte, and the last byte plus one."""

_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
"""A data file never changes, so caches of its bytes never expire."""


class BucketFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files of a snapshot, read only. `sizes`: URI -> bytes of every readable file; entries may be added."""

    cachable = False

    def __init__(self, protocol: str, sizes: Mapping[str, int], read: ReadRange) -> None:
        super().__init__()
        self.protocol = protocol
        self.failure: TrajlakeError | None = None
        """Cause of the last failed read; DuckDB reports only a traceback as text."""
        self._sizes = sizes
        self.read = read

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def unstrip_protocol(self, name: str) -> str:
        """Return the URI itself."""
        return name

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return size and type of a file. Raises FileNotFoundError: the snapshot has no such file."""
        size = self._sizes.get(path)
        if size is None:
            raise FileNotFoundError(f"{path} is not a file of this snapshot")
        return {"name": path, "size": size, "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the file itself; there are no folders."""
        entry = self.info(path)
        return [entry] if detail else [path]

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return the file itself if the snapshot has it."""
        return [path] if path in self._sizes else []

    def modified(self, path: str) -> datetime:
        """Return one constant time for every file."""
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
    """One file; every read sends one request for exactly its range."""

    def __init__(self, uri: str, size: int, read: ReadRange) -> None:
        self._uri = uri
        self._size = size
        self._range = read
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, fewer only at the end of the file; without a size, the rest of the file."""
        rest = max(0, self._size - self._position)
        length = rest if size is None or size < 0 else min(size, rest)
        if not length:
            return b""
        data = self._range(self._uri, self._position, self._position + length)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """Read the rest of the file."""
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
