"""One HTTP request of a judge: which faults are worth another try, and no key in any message.

The standard library's client, with redirects refused: it would carry the key to wherever it is sent.
"""

from typing import Any

STATUSES_TO_REPEAT = frozenset((408, 409, 425, 429))
"""Beside all of 500 and above."""
_LARGEST = 8 << 20
_SHOWN = 300


class JudgeError(RuntimeError):
    """A judge gave no answer; asking again at once would not help."""


class BusyError(JudgeError):
    """A judge gave no answer this time.

    Args:
        reason: why.
        after: seconds the server asks to wait.
    """

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


def post(url: str, body: bytes, key: str | None, timeout: float) -> bytes:
    """Body of the answer to a POST of JSON.

    Args:
        url: where.
        body: the JSON.
        key: sent as a bearer token.
        timeout: seconds without a sign of the server.

    Raises:
        BusyError: a timeout, a lost connection, or a status that may pass.
        JudgeError: any other status.
    """
    # urllib takes 40 ms to import, and most workers never ask.
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "trajlake"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data=body, headers=headers, method="POST")
    try:
        with _opener().open(request, timeout=timeout) as response:
            data: bytes = response.read(_LARGEST + 1)
    except HTTPError as error:
        with error:
            raise _refused(error.code, error.read(4096), error.headers, key) from None
    except (TimeoutError, URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        told = "no answer in time" if isinstance(reason, TimeoutError) else f"{type(error).__name__}: {reason}"
        raise BusyError(redacted(told, key)) from None
    if len(data) > _LARGEST:
        msg = f"{url} answered with more than {_LARGEST >> 20} MB"
        raise JudgeError(msg)
    return data


def redacted(text: str, key: str | None) -> str:
    """A text without the key: servers like to quote it."""
    return text.replace(key, "***") if key else text


def _refused(status: int, body: bytes, headers: Any, key: str | None) -> JudgeError:
    said = redacted(" ".join(body.decode("utf-8", "replace").split()), key)[:_SHOWN]
    told = f"HTTP {status}" + (f": {said}" if said else "")
    if status in STATUSES_TO_REPEAT or status >= 500:
        return BusyError(told, _seconds(headers.get("Retry-After")))
    if 300 <= status < 400:
        return JudgeError(f"{told} (redirects are not followed: give the judge its final address)")
    return JudgeError(told)


def _seconds(text: str | None) -> float | None:
    """Retry-After as seconds; a date is not worth parsing."""
    try:
        return max(float(text), 0.0) if text else None
    except ValueError:
        return None


def _opener() -> Any:
    from urllib.request import HTTPRedirectHandler, build_opener

    class _Stays(HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            """No redirect: the answer's status stands."""

    return build_opener(_Stays)
