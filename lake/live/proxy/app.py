"""What the proxy answers: calls that are recorded, spans, the ends of episodes, and everything else as it is.

A request is refused, with the reason, before it reaches the upstream: without the proxy's token where one is needed,
from a page of another site, with a name or path that is not valid, longer than a body may be, or while there is no room
to record.
"""

import asyncio
import hmac
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from lake.errors import UsageError
from lake.formats.base.secrets import Secrets
from lake.live.calls.address import Address
from lake.live.calls.shapes import APIS, NO_JSON
from lake.live.calls.steps import Call
from lake.live.proxy.answers import AnswerRoom
from lake.live.proxy.book import Book
from lake.live.proxy.connections import Gate
from lake.live.proxy.forward import ENDED, Passage, Settings
from lake.live.proxy.keys import NAME_LIMIT, TOKEN_HEADER, addressed
from lake.live.proxy.replies import ClientLeftError, RefusedError, broken, refusal, send
from lake.live.proxy.rollouts import EndedError, Ending
from lake.live.proxy.secrets import call_without_keys
from lake.live.proxy.traces import PATHS, acknowledged, received, refuse_misplaced
from lake.live.proxy.upstream import Upstream, passed_on

END_PATH, FLUSH_PATH = "/v1/end", "/v1/flush"
_SETTLING_SECONDS = 5.0
"""How long the end of an episode waits for its calls that are under way."""
_NO_ROOM = "there is no room to record: the lake cannot be reached, or the disk is full; try again"
_NOT_KEPT = "the end is in memory, and the disk of the spool does not take it at the moment; it is tried again"
_NO_TEMPERATURE = (
    "calls do not say their temperature, nor does the engine, so losses with ratios (ppo, grpo, ...) will refuse their "
    "tokens; set `temperature` in the agent, or start vLLM with VLLM_SERVER_DEV_MODE=1 and --generation-config vllm"
)
_LOCAL_NAME = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d+)?")
_PACKED = frozenset(("identity", "gzip", "deflate"))
"""Encodings of a body that are unpacked."""
_log = logging.getLogger("trajlake")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may take from the others."""

    max_body: int = 64 << 20
    """Bytes of a request."""
    max_bodies: int = 512 << 20
    """Bytes of all requests at a time."""
    max_answers: int = 512 << 20
    """Bytes of all answers at a time."""
    body_seconds: float = 60.0
    """How long a body may take to arrive."""


class Proxy:
    """The handler of all requests.

    Args:
        upstream: where calls go on to.
        book: what they are recorded in.
        gate: told who is busy.
        token: what requests have to bring in `X-Trajlake-Token`; None if nothing.
        has_room: whether there is room to record calls of so many bytes; else they are refused, unless they are to go
            on unrecorded.
        sync: brings what was recorded to the disk; whether that was possible.
        kept: waits until what was recorded is on the disk, for calls whose answers wait for that; None: they do not.
        flush: brings what has ended to the lake; what is in the way of it.
        refuses: calls are refused while there is no room.
    """

    def __init__(
        self,
        upstream: Upstream,
        book: Book,
        *,
        settings: Settings,
        limits: Limits,
        gate: Gate,
        token: str | None,
        has_room: Callable[[int], bool],
        sync: Callable[[], bool],
        kept: Callable[[], Awaitable[bool]] | None,
        flush: Callable[[], str | None],
        refuses: bool,
    ) -> None:
        self._upstream, self._book = upstream, book
        self._settings, self._limits, self._gate, self._token = settings, limits, gate, token
        self._has_room, self._sync, self._flush_spool, self._refuses = has_room, sync, flush, refuses
        self._kept = kept
        self._held = 0
        """Bytes of the bodies of requests that are under way."""
        self._answers = AnswerRoom(limits.max_answers)
        self._unpacking = asyncio.Semaphore(2)
        """Spans take ten times their room once they are unpacked."""
        self._is_stopping = False
        self._has_warned = False

    def application(self) -> web.Application:
        """As aiohttp runs it."""
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
            full = request.raw_path.partition("?")[0]
            address, path = addressed(full, request.headers)
            refuse_misplaced(path, f"http://{request.host[:NAME_LIMIT]}{full.removesuffix(path)}")
            await self._read(request, body)
            with self._gate.busy(request.protocol):
                return await self._answer_body(request, address, path, bytes(body))
        except RefusedError as error:
            return error.response()
        except EndedError as error:
            return refusal(409, str(error))
        except UsageError as error:
            return refusal(400, str(error))
        except Exception as error:
            # Ours or aiohttp's: told without what it says, which may be of the request.
            _log.warning("a request failed: %s", _where(error))
            return refusal(500, f"the proxy failed: {type(error).__name__}")
        finally:
            self._held -= len(body)

    async def _answer_body(self, request: web.Request, address: Address, path: str, body: bytes) -> web.StreamResponse:
        if path == END_PATH:
            return await self._end(request, address, body)
        if path == FLUSH_PATH:
            return await self._flush(request)
        if request.method == "POST" and path in PATHS:
            return await self._receive(request, address, path, body)
        if request.method == "POST" and path in APIS:
            return await self._record(request, address, path, body)
        return await self._pass(request, path, body)

    def _check_client(self, request: web.Request) -> None:
        """Raise RefusedError for a client that may not be here."""
        given = request.headers.get(TOKEN_HEADER, "")
        if self._token is not None:
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
                raise RefusedError(401, f"this proxy wants its token, in the header {TOKEN_HEADER}")
        elif not _LOCAL_NAME.fullmatch(request.host):
            # A page in a browser here can reach us under a name of its own (DNS rebinding).
            message = f"the host is {request.host[:NAME_LIMIT]!r}; valid without a token: 127.0.0.1, localhost, [::1]"
            raise RefusedError(403, message)
        elif (origin := request.headers.get("Origin")) is not None and not _is_local(origin):
            # Nor may such a page send to our address what needs no permission: a form, a text.
            message = f"the page is of {origin[:NAME_LIMIT]!r}; valid without a token: pages of this machine"
            raise RefusedError(403, message)
        if "websocket" in request.headers.get("Upgrade", "").lower():
            raise RefusedError(501, "websockets are not passed on; use the HTTP API")
        if (packed := request.headers.get("Content-Encoding", "identity").lower()) not in _PACKED:
            raise RefusedError(415, f"Content-Encoding is {packed[:NAME_LIMIT]!r}; valid: {', '.join(sorted(_PACKED))}")

    async def _read(self, request: web.Request, body: bytearray) -> None:
        """Add a whole body, counted in `_held`. Raises RefusedError."""
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                await self._gather(request, body)
        except TimeoutError as error:
            raise RefusedError(408, f"the body was not whole after {self._limits.body_seconds:.0f} s") from error
        except (web.RequestPayloadError, aiohttp.ClientError, RuntimeError) as error:  # the last: it was closed
            raise RefusedError(400, f"the body cannot be read: {type(error).__name__}") from error

    async def _gather(self, request: web.Request, body: bytearray) -> None:
        most = self._limits.max_body
        while True:
            if max(request.content_length or 0, len(body)) > most:
                raise RefusedError(413, f"the body is longer than {most:,} bytes (--max-body)")
            if self._held > self._limits.max_bodies:
                raise RefusedError(503, f"requests of {self._limits.max_bodies:,} bytes are under way; try again")
            piece = await request.content.readany()
            if not piece:
                return
            body += piece
            self._held += len(piece)

    # ------------------------------------------------------------ kinds of requests

    async def _record(self, request: web.Request, address: Address, path: str, body: bytes) -> web.StreamResponse:
        if self._refuses and not self._has_room(self._held):
            raise RefusedError(503, _NO_ROOM)
        own = self._book.own(address)
        self._book.check(own)
        secrets = self._secrets(request, address)

        def record(call: Call) -> bool:
            is_taken = False
            try:
                is_taken = self._book.add(call_without_keys(call, secrets))
            except Exception as error:
                # Whatever a hostile text does to our records must not reach the agent.
                self._book.counts.unreadable += 1
                _log.warning("a call could not be recorded: %s", _where(error))
            if call.answer is not None and call.answer.action_ids and "temperature" not in call.sampling:
                self._warn()
            return is_taken

        task = asyncio.current_task()
        assert task is not None
        under_way = self._book.under_way.call(own, lambda: task.cancel(ENDED))
        with under_way, self._answers.share(task.cancel) as share:
            passage = Passage(
                request,
                self._upstream,
                self._settings,
                address=address,
                api=APIS[path],
                path=path,
                body=body,
                secrets=secrets,
                record=record,
                kept=self._kept,
                is_stopping=lambda: self._is_stopping,
                share=share,
            )
            return await passage.run()

    def _secrets(self, request: web.Request, address: Address) -> Secrets:
        """The keys that a request brings, and the upstream's. Raises RefusedError: its rollout has the name of one."""
        query = request.raw_path.partition("?")[2]
        secrets = Secrets([*request.headers.items(), *self._upstream.headers.items()], query)
        if secrets.stand_in(str(address)):
            raise RefusedError(400, "a name of the rollout is a key that the request sends, and names are recorded")
        return secrets

    def _warn(self) -> None:
        """Say while the agent can still be changed what training would refuse, once."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", _NO_TEMPERATURE)

    async def _receive(self, request: web.Request, address: Address, path: str, body: bytes) -> web.Response:
        """Spans are taken whole, or the exporter is told to send them again."""
        if not self._has_room(self._held):
            raise RefusedError(503, _NO_ROOM)
        self._book.check(address)
        secrets = self._secrets(request, address)
        async with self._unpacking:
            found = await asyncio.to_thread(received, path, request.content_type, body, secrets)
        for traced, is_over in found:
            self._book.receive(address, traced, datetime.now(UTC), is_over=is_over)
            await asyncio.sleep(0)  # others first: an exporter may send a million spans at once
        if not await asyncio.to_thread(self._sync):
            raise RefusedError(503, _NO_ROOM)
        return acknowledged(request.content_type)

    async def _pass(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """A request that is no call of a model."""
        response = None
        try:
            query = request.raw_path.partition("?")[2]
            async with self._upstream.request(request.method, path, query, request.headers, body or None) as found:
                self._upstream.outages.answered()
                without = frozenset(("content-encoding",))
                headers = passed_on(found.headers.items(), without=without)
                response = web.StreamResponse(status=found.status, headers=headers)
                await response.prepare(request)
                async for piece in found.content.iter_any():
                    await send(response, piece)
                await response.write_eof()
                return response
        except ClientLeftError:
            return response or web.Response()
        except (aiohttp.ClientError, OSError) as error:
            status = 504 if isinstance(error, TimeoutError) else 502
            return broken(request, response, status, self._upstream.outages.failed(error))

    async def _end(self, request: web.Request, address: Address, body: bytes) -> web.Response:
        if request.method != "POST":
            raise RefusedError(405, f"{END_PATH} takes POST")
        try:
            ending = msgspec.json.decode(body or b"{}", type=Ending)
        except NO_JSON as error:
            valid = ", ".join(Ending.__struct_fields__)
            raise UsageError(f"the end of an episode: {error}; valid: an object with any of {valid}") from error
        ending = ending.without_keys(self._secrets(request, address))
        own = self._book.own(address)
        self._book.check_end(own, ending)
        if ending.closes:
            self._book.under_way.break_off(own)
        deadline = time.monotonic() + _SETTLING_SECONDS
        while own.is_named and self._book.under_way.of(own) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        told = self._book.end(own, ending, datetime.now(UTC))
        if not await asyncio.to_thread(self._sync):
            raise RefusedError(503, _NOT_KEPT)
        return web.json_response(told)

    async def _flush(self, request: web.Request) -> web.Response:
        if request.method != "POST":
            raise RefusedError(405, f"{FLUSH_PATH} takes POST")
        if problem := await asyncio.to_thread(self._flush_spool):
            raise RefusedError(503, f"what has ended is not all in the lake: {problem}; it is tried again")
        return web.json_response({"delivered": True})


def _is_local(origin: str) -> bool:
    """Whether a page is of this machine."""
    try:
        url = URL(origin)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and _LOCAL_NAME.fullmatch(url.authority) is not None


def _where(error: Exception) -> str:
    """An error by its kind and place, without what it says."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.name}, line {last.lineno} of {last.filename}"
