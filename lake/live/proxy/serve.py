"""The proxy as a process: it listens, records into a spool that is delivered to the lake, and ends with all delivered.

The spool's folder is locked by this process. What an earlier one left behind (a kill, a crash) goes on: its finished
episodes are delivered, its open ones are read back, and calls join them as before.
"""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from lake.errors import TrajlakeError, UsageError
from lake.live.adoption import adopted
from lake.live.delivery import CLOSING_SECONDS, Deliveries, Delivery
from lake.live.frames import Frame, encode
from lake.live.group_sync import GroupSync
from lake.live.log import EpisodeLog
from lake.live.owners import Owner, asked_owner, identity_at, open_owned
from lake.live.places import checked_place, proxy_root
from lake.live.proxy.app import Limits, Proxy
from lake.live.proxy.book import Book
from lake.live.proxy.connections import Gate
from lake.live.proxy.counts import Counts
from lake.live.proxy.ends import FILE
from lake.live.proxy.forward import Settings
from lake.live.proxy.upstream import Upstream, base_of
from lake.live.sink import SYNC_SECONDS
from lake.live.spool import BUFFER_BYTES, MAX_BYTES, Spool

_RESERVE = 4 << 20
"""Bytes of the spool that are kept for the calls that are under way."""
_FILES_OF_OURS = 128
_SWEEP_SECONDS = 1.0
_IDLE_UPSTREAM_SECONDS = 4.0
"""Engines close a connection that is idle for 5 s (uvicorn), and a call must not leave on one that is being closed."""
_READ_BYTES = 128 << 10
"""Of an answer that its client does not fetch; twice as many are held at most."""
_ACCEPTED_AT_ONCE, _WAITING = 128, 2048
"""Connections: a crowd of new ones must not take the place of one whose request was not yet looked at."""
_DURABLE_SECONDS = 30.0
"""How long the end of an answer waits for a slow disk."""
_LEAVING_SECONDS = 2.5
"""Half of the time that calls that are under way may go on when the proxy is stopped: aiohttp waits twice."""
_log = logging.getLogger("trajlake")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a proxy runs."""

    upstream: str
    lake_uri: str
    run: str
    host: str = "127.0.0.1"
    port: int = 8484
    token: str | None = None
    unfinished: str = "continue"
    """What becomes of episodes that are open when the proxy dies or is stopped: calls go on with them, or (drop) they
    are left out, to be played anew."""
    idle: float = 600.0
    """Seconds without a call after which an episode ends."""
    timeout: float = 600.0
    """Seconds that the upstream may be silent."""
    refuses: bool = True
    """Calls are refused while there is no room to record; else they go on and their episodes are left out."""
    durable: bool = False
    """The end of an answer waits until its call is on the disk."""
    max_connections: int = 4096
    spool_bytes: int = MAX_BYTES
    spool: Path | None = None
    settings: Settings = Settings()
    limits: Limits = Limits()
    batch_seconds: float = 2.0


class Outcome(msgspec.Struct):
    """What became of a proxy's calls."""

    calls: Counts
    delivered: Deliveries
    is_all: bool
    """Nothing is left in the spool."""
    root: Path
    """Folder of the spool."""


def serve(options: Options, *, ready: Callable[[str], None], say: Callable[[str], None]) -> Outcome:
    """Run a proxy until SIGINT or SIGTERM.

    Args:
        options: how.
        ready: called with its base URL once it listens.
        say: called with what the upstream is, once that is known.

    Raises:
        UsageError: an address that cannot be listened on, an upstream that is none, or an address that no lake has.
        LakeAccessError: the folder for the spool cannot be made, or no lake can be in its place.
    """
    base_of(options.upstream)
    with checked_place(options.lake_uri):
        return _served(options, ready, say)


