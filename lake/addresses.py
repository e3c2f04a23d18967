"""Where a lake lies: a local folder or a prefix of a bucket, taken apart and checked once.

Credentials never belong in an address: it is stored in jobs and pins, printed and logged.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from lake.errors import UsageError

SCHEMES = ("s3", "gs", "az", "abfss")
"""Object stores that can hold a lake; anything without a scheme is a local folder."""

_VALID = (
    "a lake lies in a local folder or under s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"
)
_UNSTORABLE = re.compile(r"[\[\]|^\\\x00-\x1f\x7f\ud800-\udfff]|%[0-9a-fA-F]{2}")
"""What delta-rs cannot have in a folder's path: it reads the path as a URL."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")
_SEGMENT = re.compile(r"[A-Za-z0-9._=+~-]+")
"""What every engine and store spells alike in a key: nothing that one of them percent-encodes."""


@dataclass(frozen=True, slots=True)
class Address:
    """A checked place for a lake.

    Attributes:
        root: how it is written: an absolute path, or scheme://bucket/prefix without a slash at the end.
        scheme: one of `SCHEMES`; empty for a local folder.
        bucket: bucket or container; empty for a local folder.
        prefix: the key that all objects lie under, without slashes around it; may be empty.
        account: the Azure storage account, where the address names one.
    """

    root: str
    scheme: str = ""
    bucket: str = ""
    prefix: str = ""
    account: str = ""

    @property
    def folder(self) -> Path | None:
        """The local folder; None in an object store."""
        return None if self.scheme else Path(self.root)


def parse(uri: str | Path) -> Address:
    """Take an address apart.

    Args:
        uri: a path, relative to the working directory or absolute, or the URI of an object store.

    Raises:
        UsageError: an unknown scheme, no bucket, credentials, or characters that Delta tables cannot lie under.
    """
    text = str(uri)
    scheme, found, rest = text.partition("://")
    if found:
        return _remote(scheme, rest)
    # Path() folds `s3://` into `s3:/`, which would name a local folder nobody meant.
    if isinstance(uri, Path) and uri.parts and uri.parts[0].rstrip(":") in SCHEMES and uri.parts[0].endswith(":"):
        msg = f"{text!r} was a URI before it became a Path; hand it over as text"
        raise UsageError(msg)
    return Address(str(_folder(text)))


def _folder(text: str) -> Path:
    if not text.strip():
        msg = "the lake's path is empty; give --lake FOLDER"
        raise UsageError(msg)
    try:
        path = Path(text).expanduser().resolve()
    except (RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a NUL
        msg = f"{text!r} is no usable path: {error}; choose another --lake"
        raise UsageError(msg) from error
    if found := _UNSTORABLE.search(str(path)):
        msg = f"{str(path)!r}: Delta tables cannot lie under a name with {found[0]!r}; choose another --lake"
        raise UsageError(msg)
    return path


def _remote(scheme: str, rest: str) -> Address:
    place, _, prefix = rest.partition("/")
    account = ""
    # Looked at before anything is quoted: what stands before @ or after ? may be a secret.
    if "?" in rest or "#" in rest:
        msg = f"an address of a lake has no query and no fragment (? and #); {_VALID}"
        raise UsageError(msg)
    if scheme == "abfss":
        place, _, account = place.partition("@")
    if "@" in place + account or ":" in place + account:
        msg = (
            "an address of a lake holds no credentials and no port: put them into storage options or into the "
            f"environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, ...); {_VALID}"
        )
        raise UsageError(msg)
    if scheme not in SCHEMES:
        msg = f"`{scheme}://` is no place for a lake; {_VALID}"
        raise UsageError(msg)
    if not place:
        msg = f"`{scheme}://` names no bucket; {_VALID}"
        raise UsageError(msg)
    if not _BUCKET.fullmatch(place):
        msg = f"{place!r} is no name of a bucket: letters, digits, `-`, `.` and `_` are; {_VALID}"
        raise UsageError(msg)
    if scheme == "abfss" and not _HOST.fullmatch(account):
        msg = f"`abfss://{place}` names no account; {_VALID}"
        raise UsageError(msg)
    prefix = prefix.rstrip("/")
    for segment in prefix.split("/") if prefix else ():
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            msg = (
                f"{segment!r} cannot be a part of a lake's address: letters, digits and any of - _ . = + ~ can, "
                "parts are separated by one slash, and none is `.` or `..`"
            )
            raise UsageError(msg)
    host = f"{place}@{account}" if account else place
    root = f"{scheme}://{host}/{prefix}".rstrip("/")
    return Address(root, scheme, place, prefix, account.partition(".")[0])
