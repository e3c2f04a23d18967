"""The proxy as a process: it listens, records into a spool, delivers the spool to the lake, and ends when all is there.

The process locks its spool folder. It adopts the spools that crashed proxies left on the same port. Their finished
episodes are delivered. Their open sessions are read back, and calls join them as before.
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
from lake.live.delivery import CLOSING_SECONDS, Delivery, DeliveryCounts, EpisodeLog, adopt_spools
from lake.live.frames import Frame, encode
from lake.live.owners import (
    Owner,
    look_up_lake_id,
    open_owners_lake,
    prepare_lake_folder,
    proxy_spool_root,
    resolve_proxy_owner,
)
from lake.live.proxy.app import Proxy, RequestLimits
from lake.live.proxy.connections import Gate
from lake.live.proxy.relay import CallSettings
from lake.live.proxy.sessions import ENDED_FILE, ProxyCounts, SessionRegistry
from lake.live.proxy.upstream import Upstream, parse_base_url
from lake.live.sink import SYNC_SECONDS
from lake.live.spool import BUFFER_BYTES, MAX_BYTES, GroupSync, Spool

_RESERVE = 4 << 20
"""Bytes of the spool that are reserved for running calls."""
_OTHER_FILES = 128
"""Open files of this process besides connections."""
_SWEEP_SECONDS = 1.0
_IDLE_UPSTREAM_SECONDS = 4.0
"""Engines close idle connections after 5 s (uvicorn). A call must not use one that is being closed."""
_READ_BYTES = 128 << 10
"""Bytes of an answer to buffer for a slow client; up to twice as many are held."""
_ACCEPTED_AT_ONCE, _WAITING = 128, 2048
"""Connections: a burst of new ones must not displace one whose request was not read yet."""
_DURABLE_SECONDS = 30.0
"""How long the end of an answer waits for a slow disk."""
_LEAVING_SECONDS = 2.5
"""Half of the time that running calls get when the proxy stops, because aiohttp waits twice."""
_log = logging.getLogger("trajlake")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a proxy."""

    upstream: str
    lake_uri: str
    run: str
    host: str = "127.0.0.1"
    port: int = 8484
    token: str | None = None
    unfinished: str = "continue"
    """Open sessions when the proxy dies or stops: `continue` lets calls join them later, `drop` leaves them out."""
    idle: float = 600.0
    """Seconds without a call after which a session ends."""
    timeout: float = 600.0
    """Seconds that the upstream may be silent."""
    refuses: bool = True
    """Refuse calls without room to record. Otherwise they pass, and their episodes are left out."""
    durable: bool = False
    """Hold back the end of an answer until its call is on disk."""
    max_connections: int = 4096
    spool_bytes: int = MAX_BYTES
    spool: Path | None = None
    settings: CallSettings = CallSettings()
    limits: RequestLimits = RequestLimits()
    batch_seconds: float = 2.0


class ProxyReport(msgspec.Struct):
    """What a proxy recorded and delivered."""

    calls: ProxyCounts
    delivered: DeliveryCounts
    is_all: bool
    """The spool is empty."""
    root: Path
    """Folder of the spool."""


def serve(options: Options, *, ready: Callable[[str], None], say: Callable[[str], None]) -> ProxyReport:
    """Run a proxy until SIGINT or SIGTERM.

    Args:
        options: options of the proxy.
        ready: called with the base URL once the proxy listens.
        say: called with a description of the upstream once it is known.

    Raises:
        UsageError: an address that cannot be listened on, an invalid upstream, or an invalid lake address.
        LakeAccessError: the spool folder cannot be made, or no lake can be at its address.
    """
    parse_base_url(options.upstream)
    with prepare_lake_folder(options.lake_uri):
        return _serve(options, ready, say)


