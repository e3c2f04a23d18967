"""The HTTP handler of the proxy: recorded calls, spans, ends of episodes, and requests that pass through unchanged.

The proxy refuses some requests before the upstream sees them, and gives the reason. These are requests without the
proxy's token where one is set, from a page of another site, or with an invalid name or path. A body can also be too
long, or there may be no room to record.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from lake.errors import UsageError
from lake.live.calls.address import NAME_LIMIT, TOKEN_HEADER, RolloutAddress, parse_address
from lake.live.calls.apis import APIS, NO_JSON
from lake.live.proxy.connections import ClientLeftError, Gate, RefusedError, break_off, refuse, send
from lake.live.proxy.relay import ENDED, AnswerBudget, CallRelay, CallSettings, locate_error
from lake.live.proxy.sessions import EndedError, EndRequest, SessionRegistry
from lake.live.proxy.traces import PATHS, acknowledge, refuse_misplaced, split_request
from lake.live.proxy.upstream import Upstream, forward_headers
from lake.secrets import Secrets

END_PATH, FLUSH_PATH = "/v1/end", "/v1/flush"
_SETTLING_SECONDS = 5.0
"""How long the end of an episode waits for its running calls."""
_NO_ROOM = "there is no room to record: the lake cannot be reached, or the disk is full; try again"
_NOT_ON_DISK = "the end is in memory, and the disk of the spool does not take it at the moment; it is tried again"
_NO_TEMPERATURE = (
    "neither the calls nor the engine say the temperature, so losses with ratios (ppo, grpo, ...) will refuse their "
    "tokens; set `temperature` in the agent, or start vLLM with VLLM_SERVER_DEV_MODE=1 and --generation-config vllm"
)
_LOCAL_NAME = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d+)?")
_ENCODINGS = frozenset(("identity", "gzip", "deflate"))
"""Encodings of a body that the proxy unpacks."""
_log = logging.getLogger("trajlake")


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that keep one client from crowding out the others."""

    max_body: int = 64 << 20
    """Bytes of one request."""
    max_bodies: int = 512 << 20
    """Bytes of all requests at a time."""
    max_answers: int = 512 << 20
    """Bytes of all answers at a time."""
    body_seconds: float = 60.0
    """Seconds that a body may take to arrive."""


