"""The engine or vendor behind the proxy: how it is reached, what it is, which weights it has."""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from lake.errors import UsageError
from lake.formats.base.secrets import redacted
from lake.live.calls.shapes import NO_JSON
from lake.live.proxy.asking import answers_tokens
from lake.live.proxy.engine import Engine, engine_of, owner_of
from lake.live.proxy.outages import Outages, unreached

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer")
) | {"transfer-encoding", "upgrade", "content-length"}
_NOT_SENT = frozenset(("host", "accept-encoding", "content-encoding", "expect"))
"""Bodies are unpacked when they are read."""
_OURS = "x-trajlake-"
_PROBE_SECONDS = 5.0
_PROBE_BYTES = 1 << 20
_KNOWN_SECONDS, _ABSENT_SECONDS = 600.0, 5.0
"""After how long an upstream that did not say what it is, or was not there, is asked again."""
_ENDPOINTS = ("chat/completions", "completions", "responses", "messages", "models", "embeddings")
"""What clients put behind a base URL."""
_LATELY_SECONDS = 0.01
"""For how long the version of the weights counts as that before a call; calls that end meanwhile ask for it anyway."""


class Upstream:
    """Where calls go on to.

    Args:
        url: its base URL, with or without /v1 at the end; a user and password in it are sent with calls that bring no
            `Authorization` of their own.
        timeout: seconds that it may be silent.
        session: the client; not closed here.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, timeout: float) -> None:
        self._base, self.headers = base_of(url)
        self.outages = Outages(self._base)
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, connect=30, sock_read=timeout)
        self._probe = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        self._name: str | None = None
        self._not_before = 0.0
        self._asking = asyncio.Lock()
        self.engine = Engine()
        """What it says of how it samples, once `name` was asked for."""
        self._has_versions = True
        self._version: str | None = None
        self._unreached: str | None = None
        """Why nobody answered the last small question."""
        self._told = 0.0
        """When it told its version."""
        self._checking: asyncio.Task[str | None] | None = None

    def request(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes | None) -> Any:
        """Send a request on, as an async context of its response; redirects are the client's affair."""
        sent = passed_on(headers.items(), without=_NOT_SENT)
        sent["Accept-Encoding"] = "identity"
        for name, value in self.headers.items():
            sent.setdefault(name, value)
        url = URL(f"{self._base}{path}{'?' if query else ''}{query}", encoded=True)
        return self._session.request(
            method,
            url,
            headers=sent,
            data=body,
            allow_redirects=False,
            timeout=self._timeout,
        )

    async def name(self) -> str | None:
        """The engine, and its version if it says it: `vllm 0.32.0`, `sglang`; None if it says neither."""
        if self._name is not None or time.monotonic() < self._not_before:
            return self._name
        async with self._asking:
            if self._name is None and time.monotonic() >= self._not_before:
                is_there, said = await self._get("/version")
                if isinstance(said, dict) and isinstance(said.get("version"), str):
                    self._version = await self._weights()
                    self._has_versions = self._version is not None
                    _, info = await self._get("/server_info?config_format=json")
                    self.engine = engine_of(info)
                    self._name = f"vllm {said['version']}"
                elif is_there:
                    self._has_versions = False
                    _, models = await self._get("/v1/models")
                    self._name = owner_of(models)
                # Last: calls that come meanwhile wait, and are not taken for calls of an upstream that says nothing.
                self._not_before = time.monotonic() + (_KNOWN_SECONDS if is_there else _ABSENT_SECONDS)
        return self._name

    async def described(self, asks: str) -> str:
        """What answers, and whether its tokens are recorded, for people; `asks`: as `forward.Settings` has it."""
        name = await self.name()
        if name is None and self._unreached is not None:
            return f"upstream: {self._unreached}"
        if asks == "auto":
            told = "tokens are recorded" if answers_tokens(name) else "calls are recorded as text"
        else:
            told = f"tokens are {'always' if asks == 'always' else 'not'} asked for"
        return f"upstream: {name or 'does not say what it is'}; {told}"

    async def version_before(self) -> str | None:
        """Of its weights, told before a call that departs now; None if it does not say."""
        is_recent = time.monotonic() - self._told < _LATELY_SECONDS
        return self._version if is_recent else await self.version_now()

    async def version_now(self) -> str | None:
        """Of its weights, asked after this call; None if it does not say. Calls that ask together ask once."""
        if self._name is None or not self._has_versions:
            return None
        earlier = self._checking
        if earlier is not None and not earlier.done():
            await asyncio.wait((earlier,))  # it was sent before we asked: what it says may be older than our call
        if self._checking is earlier:
            self._checking = asyncio.create_task(self._weights())
        assert self._checking is not None
        self._version = await asyncio.shield(self._checking)
        self._told = time.monotonic()
        return self._version

    async def _weights(self) -> str | None:
        _, said = await self._get("/weight_info")
        found = said.get("weight_version") if isinstance(said, dict) else None
        return None if found is None else str(found)

    async def _get(self, path: str) -> tuple[bool, Any]:
        """Whether anybody answers a small question, and what; None if it is no JSON."""
        self._unreached = None
        try:
            sent = self._session.get(
                f"{self._base}{path}", headers=self.headers, timeout=self._probe, allow_redirects=False
            )
            async with sent as response:
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > _PROBE_BYTES:
                        return True, None
                return True, msgspec.json.decode(data) if response.status == 200 else None
        except NO_JSON:
            return True, None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._unreached = unreached(error, self._base) or f"{self._base} does not answer in time"
            return False, None


def base_of(url: str, option: str = "--upstream") -> tuple[str, dict[str, str]]:
    """A base URL without /v1, which paths bring along, and the header that its user and password make.

    Args:
        url: as it was given.
        option: where it was given.

    Raises:
        UsageError: it is none.
    """
    try:
        parsed = URL(url)
    except ValueError as error:
        raise _no_base(url, option, f": {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query_string or parsed.fragment:
        raise _no_base(url, option)
    path = parsed.path.rstrip("/")
    if (end := next((f"/{name}" for name in _ENDPOINTS if path.endswith(f"/{name}")), None)) is not None:
        base = parsed.with_path(path.removesuffix(end) or "/v1").with_user(None)
        raise _no_base(url, option, ", an endpoint and no base URL", str(base))
    headers = {}
    if parsed.user is not None:
        headers["Authorization"] = aiohttp.encode_basic_auth(parsed.user, parsed.password or "")
    return str(parsed.with_user(None)).rstrip("/").removesuffix("/v1").rstrip("/"), headers


def _no_base(url: str, option: str, why: str = "", valid: str = "http://127.0.0.1:8000/v1, for example") -> UsageError:
    return UsageError(redacted(f"{option} is {url!r}{why}; valid: {valid}"))


def passed_on(headers: Iterable[tuple[str, str]], *, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Headers that go on to the other side: not those of this connection, nor ours."""
    given = list(headers)
    named = {name.strip().lower() for key, value in given if key.lower() == "connection" for name in value.split(",")}
    left_out = _HOP_BY_HOP | named | without
    return CIMultiDict(
        (key, value) for key, value in given if key.lower() not in left_out and not key.lower().startswith(_OURS)
    )


def policy_version(version: str | None) -> int | None:
    """The number of updates that a version of weights says: `12`, `v12`, `step-12`."""
    found = re.fullmatch(r"(?:[A-Za-z]+[-_]?)?(\d{1,18})", version or "")
    return int(found[1]) if found else None
