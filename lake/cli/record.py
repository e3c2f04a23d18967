"""The commands `record` and `spools`."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import echo_rows, format_option, lake_option
from lake.errors import MissingExtraError, UsageError
from lake.read.text_table import count_noun, format_cell

if TYPE_CHECKING:
    from lake.live.delivery import SpoolStatus
    from lake.live.proxy.serve import ProxyReport

_LOCAL = ("127.0.0.1", "::1", "localhost")
_MB = 1 << 20


@click.command()
@click.option("--upstream", required=True, metavar="URL", help="Base URL of the engine or API to forward calls to.")
@lake_option
@click.option("--run", default="live", show_default=True, help="Run name for calls that do not set one.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8484,
    show_default=True,
    help="Port to listen on (0 picks a free port).",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; addresses other than localhost require --token.",
)
@click.option(
    "--token",
    help="Token that clients must send in the X-Trajlake-Token header; best set in TRAJLAKE_RECORD_TOKEN.",
)
@click.option(
    "--idle",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Idle time after which an episode ends, in seconds.",
)
@click.option(
    "--unfinished",
    type=click.Choice(["continue", "drop"]),
    default="continue",
    show_default=True,
    help="Episodes that are open when the proxy ends or crashes. continue: later calls add to them; drop: they are "
    "discarded and can be played again.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Timeout for an upstream response that stalls, in seconds.",
)
@click.option(
    "--ask",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Request token ids and log-probabilities from the engine. auto: only from vLLM and SGLang.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["processed", "raw"]),
    help="Log-probability mode of the engine. If it is unknown, losses with importance ratios refuse temperatures "
    "other than 1.  [default: reported by vLLM with VLLM_SERVER_DEV_MODE=1]",
)
@click.option(
    "--on-full",
    type=click.Choice(["refuse", "drop"]),
    default="refuse",
    show_default=True,
    help="Action when the spool is full. refuse: reject calls; drop: forward calls without recording them.",
)
@click.option(
    "--durable",
    is_flag=True,
    help="Return each answer only after its call is on disk, so a crash loses no call that a client saw completed.",
)
@click.option(
    "--max-body", type=click.IntRange(min=1), default=64, show_default=True, help="Maximum request size in MB."
)
@click.option(
    "--max-answer",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum answer size in MB; longer answers are cut.",
)
@click.option(
    "--max-answers",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Maximum total size of concurrent answers in MB; above it, the longest is cut.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Maximum number of open connections; more are refused.",
)
@click.option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for recordings that are not in the lake yet.  [default: below TRAJLAKE_SPOOL or the state folder]",
)
@click.option(
    "--spool-size", type=click.IntRange(min=8), default=1024, show_default=True, help="Maximum spool size in MB."
)
def record(
    *,
    host: str,
    token: str | None,
    ask: str,
    logprobs_mode: str | None,
    on_full: str,
    max_body: int,
    max_answer: int,
    max_answers: int,
    spool_size: int,
    **proxy_options: Any,
) -> None:
    """Record agents through a proxy while they call a model.

    Set the agent's base URL to the proxy, and each call becomes a step in the lake. The proxy records chat completions,
    completions, the Responses API and Anthropic's messages, streaming or not. It forwards all other requests without
    recording them. From vLLM it records exact token ids and log-probabilities, and removes them from the answer unless
    the client asked for them. Keys are forwarded and never stored.

    A call joins an episode by its base URL (http://.../ep/KEY/v1, http://.../run/R/task/T/rollout/N/v1), by headers
    (X-Trajlake-Task, -Rollout, -Run, ...; X-Session-ID), else by the conversation that it continues. POST
    {"reward": 1.0} to .../v1/end ends an episode; a numbered rollout then accepts no more calls. Otherwise an episode
    ends when it is idle or the proxy stops, and later calls continue it as another episode. After a crash, the proxy
    resumes at its next start.
    """
    token = (token or "").strip() or None  # a header value has no blanks around it
    _check(proxy_options["run"], host, token, max_body, spool_size)
    if proxy_options["durable"] and on_full == "drop":
        raise UsageError(
            "--durable cannot be combined with --on-full drop: it records every answered call, and drop skips some"
        )
    from lake.live.proxy.app import RequestLimits
    from lake.live.proxy.relay import CallSettings
    from lake.live.proxy.serve import Options, serve

    options = Options(
        host=host,
        token=token,
        refuses=on_full == "refuse",
        spool_bytes=spool_size * _MB,
        settings=CallSettings(asks=ask, logprobs_mode=logprobs_mode, max_answer=max_answer * _MB),
        limits=RequestLimits(
            max_body=max_body * _MB, max_bodies=max(512, 2 * max_body) * _MB, max_answers=max_answers * _MB
        ),
        **proxy_options,  # named like the fields of `Options`
    )

    def greet(url: str) -> None:
        click.echo(f"recording {format_cell(url)} into {format_cell(options.lake_uri)}; press Ctrl-C to stop")

    _print_report(serve(options, ready=greet, say=lambda text: click.echo(format_cell(text))))


def _check(run: str, host: str, token: str | None, max_body: int, spool_size: int) -> None:
    """Raise a TrajlakeError if options conflict or the package aiohttp is missing."""
    from lake.formats.base.secrets import remove_keys
    from lake.records import check_run_name

    check_run_name(run)
    if remove_keys(run) != run:
        raise UsageError("--run looks like a key, and run names are recorded; use another name")
    if host not in _LOCAL and not token:
        raise UsageError(
            f"--host {host} admits other machines, so it requires a --token (in the environment: "
            "TRAJLAKE_RECORD_TOKEN), which they send in the header X-Trajlake-Token; or leave --host out"
        )
    if 2 * max_body > spool_size:
        raise UsageError(f"--spool-size is {spool_size} MB; valid: at least twice --max-body, which is {max_body} MB")
    if find_spec("aiohttp") is None:
        raise MissingExtraError('trajlake record needs the package aiohttp: pip install "trajlake[record]"')


def _print_report(report: "ProxyReport") -> None:
    calls, lake_counts = report.calls, report.delivered
    click.echo(
        f"{count_noun(calls.calls, 'call')}: {count_noun(calls.steps, 'step')}, {calls.failed} failed; "
        f"{count_noun(lake_counts.new, 'episode')} new, {lake_counts.present} already present, "
        f"{lake_counts.rejected} rejected"
    )
    if calls.stopped:
        click.echo(
            f"{count_noun(calls.stopped, 'open episode')} ended with the proxy (`stop_reason` is proxy_stopped); later "
            "calls start new episodes under the same names, as continuations"
        )
    if calls.left_out:
        click.echo(f"{count_noun(calls.left_out, 'open episode')} left out")
    if calls.dropped or calls.unreadable:
        click.echo(
            f"{calls.dropped} episodes did not fit the spool and {calls.unreadable} calls could not be read", err=True
        )
    if calls.crowded_out:
        click.echo(
            f"{calls.crowded_out} episodes were ended early because too many were open; use a smaller --idle",
            err=True,
        )
    if not report.is_all:
        reason = lake_counts.problem or "it took too long"
        click.echo(
            f"not all episodes are in the lake ({format_cell(reason)}); the rest is kept in {report.root}: once the "
            "lake is writable, the next `trajlake record` with the same --lake, --port and --spool delivers it",
            err=True,
        )


@click.command()
@lake_option
@click.option(
    "--deliver",
    multiple=True,
    metavar="FOLDER",
    help="Spool to deliver to the lake now, with open episodes as aborted; repeatable.  [default: none]",
)
@click.option(
    "--delete",
    multiple=True,
    metavar="FOLDER",
    help="Spool to delete with all its recordings; repeatable.  [default: none]",
)
@click.option("--yes", is_flag=True, help="Delete without asking.")
@format_option
def spools(lake_uri: str, deliver: tuple[str, ...], delete: tuple[str, ...], yes: bool, output_format: str) -> None:
    """List recordings on this machine that are not in the lake yet.

    A spool that a running process records into is `in use`. If its process died, it is `left`: the next recorder, proxy
    or collection of the same kind delivers it. A spool is `orphaned` if it was recorded for a deleted lake at this
    address; only --deliver delivers it. Spools in folders that --spool named are not listed.
    """
    import lake as lakes
    from lake.live import delivery
    from lake.live.delivery import deliver_spool
    from lake.live.owners import get_owner

    target = lakes.open(lake_uri)
    by_name = {str(spool.folder): spool for spool in delivery.list_spools(get_owner(target))}
    if unknown := sorted({*deliver, *delete} - by_name.keys()):
        raise UsageError(
            f"this lake has no spool {unknown[0]}; valid: {', '.join(by_name) or 'none, there is no spool'}"
        )
    if busy := [name for name in (*deliver, *delete) if by_name[name].is_in_use]:
        raise UsageError(f"{busy[0]} is in use: stop the process that records into it; it delivers the spool")
    if not deliver and not delete:
        echo_rows([_describe_spool(name, spool) for name, spool in by_name.items()], output_format)
        return
    if delete and not yes:
        question = f"Delete {count_noun(len(delete), 'spool')} permanently?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question} There is no terminal to ask on: add --yes. Nothing was changed")
        click.confirm(question, abort=True, err=True)
    for name in deliver:
        counts = deliver_spool(by_name[name], target)
        click.echo(
            f"{name}: {count_noun(counts.new, 'episode')} delivered, {counts.aborted} of them aborted (already "
            f"present: {counts.present}; rejected: {counts.rejected})"
        )
    for name in delete:
        delivery.delete_spool(by_name[name])
        click.echo(f"{name}: deleted")


def _describe_spool(name: str, spool: "SpoolStatus") -> dict[str, Any]:
    """Return a spool's row of the list."""
    return {
        "spool": name,
        "state": "in use" if spool.is_in_use else "orphaned" if spool.is_orphan else "left",
        "lake_id": None if spool.owner is None else spool.owner.lake,
        "finished": spool.finished,
        "open": spool.open,
        "bytes": spool.bytes,
    }
