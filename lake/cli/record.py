"""Command `record`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lake.cli.options import lake_option
from lake.read.text_table import cell, counted

if TYPE_CHECKING:
    from lake.live.proxy.serve import Outcome

_LOCAL = ("127.0.0.1", "::1", "localhost")
_MB = 1 << 20


@click.command()
@click.option("--upstream", required=True, metavar="URL", help="Base URL of the engine or vendor.")
@lake_option
@click.option("--run", "run_id", default="live", show_default=True, help="Run of calls that name none.")
@click.option("--port", type=click.IntRange(0, 65535), default=8484, show_default=True, help="0: any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Any other address needs --token.")
@click.option(
    "--token", help="What requests have to bring, in the header X-Trajlake-Token; better in TRAJLAKE_RECORD_TOKEN."
)
@click.option(
    "--idle",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds without a call after which an episode ends.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds that the upstream may be silent.",
)
@click.option(
    "--ask",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Ask the engine for token ids and log-probabilities; auto: where it is known to answer (vLLM).",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["processed", "raw"]),
    help="As the engine was started with; without it, temperatures other than 1 are refused for ratio losses.",
)
@click.option(
    "--on-full",
    type=click.Choice(["refuse", "drop"]),
    default="refuse",
    show_default=True,
    help="Without room to record: refuse calls, or let them go on unrecorded.",
)
@click.option("--max-body", type=click.IntRange(min=1), default=64, show_default=True, help="MB of a request.")
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Open connections; more are refused.",
)
@click.option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for what is not yet in the lake.  [default: below TRAJLAKE_SPOOL or the user's state]",
)
@click.option("--spool-size", type=click.IntRange(min=64), default=1024, show_default=True, help="MB of it.")
def record(
    upstream: str,
    lake_uri: str,
    run_id: str,
    port: int,
    host: str,
    token: str | None,
    idle: float,
    timeout: float,
    ask: str,
    logprobs_mode: str | None,
    on_full: str,
    max_body: int,
    max_connections: int,
    spool: Path | None,
    spool_size: int,
) -> None:
    """Record agents through a proxy: point their base URL at it, and each call is a step in the lake.

    Chat completions, completions, the Responses API and Anthropic's messages, streaming or not; everything else passes
    by. Of vLLM, exact token ids and log-probabilities are recorded, and the client sees only what it asked for. Keys
    pass through and are stored nowhere.

    Calls are joined to episodes by their base URL (http://.../ep/KEY/v1, http://.../run/R/task/T/rollout/N/v1), by
    headers (X-Trajlake-Task, -Rollout, -Run, ...; X-Session-ID), else by the conversation that they go on with. POST
    {"reward": 1.0} to .../v1/end ends an episode; else it ends when it is idle, or with the proxy. Killed, the proxy
    goes on where it was at the next start.
    """
    from lake.errors import MissingExtraError, UsageError

    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise MissingExtraError('trajlake record needs the package aiohttp: pip install "trajlake[record]"') from error
    from lake.live.proxy.app import Limits
    from lake.live.proxy.forward import Settings
    from lake.live.proxy.serve import Options, serve

    if host not in _LOCAL and not token:
        raise UsageError(
            f"--host {host} lets other machines in, so it needs a --token of your own (in the environment: "
            "TRAJLAKE_RECORD_TOKEN), which they send in the header X-Trajlake-Token; or leave --host out"
        )
    options = Options(
        upstream=upstream,
        lake_uri=lake_uri,
        run=run_id,
        host=host,
        port=port,
        token=token,
        idle=idle,
        timeout=timeout,
        refuses=on_full == "refuse",
        max_connections=max_connections,
        spool=spool,
        spool_bytes=spool_size * _MB,
        settings=Settings(asks=ask, logprobs_mode=logprobs_mode),
        limits=Limits(max_body=max_body * _MB, max_bodies=max(512, 2 * max_body) * _MB),
    )
    outcome = serve(
        options, ready=lambda url: click.echo(f"recording {cell(url)} into {cell(lake_uri)}; Ctrl-C ends it")
    )
    _tell(outcome)


def _tell(outcome: "Outcome") -> None:
    calls, lake_counts = outcome.calls, outcome.delivered
    click.echo(
        f"{counted(calls.calls, 'call')}: {counted(calls.steps, 'step')}, {calls.failed} failed; "
        f"{counted(lake_counts.new, 'episode')} new, {lake_counts.present} already present, "
        f"{lake_counts.rejected} rejected"
    )
    if calls.dropped or calls.unreadable:
        click.echo(f"{calls.dropped} episodes found no room and {calls.unreadable} calls could not be read", err=True)
    if not outcome.is_all:
        why = lake_counts.problem or "it took too long"
        click.echo(
            f"not all of it is in the lake ({cell(why)}); the next `trajlake record` delivers the rest", err=True
        )
