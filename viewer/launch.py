"""Command `view`: start the viewer's server on this machine.

The server listens on 127.0.0.1 only, answers its own pages only (`viewer.same_origin`), sends no usage statistics, and
writes annotations and saved views, if anything (`viewer.annotations`, `viewer.views`). It runs in this process: ending
the command ends it.
"""

import os
import pkgutil
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import click

from lake.cli.options import Lakes, lakes_option
from lake.errors import UsageError
from viewer.environment import READ_ONLY, name_lakes

HOST = "127.0.0.1"
FIRST_PORT = 8501
"""Port tried first when none is given."""
_TRIED = 50
_PATIENCE = 60.0
"""Seconds the server may take to answer before the address is printed nevertheless."""


@click.command()
@lakes_option
@click.option(
    "--port", type=click.IntRange(1, 65535), help=f"Port.  [default: the first free one from {FIRST_PORT} on]"
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option("--read-only", is_flag=True, help="Offer no annotating and no saving of views: the lake is only read.")
def view(lake_uri: Lakes, port: int | None, no_browser: bool, read_only: bool) -> None:
    """Open the viewer on a lake, or on several as one: runs, episodes, groups, training, each with its advantages.

    Prints the address once the server answers. Ctrl-C ends it. It writes nothing but annotations and saved views.
    """
    import lake

    opened = lake.open(lake_uri)
    shown = tuple(member.uri for member in opened.members)
    chosen = free_port(port)
    address = f"http://{HOST}:{chosen}"
    said = f"{' and '.join(shown)} {'is' if len(shown) == 1 else 'are'} shown at {address} (Ctrl-C ends it)"
    threading.Thread(target=_announce, args=(address, said, not no_browser), daemon=True).start()
    os.environ[READ_ONLY] = "1" if read_only else "0"
    serve(shown[0] if len(shown) == 1 else shown, chosen)


def free_port(wanted: int | None) -> int:
    """The wanted port, or the first free one from `FIRST_PORT` on. Raises UsageError: all that were tried are taken."""
    for port in [wanted] if wanted else range(FIRST_PORT, FIRST_PORT + _TRIED):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    taken = f"port {wanted} is" if wanted else f"ports {FIRST_PORT} to {FIRST_PORT + _TRIED - 1} are all"
    raise UsageError(f"{taken} in use on {HOST}; choose another --port")


def serve(lakes: Lakes, port: int) -> None:
    """Run Streamlit in this process until it is told to stop."""
    import streamlit
    from starlette.middleware import Middleware

    from viewer import download
    from viewer.same_origin import SameOrigin
    from viewer.theme import STREAMLIT_OPTIONS
    from viewer.transcript import route

    name_lakes(lakes)
    # Whatever a configuration file of the reader says: what is given here wins.
    options = STREAMLIT_OPTIONS | {
        "server.address": HOST,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.enableCORS": True,
        "server.corsAllowedOrigins": [],
        "server.enableXsrfProtection": True,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorLinks": "false",
        "logger.hideWelcomeMessage": True,
        "logger.level": "warning",
    }
    script = Path(__file__).with_name("app.py")
    routes = [*download.ROUTES, *route.ROUTES]
    app = streamlit.App(script, middleware=[Middleware(SameOrigin)], lifespan=_with_pages, routes=routes)
    # The server has shut down by the time it hands Ctrl-C on.
    with suppress(KeyboardInterrupt):
        app.run(config=options)


@asynccontextmanager
async def _with_pages(_: object) -> AsyncIterator[None]:
    """Hold the first request back until everything is imported."""
    import_pages()
    yield


def import_pages() -> None:
    """Import everything that the pages use, before sessions run in threads.

    Libraries ask each other through `sys.modules` whether pandas or Polars is there, and would find the module
    that another session has half imported.
    """
    import viewer
    import viewer.queries
    import viewer.transcript

    for name in ("altair", "pandas", "lake.opening"):  # Altair: for the chart of a query
        import_module(name)
    for package in (viewer, viewer.queries, viewer.transcript):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            # The script itself is run, not imported.
            if module.name != "viewer.app":
                import_module(module.name)


def _announce(address: str, said: str, open_browser: bool) -> None:
    """Say it, and open the address, once the server answers."""
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        try:
            with urlopen(f"{address}/_stcore/health", timeout=1):
                break
        except (URLError, OSError):
            time.sleep(0.1)
    click.echo(said)
    sys.stdout.flush()
    if open_browser:
        webbrowser.open(address)
