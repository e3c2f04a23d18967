"""One call on its way: asked of the upstream, passed back as it comes, and recorded before its end is passed back.

An agent that has its answer may ask the next thing or end its episode at once, so the call is in the book by then. What
the client did not ask for is taken out; else every byte goes back as it came. A client that leaves ends its call: the
connection to the upstream is closed, and what there is of the answer is recorded.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from lake.formats.base.rows import ShapeError
from lake.formats.base.secrets import Secrets
from lake.formats.chat.chat_completions import Completion
from lake.live.calls.address import Address
from lake.live.calls.shapes import NO_JSON, Asked, answered, asked
from lake.live.calls.steps import Call
from lake.live.calls.streams import Event, Events, gathering, says_end
from lake.live.proxy.answers import AnswerShare
from lake.live.proxy.asking import Added, answers_tokens, asking, sent_with, stripped
from lake.live.proxy.engine import told_version
from lake.live.proxy.outages import AnswerTooLongError
from lake.live.proxy.replies import ClientLeftError, broken, send
from lake.live.proxy.upstream import Upstream, passed_on, policy_version

NOT_KEPT = "the call is not on the disk of the spool, which is full or slow, so its answer is held back; try again"
ENDED = "the rollout had ended"
"""Why the proxy breaks off a call."""
_SLICE = 16 << 10
"""Bytes of a stream that are taken apart at once."""
_LONG = 4 << 20
"""Bytes of a stream that is put together beside the others, and not before them."""
_SHOWN = 2000
"""Characters of an error's text that are recorded."""
_DECODE = msgspec.json.Decoder().decode
_UNREACHED = (aiohttp.ClientError, OSError)  # time-outs among them


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all calls."""

    asks: str = "auto"
    """Whether engines are asked for tokens: auto (where they are known to answer), always, never."""
    logprobs_mode: str | None = None
    """As the engine was started with: processed, raw, or None for what it says itself."""
    max_answer: int = 256 << 20
    """Bytes of an answer; a longer one is cut."""


class Passage:
    """One call that is recorded.

    Args:
        request: of the client.
        address: the rollout that it belongs to.
        api: which of the four it is.
        path: what is asked of the upstream.
        body: of the request.
        secrets: the keys that the request is known to bring; those in its body are added.
        record: takes the call once it is over; whether there was room for it.
        kept: waits until what was recorded is on the disk, before the end of the answer goes back, and tells whether it
            is; None waits for nothing.
        is_stopping: whether the proxy is being stopped.
        share: what the answer takes of the room for all.
    """

    def __init__(
        self,
        request: web.Request,
        upstream: Upstream,
        settings: Settings,
        *,
        address: Address,
        api: str,
        path: str,
        body: bytes,
        secrets: Secrets,
        record: Callable[[Call], bool],
        kept: Callable[[], Awaitable[bool]] | None,
        is_stopping: Callable[[], bool],
        share: AnswerShare,
    ) -> None:
        self._share, self._kept = share, kept
        self._request, self._upstream, self._settings = request, upstream, settings
        self._address, self._api, self._path, self._body = address, api, path, body
        self._secrets, self._record = secrets, record
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self._asked = Asked(messages=[])
        self._added: Added = frozenset()
        self._extra: dict[str, Any] = {}
        self._engine: str | None = None
        self._before: str | None = None
        """Version of the weights before the call."""
        self._response: web.StreamResponse | None = None
        """What has begun to go back."""
        self._problem: str | None = None
        """Why a stream cannot be read."""
        self._is_ending = False
        """A stream has said why it ended, and that is held back."""
        self._is_recorded = self._is_taken = self._is_on_disk = False
        self._is_stopping = is_stopping

    async def run(self) -> web.StreamResponse:
        """Make the call."""
        self._engine = await self._upstream.name()
        self._before = await self._upstream.version_before()
        self._read_request()
        gathered = gathering(self._api)
        try:
            query = self._request.raw_path.partition("?")[2]
            sent = self._upstream.request("POST", self._path, query, self._request.headers, self._body)
            async with sent as found:
                self._upstream.outages.answered()
                if found.status < 300 and found.content_type == "text/event-stream":
                    return await self._pass_stream(found, gathered)
                answer = await (self._pass_refusal(found) if found.status >= 300 else self._pass_whole(found))
                return answer if await self._is_kept() else broken(self._request, None, 503, NOT_KEPT)
        except ClientLeftError:
            await self._leave(gathered)
            return self._response or web.Response()
        except asyncio.CancelledError as error:
            if self._share.is_cut and (task := asyncio.current_task()) is not None:
                task.uncancel()
                most = self._share.room.most
                return await self._give_up(
                    502, f"it is the longest of answers of {most:,} bytes (--max-answers)", gathered
                )
            await self._leave(gathered, is_ended=ENDED in error.args)
            raise
        except _UNREACHED as error:
            status = 504 if isinstance(error, TimeoutError) else 502
            return await self._give_up(status, self._upstream.outages.failed(error), gathered)

    def _read_request(self) -> None:
        """Take the request apart, and ask for more than it does."""
        try:
            body = _DECODE(self._body)
        except NO_JSON:
            self._extra["request_not_read"] = "it is no JSON"
            return
        if not isinstance(body, dict):
            self._extra["request_not_read"] = f"it is {type(body).__name__}; valid: an object"
            return
        try:
            self._asked = asked(self._api, self._secrets.fields_without_keys(body))
        except Exception as error:
            self._extra["request_not_read"] = _why(error)
        if self._settings.asks == "always" or (self._settings.asks == "auto" and answers_tokens(self._engine)):
            more = asking(self._api, body, self._engine)
            if more:
                self._body, self._added = sent_with(self._body, body, more), Added(more)

    # ------------------------------------------------------------ answers

    async def _pass_refusal(self, found: aiohttp.ClientResponse) -> web.StreamResponse:
        """An answer that is none goes back as it is."""
        data = await self._read(found)
        self._extra["http_status"] = found.status
        self._fail(f"HTTP {found.status}: {_text(data)}")
        return web.Response(status=found.status, body=data, headers=_headers(found))

    async def _pass_whole(self, found: aiohttp.ClientResponse) -> web.StreamResponse:
        data = await self._read(found)
        try:
            body = _DECODE(data)
        except NO_JSON:
            self._fail("the answer is no JSON", _text(data))
            return web.Response(status=found.status, body=data, headers=_headers(found))
        await self._finish(body)
        if self._added:
            data = msgspec.json.encode(stripped(body, self._added, self._engine))
        return web.Response(status=found.status, body=data, headers=_headers(found))

    async def _pass_stream(self, found: aiohttp.ClientResponse, gathered: Any) -> web.StreamResponse:
        self._response = response = web.StreamResponse(status=found.status, headers=_headers(found))
        await response.prepare(self._request)
        events, size, held = Events(), 0, bytearray()
        async for piece in found.content.iter_chunked(_SLICE):
            size += len(piece)
            self._share.take(len(piece))
            if len(piece) == _SLICE:
                await asyncio.sleep(0)  # others first: there is more to take apart than they should wait for
            if size > self._settings.max_answer:
                why = f"the answer is longer than {self._settings.max_answer:,} bytes"
                return await self._give_up(502, why, gathered)
            passed = self._taken_apart(events.feed(piece), gathered)
            if gathered.is_whole and not self._is_recorded:
                await self._end_stream(gathered)
            held += passed if self._added else piece
            if self._is_ending and not self._is_recorded:
                continue  # an answer that says why it ended is whole for many clients
            if self._is_recorded and not await self._is_kept():
                return broken(self._request, response, 503, NOT_KEPT)
            if held:
                await send(response, bytes(held))
                held.clear()
        if not self._is_recorded:
            # A stream may end without saying so; an answer that says why it ended is whole.
            await self._end_stream(gathered, is_cut=not gathered.is_whole)
        if not await self._is_kept():
            return broken(self._request, response, 503, NOT_KEPT)
        if held or (self._added and events.left):
            await send(response, bytes(held) + (events.left if self._added else b""))
        await response.write_eof()
        return response

    def _taken_apart(self, events: Iterator[Event], gathered: Any) -> bytes:
        """Gather what events say; they as the client gets them."""
        passed = []
        for event in events:
            try:
                gathered.add(event.data)
            except Exception as error:
                self._problem = self._problem or _why(error)
            passed.append(self._stripped(event))
            self._is_ending |= self._kept is not None and says_end(event.data)
        return b"".join(passed)

    async def _is_kept(self) -> bool:
        """Whether the client may have the end of the answer: where that is wanted, once the call is on the disk."""
        if self._kept is not None and not self._is_on_disk:
            self._is_on_disk = self._is_taken and await self._kept()
        return self._kept is None or self._is_on_disk

    def _stripped(self, event: Event) -> bytes:
        data = stripped(event.data, self._added, self._engine)
        if data is None and event.data is not None:
            return b""
        return event.raw if data == event.data else event.with_data(data)

    async def _end_stream(self, gathered: Any, *, is_cut: bool = False) -> None:
        body = gathered.answer()
        if self._problem is not None:
            self._fail(self._problem, await self._partial(gathered))
            return
        await self._finish(body or {}, is_cut=is_cut)

    async def _finish(self, body: Any, *, is_cut: bool = False) -> None:
        """Record a call that was answered."""
        try:
            answer = answered(self._api, body)
        except Exception as error:
            self._fail(f"the answer cannot be read: {_why(error)}", _shown(body))
            return
        if is_cut and answer.finish_reason is None:
            self._fail("the upstream ended the stream before the answer was whole", answer.message)
            return
        after = await self._upstream.version_now()
        if self._before != after:
            self._extra["weight_versions"] = [self._before, after]
        version = policy_version(after or told_version(body)) if self._before == after else None
        self._add(answer, policy_version=version)

    # ------------------------------------------------------------ records

    async def _so_far(self, gathered: Any) -> Completion | None:
        """What there is of an answer; others go on while a long one is put together."""
        if self._share.size < _LONG:
            return self._put_together(gathered)
        try:
            return await asyncio.to_thread(self._put_together, gathered)
        except asyncio.CancelledError:  # the proxy is being stopped, and nobody waits
            return None

    def _put_together(self, gathered: Any) -> Completion | None:
        try:
            body = gathered.answer()
            return None if body is None else answered(self._api, body)
        except Exception:
            return None

    async def _partial(self, gathered: Any) -> Any:
        """The message that an answer was on the way to be."""
        found = await self._so_far(gathered)
        return found and found.message

    async def _leave(self, gathered: Any, *, is_ended: bool = False) -> None:
        """The connection was closed: record what is left behind, a whole answer if all but its end was there.

        Which weights it is of is not known: they are asked for after the end.
        """
        if self._is_recorded:
            return
        found = await self._so_far(gathered)
        if found is not None and found.finish_reason is not None:
            self._add(found)
        else:
            why = "the proxy was stopped" if self._is_stopping() else ENDED if is_ended else "the client left"
            self._fail(f"{why} before the answer was whole", found and found.message)

    async def _give_up(self, status: int, error: str, gathered: Any) -> web.StreamResponse:
        self._fail(error, await self._partial(gathered))
        return broken(self._request, self._response, status, error)

    def _fail(self, error: str, partial: Any = None) -> None:
        if not self._is_recorded:
            partial = self._secrets.clean_error(partial)[:_SHOWN] if isinstance(partial, str) else partial
            self._add(None, error=self._secrets.clean_error(error)[:_SHOWN], partial=partial)

    def _add(self, answer: Completion | None, **fields: Any) -> None:
        self._is_recorded = True
        self._is_taken = self._record(
            Call(
                address=self._address,
                api=self._api,
                asked=self._asked,
                answer=answer,
                started_at=self._started,
                latency=time.monotonic() - self._clock,
                engine=self._engine,
                logprobs_mode=self._settings.logprobs_mode or self._upstream.engine.logprobs_mode,
                defaults=self._upstream.engine.sampling,
                extra=self._extra,
                **fields,
            )
        )

    async def _read(self, found: aiohttp.ClientResponse) -> bytes:
        """A whole body. Raises AnswerTooLongError: it is too long."""
        data = bytearray()
        async for piece in found.content.iter_any():
            data += piece
            self._share.take(len(piece))
            if len(data) > self._settings.max_answer:
                raise AnswerTooLongError(f"the answer is longer than {self._settings.max_answer:,} bytes")
        return bytes(data)


def _headers(found: aiohttp.ClientResponse) -> Any:
    """Headers that go back to the client; the body was unpacked on the way."""
    return passed_on(found.headers.items(), without=frozenset(("content-encoding",)))


def _why(error: Exception) -> str:
    """Why something cannot be read; a fault of our reader is told as such, and never reaches the agent."""
    is_speech = isinstance(error, ShapeError | msgspec.ValidationError)
    return str(error) if is_speech else f"our reader failed: {type(error).__name__}"


def _shown(body: Any) -> str:
    return _text(msgspec.json.encode(body))


def _text(data: bytes) -> str:
    """The beginning of an answer: more than is recorded, as a key in it may end behind that."""
    return data[: 64 * _SHOWN].decode("utf-8", "backslashreplace")