def _serve(options: Options, ready: Callable[[str], None], say: Callable[[str], None]) -> ProxyReport:
    root = proxy_spool_root(options.lake_uri, options.port, options.spool)
    # Listen before touching the spools of an earlier process: if it still runs, its port is in use.
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=_WAITING)
    except OSError as error:
        msg = f"{options.host}:{options.port}: {error.strerror or error}; choose another --port or --host"
        raise UsageError(msg) from error
    owner = resolve_proxy_owner(options.lake_uri, root)
    spool = Spool.create(root, owner=owner, max_bytes=options.spool_bytes)

    def emit(key: bytes, number: int, frame: Frame, is_reserved: bool) -> None:
        spool.append(encode(key, number, frame), is_reserved=is_reserved)

    drops = options.unfinished == "drop"
    # Dropped sessions are played again under the same names, so earlier ends must not count.
    ended_file = root / (ENDED_FILE if owner.lake is None else f"{ENDED_FILE}-{owner.lake}")
    registry = SessionRegistry(emit, run=options.run, ended_file=None if drops else ended_file)
    if not drops:
        resume(root, spool, registry, owner)
    delivery = Delivery(
        lambda: open_owners_lake(owner, options.lake_uri),
        spool,
        root=root,
        identify=lambda: look_up_lake_id(options.lake_uri),
        unfinished="drop" if drops else "record",
        batch_seconds=options.batch_seconds,
    )
    try:
        delivery.start()
        asyncio.run(_run(options, listener, spool, delivery, registry, ready, say))
    finally:
        registry.stop(datetime.now(UTC), drop=drops)
        registry.ended.save()
        spool.sync(10.0)
        is_all = delivery.close()
        spool.close(remove=is_all)
    return ProxyReport(registry.counts, delivery.counts, is_all, root)


def resume(root: Path, spool: Spool, registry: SessionRegistry, owner: Owner) -> None:
    """Reopen the sessions that crashed proxies left open: copy their frames to our spool and read them back.

    If this process is killed in between, both spools have the frames. They have the same keys and numbers, so they
    still are one episode.
    """
    for old in adopt_spools(root, owner):
        try:
            log = EpisodeLog(old)
            log.refresh()
            keys = [key for key in log.open if log.has_beginning(key) and not log.count_missing(key)]
            if keys:
                log.copy(keys, spool)
                for key in keys:
                    registry.resume(key, log.frames(key))
                log.release(keys)
        except (TrajlakeError, OSError, ValueError, LookupError) as error:
            _log.warning("open episodes of %s cannot be read back: %s", old.folder, error)
        old.close()


async def _run(
    options: Options,
    listener: socket.socket,
    spool: Spool,
    delivery: Delivery,
    registry: SessionRegistry,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    def has_room(size: int) -> bool:
        # Frames that a full disk does not accept gather in memory.
        return spool.size + size + _RESERVE <= options.spool_bytes and spool.unwritten_bytes <= BUFFER_BYTES // 2

    def flush() -> str | None:
        is_all = spool.sync(SYNC_SECONDS) and delivery.flush(CLOSING_SECONDS)
        return None if is_all else delivery.counts.problem or "it took too long"

    async def introduce() -> None:
        say(await upstream.describe(options.settings.asks))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=_IDLE_UPSTREAM_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        trust_env=False,
        read_bufsize=_READ_BYTES,
    ) as session:
        gate = Gate(_limit_connections(options.max_connections))
        upstream = Upstream(options.upstream, session, timeout=options.timeout)
        group = GroupSync(lambda: spool.sync(_DURABLE_SECONDS, unless_refused=True))
        proxy = Proxy(
            upstream,
            registry,
            settings=options.settings,
            limits=options.limits,
            gate=gate,
            token=options.token,
            has_room=has_room,
            sync=lambda: spool.sync(SYNC_SECONDS, unless_refused=True),
            wait_for_disk=group.wait if options.durable else None,
            flush=flush,
            refuses=options.refuses,
        )
        runner = web.AppRunner(proxy.application(), handler_cancellation=True, shutdown_timeout=_LEAVING_SECONDS)
        await runner.setup()
        gate.server = runner.server
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        server = await loop.create_server(gate, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        listener.listen(_WAITING)
        address = listener.getsockname()
        host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
        ready(f"http://{host}:{address[1]}/v1")
        introducing = asyncio.create_task(introduce())
        try:
            while not stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _SWEEP_SECONDS)
                registry.expire(datetime.now(UTC), options.idle)
                await asyncio.to_thread(registry.ended.save)
        finally:
            introducing.cancel()
            server.close()
            await runner.cleanup()


def _limit_connections(most: int) -> int:
    """Return how many connections this process can hold, each with one to the upstream; raises its file limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return min(most, (soft - _OTHER_FILES) // 2)
    return most
