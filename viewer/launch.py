"""Commands `view`, which starts the viewer's server on this machine, and `page`, which writes an HTML file.

The server listens on 127.0.0.1 only, answers its own pages only (`viewer.server`) and sends no usage statistics. It
writes only annotations and saved views (`viewer.annotations`, `viewer.components`). It runs in this process, so it ends
with the command.
"""

import os
import pkgutil
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import click

from lake.cli.options import (
    Lakes,
    as_of_option,
    credit_option,
    episodes_options,
    lakes_option,
    open_snapshot,
    selection_option,
)
from lake.errors import UsageError
from viewer.server import READ_ONLY, set_lakes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from lake.read.snapshot import Snapshot

HOST = "127.0.0.1"
FIRST_PORT = 8501
"""The first port to try when `--port` is not set."""
_MAX_PORTS = 50
_PATIENCE = 60.0
"""Seconds to wait for the server before its address is printed anyway."""
_ROUTES = {
    "/download": "viewer.download",
    "/opening": "viewer.screens.episodes",
    "/transcript": "viewer.transcript.component",
}
"""Modules that answer a path, each with `answer_request`."""


@click.command()
@lakes_option
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Port to listen on.  [default: the first free one from {FIRST_PORT} on]",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option("--read-only", is_flag=True, help="Disable annotations and saved views; the lake is only read.")
def view(lake_uri: Lakes, port: int | None, no_browser: bool, read_only: bool) -> None:
    """Open the viewer on a lake, or on several as one. It shows runs, episodes, groups, training and advantages.

    The command prints the address once the server answers. Ctrl-C ends the viewer. The viewer writes only annotations
    and saved views.
    """
    import lake

    uris = tuple(member.uri for member in lake.open(lake_uri).members)
    port = find_free_port(port)
    address = f"http://{HOST}:{port}"
    line = f"{' and '.join(uris)} {'is' if len(uris) == 1 else 'are'} shown at {address} (Ctrl-C ends it)"
    threading.Thread(target=_announce, args=(address, line, not no_browser), daemon=True).start()
    os.environ[READ_ONLY] = "1" if read_only else "0"
    serve(uris[0] if len(uris) == 1 else uris, port)


def find_free_port(port: int | None) -> int:
    """Return the port if it is free; for None, the first free one from `FIRST_PORT` on.

    Raises:
        UsageError: the port, or each of the ports that were tried, is in use.
    """
    for candidate in [port] if port else range(FIRST_PORT, FIRST_PORT + _MAX_PORTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, candidate))
            except OSError:
                continue
            return candidate
    ports = f"port {port} is" if port else f"ports {FIRST_PORT} to {FIRST_PORT + _MAX_PORTS - 1} are all"
    raise UsageError(f"{ports} in use on {HOST}; choose another --port")


def serve(lakes: Lakes, port: int) -> None:
    """Run Streamlit in this process until Ctrl-C."""
    import streamlit
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from viewer.figures import STREAMLIT_OPTIONS
    from viewer.server import SameOrigin

    set_lakes(lakes)
    # These options win over a configuration file of the user.
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
    routes = [Route(path, _make_endpoint(module), methods=["GET"]) for path, module in _ROUTES.items()]
    app = streamlit.App(script, middleware=[Middleware(SameOrigin)], lifespan=_import_first, routes=routes)
    # The server has shut down by the time that it passes Ctrl-C on.
    with suppress(KeyboardInterrupt):
        app.run(config=options)


def _make_endpoint(module: str) -> "Callable[[Request], Response]":
    """Return an endpoint whose module is imported when the server runs: its Streamlit caches need the server."""

    def answer(request: "Request") -> "Response":
        response: Response = import_module(module).answer_request(request)
        return response

    return answer


@asynccontextmanager
async def _import_first(_: object) -> AsyncIterator[None]:
    """Hold the first request back until everything is imported."""
    import_pages()
    yield