def _served(options: Options, ready: Callable[[str], None], say: Callable[[str], None]) -> Outcome:
    root = proxy_root(options.lake_uri, options.port, options.spool)
    listener = _listening(options)
    owner = asked_owner(options.lake_uri, root)
    spool = Spool.create(root, owner=owner, max_bytes=options.spool_bytes)

    def emit(key: bytes, number: int, frame: Frame, is_reserved: bool) -> None:
        spool.append(encode(key, number, frame), is_reserved=is_reserved)

    drops = options.unfinished == "drop"
    # What is played anew is played under the same names, and must not be taken for what had ended.
    ended = root / (FILE if owner.lake is None else f"{FILE}-{owner.lake}")
    book = Book(emit, run=options.run, ended=None if drops else ended)
    if not drops:
        resume(root, spool, book, owner)
    delivery = Delivery(
        lambda: open_owned(owner, options.lake_uri),
        spool,
        root=root,
        identify=lambda: identity_at(options.lake_uri),
        unfinished="drop" if drops else "record",
        batch_seconds=options.batch_seconds,
    )
    try:
        delivery.start()
        asyncio.run(_run(options, listener, spool, delivery, book, ready, say))
    finally:
        book.stop(datetime.now(UTC), drop=drops)
        book.ends.save()
        spool.sync(10.0)
        is_all = delivery.close()
        spool.close(remove=is_all)
    return Outcome(book.counts, delivery.counts, is_all, root)


def resume(root: Path, spool: Spool, book: Book, owner: Owner) -> None:
    """Go on with the episodes that dead proxies left open: their frames move to our spool, their calls to our book.

    Killed in between, they are in both spools, with the same keys and numbers: one episode all the same.
    """
    for old in adopted(root, owner):
        try:
            log = EpisodeLog(old)
            log.refresh()
            opened = [key for key in log.open if log.is_begun(key) and not log.missing(key)]
            if opened:
                log.copy(opened, spool)
                for key in opened:
                    book.resume(key, log.frames(key))
                log.let_go(opened)
        except (TrajlakeError, OSError, ValueError, LookupError) as error:
            _log.warning("open episodes of %s cannot be read back: %s", old.folder, error)
        old.close()


def _listening(options: Options) -> socket.socket:
    """A socket that listens, before anything that an earlier process left is touched. Raises UsageError."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=_WAITING)
    except OSError as error:
        msg = f"{options.host}:{options.port}: {error.strerror or error}; choose another --port or --host"
        raise UsageError(msg) from error


async def _run(
    options: Options,
    listener: socket.socket,
    spool: Spool,
    delivery: Delivery,
    book: Book,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    def has_room(size: int) -> bool:
        # What a full disk does not take gathers in memory.
        return spool.size + size + _RESERVE <= options.spool_bytes and spool.held_bytes <= BUFFER_BYTES // 2

    def flush() -> str | None:
        is_all = spool.sync(SYNC_SECONDS) and delivery.flush(CLOSING_SECONDS)
        return None if is_all else delivery.counts.problem or "it took too long"

    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=_IDLE_UPSTREAM_SECONDS)
    jar = aiohttp.DummyCookieJar()
    skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=jar, skip_auto_headers=skipped, trust_env=False, read_bufsize=_READ_BYTES
    ) as session:
        gate = Gate(_room_for_files(options.max_connections))
        upstream = Upstream(options.upstream, session, timeout=options.timeout)
        group = GroupSync(lambda: spool.sync(_DURABLE_SECONDS, unless_refused=True))
        proxy = Proxy(
            upstream,
            book,
            settings=options.settings,
            limits=options.limits,
            gate=gate,
            token=options.token,
            has_room=has_room,
            sync=lambda: spool.sync(SYNC_SECONDS, unless_refused=True),
            kept=group.wait if options.durable else None,
            flush=flush,
            refuses=options.refuses,
        )
        runner = web.AppRunner(proxy.application(), handler_cancellation=True, shutdown_timeout=_LEAVING_SECONDS)
        await runner.setup()
        assert runner.server is not None
        gate.guard(runner.server)
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        server = await loop.create_server(gate, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        listener.listen(_WAITING)
        address = listener.getsockname()
        host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
        ready(f"http://{host}:{address[1]}/v1")
        asking = asyncio.create_task(_introduce(upstream, options.settings.asks, say))
        try:
            while not stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _SWEEP_SECONDS)
                book.expire(datetime.now(UTC), options.idle)
                await asyncio.to_thread(book.ends.save)
        finally:
            asking.cancel()
            server.close()
            await runner.cleanup()


async def _introduce(upstream: Upstream, asks: str, say: Callable[[str], None]) -> None:
    say(await upstream.described(asks))


def _room_for_files(wanted: int) -> int:
    """As many connections as this process can hold, each with one to the upstream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _FILES_OF_OURS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return min(wanted, (soft - _FILES_OF_OURS) // 2)
    return wanted
