"""The viewer's server: which lakes it shows, and which requests it answers.

Streamlit accepts the websocket of any page that this machine serves, on any port. The page of another local server
could read the whole lake. Here a request must name this server as its host, which keeps out names that were rebound to
this machine. A client that sends an `Origin`, as browsers do for every page, must come from that host's port under one
of this server's names. The port is that of the request, because behind `ssh -L` it differs from the port listened on.

A page of another server that frames the viewer could make a reader's clicks write annotations, because the frame has
the viewer's origin. So every answer forbids browsers to show it in a frame of another origin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, urlsplit

from lake.cli.options import Lakes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = frozenset({"127.0.0.1", "localhost"})
"""Host names of this server."""
NO_OTHER_PAGE = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
"""Headers of an answer that another site's page may neither embed nor read as another type."""
_NO_FOREIGN_FRAME = [(b"content-security-policy", b"frame-ancestors 'self'"), (b"x-frame-options", b"SAMEORIGIN")]
_BACKEND = b"<head><script>window.__streamlit = { BACKEND_BASE_URL: location.origin };</script>"
_POLICY_VIOLATION = 1008
_PAGES_OF_IDS = ("episode", "group", "job")
_UNKNOWN_PATH = (
    '<!doctype html><html lang="en"><meta name="color-scheme" content="light dark"><title>No such page</title>'
    '<body style="font: 1rem sans-serif; margin: 3rem"><a href="/">Runs</a> <a href="/episodes">Episodes</a> '
    '<a href="/groups">Groups</a> <a href="/jobs">Jobs</a>'
)
_REFUSAL = b"The viewer answers only pages that it served itself, under 127.0.0.1 or localhost.\n"


class SameOrigin:
    """ASGI middleware that refuses foreign requests: 403 over HTTP, and for a websocket before it is accepted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        kind = scope["type"]
        if kind not in ("http", "websocket") or _is_own_request(scope["headers"]):
            if kind == "http":
                send = _name_backend(scope["path"], _forbid_foreign_frames(send))
                headers = [pair for pair in scope["headers"] if _is_passed_on(scope["path"], pair[0])]
                scope = {**scope, "headers": headers}
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await _answer(send, 403, b"text/plain", _REFUSAL)


def _forbid_foreign_frames(send: Send) -> Send:
    """Return a `send` that adds headers against foreign frames; browsers apply existing policies too."""

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_NO_FOREIGN_FRAME]}
        await send(message)

    return add


def _is_passed_on(path: str, name: bytes) -> bool:
    """Return whether a header of a request reaches the app; pages must not be compressed before `_name_backend`."""
    return name != b"accept-encoding" or "." in path or path.startswith("/_stcore")


async def _answer(send: Send, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _render_unknown_path(path: str) -> bytes:
    """Return the answer to a path that no page has: links to the lists, and to what an id at its end names."""
    from viewer.plain import one_line

    _, name, end = f"{path}/".split("/", 2)
    target = f"/{name}?{name}={quote(end.strip('/'))}"
    link = f' <a href="{target}">{target}</a>' if name in _PAGES_OF_IDS else ""
    return f"{_UNKNOWN_PATH}<p>There is no page {escape(one_line(path, 120))}.{link}".encode()


def _name_backend(path: str, send: Send) -> Send:
    """Return a `send` that tells pages where the server is, and gives them the viewer's style.

    Streamlit's page looks for its server under the page's own path first, which fails, and then waits before it tries
    the root. Streamlit answers every path with its page, which looks for its modules under that path; paths that no
    page has get an answer of the viewer.
    """
    from viewer.figures import STYLE

    paths = import_module("viewer.navigation").PATHS  # the pages name this module in turn
    held: list[Message] = []

    async def pass_on(message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        headers = dict(message.get("headers", ())) if is_start else {}
        # A file that the reader saves is not a page.
        if headers.get(b"content-type", b"").startswith(b"text/html") and b"content-disposition" not in headers:
            held.append(message)
        elif not held or is_start:
            await send(message)
        else:
            held.append(message)
            if not message.get("more_body") and path not in paths:
                await _answer(send, 404, b"text/html; charset=utf-8", _render_unknown_path(path))
            elif not message.get("more_body"):
                body = b"".join(part.get("body", b"") for part in held[1:]).replace(b"<head>", _BACKEND, 1)
                # At the end, where it wins over Streamlit's rules; before any script, so that nothing moves later.
                body = body.replace(b"</body>", f"{STYLE}</body>".encode(), 1)
                length = (b"content-length", str(len(body)).encode())
                other_headers = [pair for pair in held[0]["headers"] if pair[0] not in (b"content-length", b"etag")]
                await send({**held[0], "headers": [*other_headers, length]})
                await send({"type": "http.response.body", "body": body})

    return pass_on


def is_fetched_by_own_page(headers: Mapping[str, str]) -> bool:
    """Return whether no other site's page asks, by the header that browsers send.

    Browsers send no `Origin` with a GET, so `SameOrigin` cannot check it. It also lets links from other sites through.
    A program that is not a browser sends no such header, and passes.
    """
    return headers.get("sec-fetch-site", "same-origin") == "same-origin"


def _is_own_request(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the only host is this server, and every origin is a page of it."""
    hosts, origins = (
        [value.decode("latin-1") for name, value in headers if name == header] for header in (b"host", b"origin")
    )
    if len(hosts) != 1:
        return False
    port = _get_port(urlsplit(f"//{hosts[0]}"))
    return port is not None and all(
        page.scheme == "http" and _get_port(page) == port for page in map(urlsplit, origins)
    )


def _get_port(url: SplitResult) -> int | None:
    """Return the port of an address at this server; None for any other address."""
    try:
        port = url.port
    except ValueError:
        return None
    is_bare = not (url.path or url.query or url.fragment or url.username or url.password)
    return (port or 80) if is_bare and url.hostname in NAMES else None


ENVIRONMENT = "TRAJLAKE_LAKE"
"""Environment variable with the lake; several as a JSON list of addresses."""


READ_ONLY = "TRAJLAKE_VIEW_READ_ONLY"
"""Environment variable that is `1` for a viewer that writes no annotations and no saved views."""


def is_read_only() -> bool:
    """Return whether this viewer offers no writing."""
    return os.environ.get(READ_ONLY) == "1"


def set_lakes(lakes: Lakes) -> None:
    """Make the pages, which run in this process, show a lake, or several as one."""
    os.environ[ENVIRONMENT] = lakes if isinstance(lakes, str) else json.dumps(lakes)


def read_lakes() -> Lakes | None:
    """Return the lake to show, or several in their order; None if the environment names none."""
    lakes = os.environ.get(ENVIRONMENT)
    # The address of one lake is no JSON list: the command writes it as a URI or an absolute path.
    return tuple(json.loads(lakes)) if lakes and lakes.startswith('["') else lakes or None