class Proxy:
    """The handler of all requests.

    Args:
        upstream: the server that requests are forwarded to.
        registry: records calls and spans.
        settings: settings for all calls.
        limits: limits for bodies and answers.
        gate: learns which connections are busy.
        token: required value of the header `X-Trajlake-Token`; None requires none.
        has_room: returns whether calls of so many bytes can be recorded.
        sync: writes recorded frames to disk and returns whether that was possible.
        wait_for_disk: waits until recorded frames are on disk, for answers that wait for that; None does not wait.
        flush: delivers ended episodes to the lake and returns the problem, if any.
        refuses: refuse calls without room to record. Otherwise they pass unrecorded.
    """

    def __init__(
        self,
        upstream: Upstream,
        registry: SessionRegistry,
        *,
        settings: CallSettings,
        limits: RequestLimits,
        gate: Gate,
        token: str | None,
        has_room: Callable[[int], bool],
        sync: Callable[[], bool],
        wait_for_disk: Callable[[], Awaitable[bool]] | None,
        flush: Callable[[], str | None],
        refuses: bool,
    ) -> None:
        self._upstream, self._registry = upstream, registry
        self._settings, self._limits, self._gate, self._token = settings, limits, gate, token
        self._has_room, self._sync, self._flush_spool, self._refuses = has_room, sync, flush, refuses
        self._wait_for_disk = wait_for_disk
        self._body_bytes = 0
        """Bytes of the bodies of all requests under way."""
        self._answers = AnswerBudget(limits.max_answers)
        self._unpacking = asyncio.Semaphore(2)
        """Limits unpacking, because spans take ten times their size once unpacked."""
        self._is_stopping = False
        self._has_warned = False

    def application(self) -> web.Application:
        """Return the handler as an aiohttp application."""
        app = web.Application(client_max_size=self._limits.max_body)
        app.router.add_route("*", "/{path:(?s:.*)}", self._answer)
        app.on_shutdown.append(self._stop)
        return app

    async def _stop(self, _: web.Application) -> None:
        self._is_stopping = True

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = bytearray()
        try:
            self._check_client(request)
            raw_path = request.raw_path.partition("?")[0]
            address, path = parse_address(raw_path, request.headers)
            refuse_misplaced(path, f"http://{request.host[:NAME_LIMIT]}{raw_path.removesuffix(path)}")
            await self._read_body(request, body)
            with self._gate.busy(request.protocol):
                return await self._route(request, address, path, bytes(body))
        except RefusedError as error:
            return error.response()
        except EndedError as error:
            return refuse(409, str(error))
        except UsageError as error:
            return refuse(400, str(error))
        except Exception as error:
            # The text of the error may quote the request, so only its type and place are reported.
            _log.warning("a request failed: %s", locate_error(error))
            return refuse(500, f"the proxy failed: {type(error).__name__}")
        finally:
            self._body_bytes -= len(body)

    async def _route(self, request: web.Request, address: RolloutAddress, path: str, body: bytes) -> web.StreamResponse:
        if path in (END_PATH, FLUSH_PATH) and request.method != "POST":
            raise RefusedError(405, f"{path} takes POST")
        if path == END_PATH:
            return await self._end(request, address, body)
        if path == FLUSH_PATH:
            if problem := await asyncio.to_thread(self._flush_spool):
                raise RefusedError(503, f"not all that has ended is in the lake: {problem}; it is tried again")
            return web.json_response({"delivered": True})
        if request.method == "POST" and path in PATHS:
            return await self._record_spans(request, address, path, body)
        if request.method == "POST" and path in APIS:
            return await self._record_call(request, address, path, body)
        return await self._pass_through(request, path, body)

    def _check_client(self, request: web.Request) -> None:
        """Raise RefusedError for a client without access, and for requests that the proxy cannot forward."""
        token = request.headers.get(TOKEN_HEADER, "")
        if self._token is not None:
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
                raise RefusedError(401, f"this proxy wants its token, in the header {TOKEN_HEADER}")
        elif not _LOCAL_NAME.fullmatch(request.host):
            # A page in a local browser can reach the proxy under the page's host name (DNS rebinding).
            message = f"the host is {request.host[:NAME_LIMIT]!r}; valid without a token: 127.0.0.1, localhost, [::1]"
            raise RefusedError(403, message)
        elif (origin := request.headers.get("Origin")) is not None and not _is_local(origin):
            # Such a page can also send requests that need no permission to our address: a form, a text.
            message = f"the page is of {origin[:NAME_LIMIT]!r}; valid without a token: pages of this machine"
            raise RefusedError(403, message)
        if "websocket" in request.headers.get("Upgrade", "").lower():
            raise RefusedError(501, "websockets are not passed on; use the HTTP API")
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in _ENCODINGS:
            valid = ", ".join(sorted(_ENCODINGS))
            raise RefusedError(415, f"Content-Encoding is {encoding[:NAME_LIMIT]!r}; valid: {valid}")

    async def _read_body(self, request: web.Request, body: bytearray) -> None:
        """Append the request's body to `body`, and count it in `_body_bytes`. Raises RefusedError."""
        most = self._limits.max_body
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    if max(request.content_length or 0, len(body)) > most:
                        raise RefusedError(413, f"the body is longer than {most:,} bytes (max_body)")
                    if self._body_bytes > self._limits.max_bodies:
                        size = f"{self._limits.max_bodies:,}"
                        raise RefusedError(503, f"requests of {size} bytes are under way; try again")
                    piece = await request.content.readany()
                    if not piece:
                        return
                    body += piece
                    self._body_bytes += len(piece)
        except TimeoutError as error:
            raise RefusedError(408, f"the body was not whole after {self._limits.body_seconds:.0f} s") from error
        except (web.RequestPayloadError, aiohttp.ClientError, RuntimeError) as error:  # the last: it was closed
            raise RefusedError(400, f"the body cannot be read: {type(error).__name__}") from error

    # ------------------------------------------------------------ kinds of requests

    async def _record_call(
        self, request: web.Request, address: RolloutAddress, path: str, body: bytes
    ) -> web.StreamResponse:
        if self._refuses and not self._has_room(self._body_bytes):
            raise RefusedError(503, _NO_ROOM)
        row = self._registry.as_row(address)
        self._registry.check_open(row)
        secrets = self._find_secrets(request, address)
        task = asyncio.current_task()
        assert task is not None
        under_way = self._registry.under_way.track(row, lambda: task.cancel(ENDED))
        with under_way, self._answers.share(task.cancel) as share:
            relay = CallRelay(
                request,
                self._upstream,
                self._registry,
                self._settings,
                address=address,
                path=path,
                body=body,
                secrets=secrets,
                wait_for_disk=self._wait_for_disk,
                is_stopping=lambda: self._is_stopping,
                share=share,
            )
            try:
                return await relay.run()
            finally:
                call = relay.call
                has_tokens = call is not None and call.answer is not None and bool(call.answer.action_ids)
                if call is not None and has_tokens and "temperature" not in call.sampling and not self._has_warned:
                    # Training would refuse the tokens. The agent can still be changed now.
                    self._has_warned = True
                    _log.warning("%s", _NO_TEMPERATURE)

    def _find_secrets(self, request: web.Request, address: RolloutAddress) -> Secrets:
        """Return the keys of a request and of the upstream. Raises RefusedError: the rollout's name is a key."""
        query = request.raw_path.partition("?")[2]
        secrets = Secrets([*request.headers.items(), *self._upstream.headers.items()], query)
        if secrets.has_key_in(str(address)):
            raise RefusedError(400, "a name of the rollout is a key that the request sends, and names are recorded")
        return secrets

    async def _record_spans(
        self, request: web.Request, address: RolloutAddress, path: str, body: bytes
    ) -> web.Response:
        """Record all spans of a request, or make the exporter send them again."""
        if not self._has_room(self._body_bytes):
            raise RefusedError(503, _NO_ROOM)
        self._registry.check_open(address)
        secrets = self._find_secrets(request, address)
        async with self._unpacking:
            traces = await asyncio.to_thread(split_request, path, request.content_type, body, secrets)
        for trace, is_over in traces:
            self._registry.record_spans(address, trace, datetime.now(UTC), is_over=is_over)
            await asyncio.sleep(0)  # an exporter may send a million spans; let other requests run
        if not await asyncio.to_thread(self._sync):
            raise RefusedError(503, _NO_ROOM)
        return acknowledge(request.content_type)

    async def _pass_through(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Forward a request that is not recorded."""
        response = None
        try:
            query = request.raw_path.partition("?")[2]
            async with self._upstream.request(request.method, path, query, request.headers, body or None) as reply:
                self._upstream.outages.answered()
                headers = forward_headers(reply.headers.items(), without=frozenset(("content-encoding",)))
                response = web.StreamResponse(status=reply.status, headers=headers)
                await response.prepare(request)
                async for piece in reply.content.iter_any():
                    await send(response, piece)
                await response.write_eof()
                return response
        except ClientLeftError:
            return response or web.Response()
        except (aiohttp.ClientError, OSError) as error:
            status = 504 if isinstance(error, TimeoutError) else 502
            return break_off(request, response, status, self._upstream.outages.failed(error))

    async def _end(self, request: web.Request, address: RolloutAddress, body: bytes) -> web.Response:
        try:
            end = msgspec.json.decode(body or b"{}", type=EndRequest)
        except NO_JSON as error:
            valid = ", ".join(EndRequest.__struct_fields__)
            raise UsageError(f"the end of an episode: {error}; valid: an object with any of {valid}") from error
        end = end.without_keys(self._find_secrets(request, address))
        row = self._registry.as_row(address)
        self._registry.check_end(row, end)
        if end.closes:
            self._registry.under_way.break_off(row)
        deadline = time.monotonic() + _SETTLING_SECONDS
        while row.is_named and self._registry.under_way.count(row) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        reply = self._registry.end(row, end, datetime.now(UTC))
        if not await asyncio.to_thread(self._sync):
            raise RefusedError(503, _NOT_ON_DISK)
        return web.json_response(reply)


def _is_local(origin: str) -> bool:
    """Return whether a page comes from this machine."""
    try:
        url = URL(origin)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and _LOCAL_NAME.fullmatch(url.authority) is not None
