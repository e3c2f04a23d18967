"""The viewer answers its own pages alone.

Streamlit accepts the websocket of any page that this machine serves, whatever its port, and so would let the page of
another local server read the whole lake. Here a request must name this server as its host (which keeps out names that
were rebound to this machine), and whoever sends an `Origin`, as browsers do for every page, must come from that host's
port under one of this server's names. The port is that of the request, not the one listened on: behind `ssh -L` they
differ.

A page of another server that frames the viewer would get a reader's clicks to write annotations: such a frame has the
viewer's own origin. So every answer forbids browsers to show it in a frame of another origin.
"""

from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = frozenset({"127.0.0.1", "localhost"})
"""Names of this server."""
NO_OTHER_PAGE = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
"""Headers of an answer that no other page may embed or read as something else."""
_NO_FOREIGN_FRAME = [(b"content-security-policy", b"frame-ancestors 'self'"), (b"x-frame-options", b"SAMEORIGIN")]
_POLICY_VIOLATION = 1008
_REFUSAL = b"The viewer answers only pages that it served itself, under 127.0.0.1 or localhost.\n"


class SameOrigin:
    """ASGI middleware that refuses foreign requests: 403 over HTTP, and for a websocket before it is accepted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        kind = scope["type"]
        if kind not in ("http", "websocket") or _is_own(scope["headers"]):
            await self._app(scope, receive, _unframed(send) if kind == "http" else send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})


def _unframed(send: Send) -> Send:
    """Return a `send` that forbids foreign frames; policies of an answer's own stay, and browsers apply them all."""

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_NO_FOREIGN_FRAME]}
        await send(message)

    return add


def is_fetched_by_own_page(headers: Mapping[str, str]) -> bool:
    """Whether no other page's script or element asks; of a program that is no browser there is nothing to tell.

    Browsers send no `Origin` with a GET, so `SameOrigin` does not see it; and it lets links from elsewhere lead here.
    """
    return headers.get("sec-fetch-site", "same-origin") == "same-origin"


def _is_own(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the one host is this server, and every origin is a page of it."""
    hosts, origins = (
        [value.decode("latin-1") for name, value in headers if name == wanted] for wanted in (b"host", b"origin")
    )
    if len(hosts) != 1:
        return False
    here = _place(urlsplit(f"//{hosts[0]}"))
    return here is not None and all(page.scheme == "http" and _place(page) == here for page in map(urlsplit, origins))


def _place(url: SplitResult) -> int | None:
    """The port of an address at this server; None of any other."""
    try:
        port = url.port
    except ValueError:
        return None
    is_bare = not (url.path or url.query or url.fragment or url.username or url.password)
    return (port or 80) if is_bare and url.hostname in NAMES else None
