"""Objects in a bucket: S3, Google Cloud Storage or Azure, through obstore.

obstore, delta-rs and Polars are three bindings of one library (object_store), so one set of option names serves all
of them. Options that are not given come from the environment (AWS_*, GOOGLE_*, AZURE_*).

Put-if-absent is the store's conditional put. A put whose answer was lost may have happened: every put carries a
random mark in the object's metadata, and a put that is refused or fails looks whether the object bears its own mark.
"""

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from lake.errors import UsageError
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
"""What obstore raises when a store fails."""
_TIMEOUTS = {"connect_timeout": "3s", "read_timeout": "10s"}


class Bucket:
    """The objects under a prefix of a bucket. Raises UsageError: an option that the store does not know."""

    def __init__(self, address: Address, options: Mapping[str, str]) -> None:
        self._address, self._options = address, options
        self._store = _open(address, options)

    @property
    def polars_options(self) -> dict[str, Any]:
        """The options as Polars takes them.

        S3 credentials of the environment are spelled out: left to itself Polars looks for them with boto3 first.
        """
        found = _environment("aws_", _S3) if self._address.scheme == "s3" else {}
        limits = {**_TIMEOUTS, "max_retries": _MAX_RETRIES}
        return {**limits, "retry_timeout_ms": _RETRY_SECONDS * 1000, **found, **self._options}

    @property
    def delta_options(self) -> dict[str, str]:
        """The options as delta-rs takes them."""
        limits = {**_TIMEOUTS, "max_retries": str(_MAX_RETRIES)}
        return {**limits, "retry_timeout": f"{_RETRY_SECONDS}s", **self._options}

    def list(self, prefix: str, *, staging: bool) -> Iterator[tuple[str, int, datetime]]:
        """Path, bytes and time of every object under a folder; a bucket shows no half-written ones."""
        del staging
        for chunk in obstore.list(self._store, prefix or None):
            for found in chunk:
                yield found["path"], found["size"], found["last_modified"]

    def names(self) -> set[str]:
        """Names right under the prefix."""
        found = obstore.list_with_delimiter(self._store)
        return {*found["common_prefixes"], *(entry["path"] for entry in found["objects"])}

    def get(self, path: str) -> bytes | None:
        """An object's bytes; None if there is none."""
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            return None

    def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes `start` up to, without, `end` of an object that is there."""
        return obstore.get_range(self._store, path, start=start, end=end).to_bytes()

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            obstore.head(self._store, path)
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            # The answer to a look at one object does not tell of a missing bucket; a listing raises.
            next(iter(obstore.list(self._store, "-")), None)
            return False
        return True

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist; False if it does."""
        mark = secrets.token_hex(16)
        try:
            obstore.put(self._store, path, data, attributes={_MARK: mark}, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return self._bears(path, mark)
        except BaseError:
            if self._bears(path, mark):
                return True
            raise
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write an object, over another one if need be."""
        obstore.put(self._store, path, data, mode="overwrite")

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""
        if not paths:
            return
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            if len(paths) > 1:  # Google and Azure stop at the first that is missing
                for path in paths:
                    self.delete([path])

    def _bears(self, path: str, mark: str) -> bool:
        """Whether the object is the one that was put with this mark."""
        try:
            return obstore.get(self._store, path, options={"head": True}).attributes.get(_MARK) == mark
        except FileNotFoundError:
            return False


def _is_missing_bucket(error: BaseException) -> bool:
    """Whether a store says that the bucket, not the object, is missing."""
    return any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not"))


def _open(address: Address, options: Mapping[str, str]) -> S3Store | GCSStore | AzureStore:
    """A store with the options as obstore takes them: its own, those of its HTTP client, and how often to try."""
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore, "abfss": AzureStore}
    family = _PREFIXES[address.scheme]
    config = {"account_name": address.account} if address.account else {}
    # Client options that are handed over replace those that obstore would read from the environment.
    client = {**_TIMEOUTS, **_environment(family, _CLIENT, prefixed=False)}
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


def _environment(family: str, names: Iterable[str], *, prefixed: bool = True) -> dict[str, str]:
    """Options that the environment gives."""
    found = {name: os.environ.get(f"{family}{name}".upper()) for name in names}
    return {f"{family}{name}" if prefixed else name: value for name, value in found.items() if value}