def import_pages() -> None:
    """Import everything that the pages use, before sessions run in threads.

    Libraries look in `sys.modules` whether pandas or Polars is loaded. In a thread they could see a module that another
    session has only half imported.
    """
    import viewer
    import viewer.queries
    import viewer.screens
    import viewer.transcript

    for name in ("altair", "pandas", "lake.opening"):  # Altair: for the chart of a query
        import_module(name)
    for package in (viewer, viewer.queries, viewer.screens, viewer.transcript):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            # Streamlit runs the script itself; nothing imports it.
            if module.name != "viewer.app":
                import_module(module.name)


def _announce(address: str, line: str, open_browser: bool) -> None:
    """Print a line, and open the address, once the server answers."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            with urlopen(f"{address}/_stcore/health", timeout=1):
                break
        except (URLError, OSError):
            time.sleep(0.1)
    click.echo(line)
    sys.stdout.flush()
    if open_browser:
        webbrowser.open(address)


@click.command()
@lakes_option
@click.argument("name", metavar="[EPISODE|GROUP]", required=False)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Output file (HTML).")
@episodes_options
@selection_option
@credit_option()
@as_of_option
def page(
    lake_uri: Lakes,
    name: str | None,
    out: Path,
    where: str | None,
    selection: str | None,
    credit: str | None,
    as_of: str | None,
) -> None:
    """Write an episode, the siblings of a group, or up to 50 chosen episodes as one HTML file with an index.

    EPISODE and GROUP are ids or beginnings of ids. The file shows the conversation as the viewer does. It opens in any
    browser, without a server and without network access.
    """
    # Streamlit would warn that no server runs; writing a file needs none.
    from streamlit.logger import set_log_level

    from lake.judgements.credit import find_credit
    from lake.read.text_table import count_noun

    if (name is None) == (where is None and selection is None):
        options = "--where, --run, --task, --group or --selection"
        raise UsageError(f"name one EPISODE or GROUP, or choose episodes by {options}")
    set_log_level("ERROR")
    from viewer.queries import training
    from viewer.reader import Reader
    from viewer.transcript.page import load_episodes, load_transcripts, render_html

    snapshot = open_snapshot(lake_uri, as_of)
    read = Reader(snapshot).read
    series = read(training.look_up_credit) if credit is None else find_credit(snapshot, credit)
    series_name = None if series is None else series.text
    if name is None:
        transcripts = load_episodes(read, series_name, _choose_episodes(snapshot, where, selection))
    else:
        transcripts = load_transcripts(read, series_name, **_find_named(snapshot, name))
    out.write_bytes(render_html(transcripts))
    click.echo(f"{out}: {count_noun(len(transcripts), 'episode')}, {out.stat().st_size:,} bytes")


def _find_named(snapshot: "Snapshot", name: str) -> dict[str, str | None]:
    """Return the id of the episode or group that begins with a name."""
    from lake import ids
    from lake.read.episode_text import find_episode, find_group

    try:
        return {"episode": ids.to_text(find_episode(snapshot, name)), "group": None}
    except UsageError as error:
        try:
            return {"episode": None, "group": ids.to_text(find_group(snapshot, name))}
        except UsageError as of_group:
            raise UsageError(f"{error}; and {of_group}") from error


def _choose_episodes(snapshot: "Snapshot", where: str | None, selection: str | None) -> list[int]:
    """Return the episodes of a predicate and a selection, those of a run, task and group together.

    Raises:
        UsageError: no episode matches, or more than a file holds; a bad predicate, or no such selection.
    """
    from lake.judgements.selections import bracket_predicate, read_selection
    from viewer.transcript.page import MAX_EPISODES

    query = f"""
        SELECT episode_id FROM episodes WHERE {bracket_predicate(where)}
        ORDER BY run_id, task_id, rollout_index, attempt, episode_id
        """
    with snapshot.session() as session:
        matches = session.query(query)
    if selection is not None:
        matches = matches.join(read_selection(snapshot, selection).episodes, on="episode_id", maintain_order="left")
    if not 0 < matches.height <= MAX_EPISODES:
        fault = f"{matches.height:,} episodes match" if matches.height else "no episode matches"
        raise UsageError(f"{fault}; a file holds 1 to {MAX_EPISODES}: choose others, e.g. with --task or --where")
    return matches["episode_id"].to_list()
