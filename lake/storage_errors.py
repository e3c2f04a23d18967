"""What storage says when it fails, said again in one line that a user can act on.

obstore, delta-rs and Polars wrap the same texts of object_store in classes of their own, so what happened is read
from the text.
"""

import errno
import re

from lake.addresses import Address
from lake.errors import LakeAccessError, LakeVersionError, NotALakeError, TrajlakeError

_LONGEST = 300
_NEWER_DELTA = "minimum reader version"
_DOCTOR = "`trajlake doctor` tells what is damaged"
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
"""Where a machine in a cloud is asked for its credentials, when no others are known."""

_MARKS = re.compile(r"\x1b\[[0-9;]*m|\u21b3")
_BACKTRACE = re.compile(r"\s0: (<unknown>|[\w:]+::\w).*", re.DOTALL)
_ELEMENT = re.compile(r"<\?xml.*", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>")


def explained(error: BaseException, address: Address) -> TrajlakeError:
    """The error a user gets for a failure of storage; its text may still hold secrets (`Objects.redacted`)."""
    if _NEWER_DELTA in str(error):
        msg = f"{address.root}: a newer Delta Lake wrote it ({_one_line(str(error))}); pip install --upgrade trajlake"
        return LakeVersionError(msg)
    return _remote(str(error), address) if address.scheme else _local(error, address)


def _disk_advice(error: BaseException, text: str) -> str | None:
    """What to do about a local disk that is full or refuses; None if that is not what happened."""
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(words in text for words in _NO_ROOM):
        return f"the disk is full; what was being written is not visible. Free space and run it again. ({text})"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS) or any(words in text for words in _REFUSALS):
        return f"{_NO_PERMISSION}. ({text})"
    return None


def _one_line(text: str) -> str:
    """A text of object_store without its colours, its XML and its debugging half."""
    text = _BACKTRACE.sub("", _MARKS.sub(" ", text.partition("\n\nDebug source")[0]))
    code = _CODE.search(text)
    text = " ".join(_ELEMENT.sub(code[1] if code else "", text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _local(error: BaseException, address: Address) -> TrajlakeError:
    text = _one_line(str(error))
    return LakeAccessError(f"{address.root}: {_disk_advice(error, text) or f'{text}. {_DOCTOR}'}")


def _remote(text: str, address: Address) -> TrajlakeError:
    line = _one_line(text)
    names = _CREDENTIALS[address.scheme]

    def says(*words: str) -> bool:
        return any(word in text for word in words)

    if says("NoSuchBucket", "ContainerNotFound", "The specified bucket does not"):
        kind = "container" if address.scheme in ("az", "abfss") else "bucket"
        msg = f"{address.root}: there is no {kind} `{address.bucket}`; correct its name or make it first. ({line})"
        return NotALakeError(msg)
    without = f"{address.root}: no usable credentials; set {names}, or give them as storage options. ({line})"
    if says(*_METADATA):
        msg = without
    elif says("403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        msg = f"{address.root}: access denied; check {names} and the rights of that account. ({line})"
    elif says("credential", "Credential", "Invalid Access Key", "Account must be specified"):
        msg = without
    elif says("builder error"):
        msg = f"{address.root}: the endpoint is plain http; set {_ALLOW[address.scheme]}=true to allow it. ({line})"
    elif says("error sending request", "timed out", "dns error", "Connect"):
        msg = f"{address.root}: cannot be reached; check the network and the endpoint that is set. ({line})"
    elif says("301 Moved", "PermanentRedirect", "AuthorizationHeaderMalformed", "redirect"):
        msg = f"{address.root}: the bucket lies in another region; set AWS_REGION to it. ({line})"
    else:
        msg = f"{address.root}: {line}. {_DOCTOR}"
    return LakeAccessError(msg)


def with_engine_errors(*errors: type[Exception]) -> tuple[type[Exception], ...]:
    """Errors, and those of Polars and Arrow; a function, so that whoever reads only the log loads neither."""
    import polars as pl
    import pyarrow as pa

    return (*errors, pl.exceptions.PolarsError, pa.ArrowException)
