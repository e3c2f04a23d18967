"""Talking to an engine over HTTP: JSON in, JSON out, and every way in which that fails as one of the engine errors.

One try each; `pool.py` owns retries. A call that is cancelled closes its connection, on which engines abort what they
were sampling.
"""

import math
import os
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from lake.errors import MissingExtraError, UsageError
from lake.formats.base.secrets import REDACTED, redacted
from lake.read.text_table import cell
from pipelines.collect.engines import (
    EngineAnswerError,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineRefusedError,
)

try:
    import aiohttp
except ImportError as _error:
    raise MissingExtraError('engines need the package aiohttp: pip install "trajlake[record]"') from _error

from lake.live.proxy.outages import unreached
from lake.live.proxy.upstream import base_of

OPTION = "--engine"
"""Where commands take the address of an engine."""
_MOST_BYTES = 1 << 28
_MOST_SHOWN = 300
_MESSAGES = ("message", "error_message", "detail")
_CONNECT_SECONDS = 30.0


class Http:
    """A client of one engine; it belongs to the event loop in which it is first used.

    Args:
        url: base URL, with or without /v1 at the end.
        timeout: seconds that an answer may take.
        key: sent as a bearer token; it is in no message.

    Raises:
        UsageError: the URL is none.
    """

    def __init__(self, url: str, *, timeout: float, key: str | None = None) -> None:
        self.base, self._headers = reached(url, key)
        self._secrets = _secrets_of(self._headers)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client, made when it is first used. It does not bound how many connections there are; a pool does."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout, connect=_CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=timeout)
        return self._session

    async def get(self, path: str) -> Any:
        """What the engine says at a path. Raises EngineError; see `post`."""
        return await self._asked("GET", path, None)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers to a body; None if that is nothing, a text if it is no JSON.

        Raises:
            EngineGoneError: it was not reached, or broke off, or took too long.
            EngineBusyError: 429 or 503.
            EngineFailedError: another status from 500 on.
            EngineRefusedError: another status from 300 on.
            EngineAnswerError: an answer that is too long.
        """
        return await self._asked("POST", path, body or {})

    async def status(self, path: str) -> int:
        """HTTP status of GET. Raises EngineGoneError."""
        status, _, _ = await self._sent("GET", path, None)
        return status

    async def is_healthy(self) -> bool:
        """Whether /health says so, as engines have it."""
        try:
            return await self.status("/health") == 200
        except EngineGoneError:
            return False

    async def close(self) -> None:
        """Let go of connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        status, headers, data = await self._sent(method, path, body)
        if status >= 300:
            raise self._refusal(status, headers, f"{method} {path}", data)
        try:
            return msgspec.json.decode(data) if data else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return data.decode(errors="replace")

    async def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        try:
            try:
                return await self._once(method, path, data)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # Connections that were kept may be closed when they are used again: vLLM closes idle ones after 5 s,
                # and any behind an error. Without this a /resume after a failed load would be lost.
                if self._session is None or isinstance(error, aiohttp.ClientConnectorError):
                    raise  # it was closed on this side, or nobody was reached
                return await self._once(method, path, data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineGoneError(self._why(error, path)) from error

    async def _once(self, method: str, path: str, data: bytes | None) -> tuple[int, Any, bytes]:
        headers = {"Content-Type": "application/json"} if data is not None else {}
        async with self.session.request(
            method, self.base + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            gathered = bytearray()
            async for piece in response.content.iter_any():
                gathered += piece
                if len(gathered) > _MOST_BYTES:
                    raise EngineAnswerError(
                        f"{self.base}{path} answers more than {_MOST_BYTES >> 20} MB; is {OPTION} an engine?"
                    )
            return response.status, response.headers, bytes(gathered)

    def _why(self, error: Exception, path: str) -> str:
        if (problem := unreached(error, self.base, OPTION)) is not None:
            return problem
        if isinstance(error, TimeoutError):
            return f"{self.base}{path} did not answer within {self._timeout:g} s; does the engine hang?"
        return f"{self.base}{path} broke off before its answer was whole; see the log of the engine"

    def _refusal(self, status: int, headers: Any, call: str, data: bytes) -> EngineError:
        said = _said(data)
        for secret in self._secrets:
            said = said.replace(secret, REDACTED)  # some endpoints quote the key that they refuse
        message = f"{call} at {self.base} answers {status}: {said}"
        if status in (429, 503):
            return EngineBusyError(message, seconds_of(headers.get("Retry-After")))
        if status >= 500:
            return EngineFailedError(message)
        return EngineRefusedError(message, status)


def reached(url: str, key: str | None = None) -> tuple[str, dict[str, str]]:
    """The address of an engine as requests and messages have it, and the header that says who asks.

    A user and password in the URL are in that header alone, so that no message, log or table can show them.

    Args:
        url: as it was given, with or without /v1 at the end.
        key: sent instead of the user.

    Raises:
        UsageError: the URL is none.
    """
    base, headers = base_of(url, OPTION)
    return base, headers if key is None else {"Authorization": f"Bearer {key}"}


def _secrets_of(headers: Mapping[str, str]) -> list[str]:
    """What must not be quoted of a header that says who asks: the key; or the password, plain and encoded."""
    kind, _, value = headers.get("Authorization", "").partition(" ")
    plain = b64decode(value).decode(errors="replace").partition(":")[2] if kind == "Basic" else ""
    return [secret for secret in (value, plain) if secret]


def seconds_of(retry_after: str | None) -> float | None:
    """What the header Retry-After asks for: seconds, or a date; None if it says neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            moment = parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def key_of(variable: str | None) -> str | None:
    """The key that an environment variable holds; None if no variable is named. Raises UsageError: it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(f"the environment variable {variable} is not set; it holds the key of the endpoint")
    return key


def shown(value: Any) -> str:
    """What an engine answered, for a message: on one line, shortened, without keys."""
    text = cell(redacted(value if isinstance(value, str) else repr(value)))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _said(data: bytes) -> str:
    """The message of an error, in whichever of the usual places it stands."""
    text = data.decode(errors="replace")
    try:
        said = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return shown(text) or "nothing"
    if isinstance(said, dict):
        inner = said.get("error")
        found = inner.get("message") if isinstance(inner, dict) else inner
        text = found or next((said[name] for name in _MESSAGES if said.get(name)), text)
    return shown(text) or "nothing"
