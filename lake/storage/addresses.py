"""The address of a lake (a local folder or a prefix of a bucket), and storage failures as one line with advice.

An address never contains credentials, because addresses are stored in jobs and pins, printed and logged. obstore,
delta-rs and Polars wrap the same texts of object_store in different classes, so errors are recognised by their text.
"""

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from lake.errors import LakeAccessError, LakeVersionError, NotALakeError, TrajlakeError, UsageError

SCHEMES = ("s3", "gs", "az", "abfss")
"""Object stores that can hold a lake; an address without a scheme is a local folder."""
_VALID_ADDRESSES = (
    "a lake lies in a local folder or under s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"
)
_UNUSABLE = re.compile(r"[\[\]|^\\\x00-\x1f\x7f\ud800-\udfff]|%[0-9a-fA-F]{2}")
"""Characters that delta-rs cannot handle in a folder's path, which it reads as a URL."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")
_SEGMENT = re.compile(r"[A-Za-z0-9._=+~-]+")
"""Characters of a key that every engine and store writes alike, without percent-encoding."""


@dataclass(frozen=True, slots=True)
class Address:
    """A checked address of a lake; all fields except the root are empty for a local folder."""

    root: str
    """An absolute path, or scheme://bucket/prefix without a slash at the end."""
    scheme: str = ""
    """One of `SCHEMES`."""
    bucket: str = ""
    prefix: str = ""
    """Key prefix of all objects, without slashes around it; may be empty."""
    account: str = ""
    """The Azure storage account, if the address names one."""

    @property
    def folder(self) -> Path | None:
        """The local folder; None in an object store."""
        return None if self.scheme else Path(self.root)


def parse_address(uri: str | Path) -> Address:
    """Parse an address.

    Args:
        uri: a path, relative to the working directory or absolute, or the URI of an object store.

    Raises:
        UsageError: an unknown scheme, no bucket, credentials, or characters that Delta cannot handle in a path.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if separator:
        return _parse_uri(scheme, rest)
    # Path() turns `s3://` into `s3:/`, the name of a local folder.
    if isinstance(uri, Path) and uri.parts and uri.parts[0].rstrip(":") in SCHEMES and uri.parts[0].endswith(":"):
        raise UsageError(f"{text!r} was a URI before it became a Path; hand it over as text")
    if not text.strip():
        raise UsageError("the lake's path is empty; give --lake FOLDER")
    try:
        path = Path(text).expanduser().resolve()
    except (RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a NUL
        raise UsageError(f"{text!r} is not a usable path: {error}; choose another --lake") from error
    if match := _UNUSABLE.search(str(path)):
        msg = f"{str(path)!r}: Delta tables cannot lie under a name with {match[0]!r}; choose another --lake"
        raise UsageError(msg)
    return Address(str(path))


def _parse_uri(scheme: str, rest: str) -> Address:
    bucket, _, prefix = rest.partition("/")
    account = ""
    # These checks come before any message quotes the address: text before @ or after ? may be a secret.
    if "?" in rest or "#" in rest:
        raise UsageError(f"an address of a lake has no query and no fragment (? and #); {_VALID_ADDRESSES}")
    if scheme == "abfss":
        bucket, _, account = bucket.partition("@")
    if "@" in bucket + account or ":" in bucket + account:
        raise UsageError(
            "an address of a lake holds no credentials and no port: put them into storage options or into the "
            f"environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, ...); {_VALID_ADDRESSES}"
        )
    if scheme not in SCHEMES:
        raise UsageError(f"`{scheme}://` cannot hold a lake; {_VALID_ADDRESSES}")
    if not bucket:
        raise UsageError(f"`{scheme}://` names no bucket; {_VALID_ADDRESSES}")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{bucket!r} is not a bucket name: it has only letters, digits, `-`, `.` and `_`; {_VALID_ADDRESSES}"
        )
    if scheme == "abfss" and not _HOST.fullmatch(account):
        raise UsageError(f"`abfss://{bucket}` names no account; {_VALID_ADDRESSES}")
    prefix = prefix.rstrip("/")
    for segment in prefix.split("/") if prefix else ():
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise UsageError(
                f"{segment!r} cannot be a part of a lake's address: letters, digits and any of - _ . = + ~ can, "
                "parts are separated by one slash, and none is `.` or `..`"
            )
    host = f"{bucket}@{account}" if account else bucket
    root = f"{scheme}://{host}/{prefix}".rstrip("/")
    return Address(root, scheme, bucket, prefix, account.partition(".")[0])


_LONGEST = 300
_NEWER_DELTA = "minimum reader version"
_DOCTOR = "`trajlake doctor` lists what is damaged"
_NO_PERMISSION = "no permission to write here; choose another --lake or change the folder's permissions"
_NO_ROOM = ("No space left", "quota exceeded", "File too large")
_REFUSALS = ("Permission denied", "Operation not permitted", "Read-only")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "abfss": "AZURE_STORAGE_ACCOUNT_KEY",
}
_ALLOW = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP", "abfss": "AZURE_ALLOW_HTTP"}
_METADATA = ("169.254.169.254", "/latest/api/token", "/latest/meta-data", "/metadata/identity", "metadata.google")
"""Addresses at which cloud machines ask for credentials if they have no others."""
_MARKS = re.compile(r"\x1b\[[0-9;]*m|\u21b3")
_BACKTRACE = re.compile(r"\s0: (<unknown>|[\w:]+::\w).*", re.DOTALL)
_ELEMENT = re.compile(r"<\?xml.*", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>")


def explain_failure(error: BaseException, address: Address) -> TrajlakeError:
    """Return the user's error for a storage failure; its text may still hold secrets (`Objects.redacted`)."""
    if _NEWER_DELTA in str(error):
        msg = f"{address.root}: a newer Delta Lake wrote it ({_clean_text(str(error))}); pip install --upgrade trajlake"
        return LakeVersionError(msg)
    if address.scheme:
        return _bucket_error(str(error), address)
    text, code = _clean_text(str(error)), getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(words in text for words in _NO_ROOM):
        advice = f"the disk is full; what was being written is not visible. Free space and run it again. ({text})"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS) or any(words in text for words in _REFUSALS):
        advice = f"{_NO_PERMISSION}. ({text})"
    else:
        advice = f"{text}. {_DOCTOR}"
    return LakeAccessError(f"{address.root}: {advice}")


def _clean_text(text: str) -> str:
    """Return a text of object_store without colours, XML and debugging details."""
    text = _BACKTRACE.sub("", _MARKS.sub(" ", text.partition("\n\nDebug source")[0]))
    code = _CODE.search(text)
    text = " ".join(_ELEMENT.sub(code[1] if code else "", text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _bucket_error(text: str, address: Address) -> TrajlakeError:
    line = _clean_text(text)
    names = _CREDENTIALS[address.scheme]

    def has(*words: str) -> bool:
        return any(word in text for word in words)

    if has("NoSuchBucket", "ContainerNotFound", "The specified bucket does not"):
        kind = "container" if address.scheme in ("az", "abfss") else "bucket"
        msg = f"{address.root}: there is no {kind} `{address.bucket}`; correct its name or make it first. ({line})"
        return NotALakeError(msg)
    without = f"{address.root}: no usable credentials; set {names}, or give them as storage options. ({line})"
    if has(*_METADATA):
        msg = without
    elif has("403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        msg = f"{address.root}: access denied; check {names} and the rights of that account. ({line})"
    elif has("credential", "Credential", "Invalid Access Key", "Account must be specified"):
        msg = without
    elif has("builder error"):
        msg = f"{address.root}: the endpoint is plain http; set {_ALLOW[address.scheme]}=true to allow it. ({line})"
    elif has("error sending request", "timed out", "dns error", "Connect"):
        msg = f"{address.root}: cannot be reached; check the network and the endpoint that is set. ({line})"
    elif has("301 Moved", "PermanentRedirect", "AuthorizationHeaderMalformed", "redirect"):
        msg = f"{address.root}: the bucket lies in another region; set AWS_REGION to it. ({line})"
    else:
        msg = f"{address.root}: {line}. {_DOCTOR}"
    return LakeAccessError(msg)


def engine_errors(*errors: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors with those of Polars and Arrow, which are imported only if a caller needs them."""
    import polars as pl
    import pyarrow as pa

    return (*errors, pl.exceptions.PolarsError, pa.ArrowException)
