"""Commands `record` and `spools`."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import echo_rows, format_option, lake_option
from lake.errors import MissingExtraError, UsageError
from lake.read.text_table import cell, counted

if TYPE_CHECKING:
    from lake.live.adoption import Held
    from lake.live.proxy.serve import Outcome

_LOCAL = ("127.0.0.1", "::1", "localhost")
_MB = 1 << 20


@click.command()
@click.option("--upstream", required=True, metavar="URL", help="Base URL of the engine or vendor.")
@lake_option
@click.option("--run", default="live", show_default=True, help="Run of calls that name none.")
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
    "--unfinished",
    type=click.Choice(["continue", "drop"]),
    default="continue",
    show_default=True,
    help="Episodes that a proxy left open when it was killed: later calls go on with them, or they are left out, to be "
    "played anew; so are those that are open at its end.",
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
    help="Ask the engine for token ids and log-probabilities; auto: where it is known to answer (vLLM, SGLang).",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["processed", "raw"]),
    help="As the engine was started with; where neither this nor the engine says it, losses with ratios refuse "
    "temperatures other than 1.  [default: as vLLM says with VLLM_SERVER_DEV_MODE=1]",
)
@click.option(
    "--on-full",
    type=click.Choice(["refuse", "drop"]),
    default="refuse",
    show_default=True,
    help="Without room to record: refuse calls, or let them go on unrecorded.",
)
@click.option(
    "--durable",
    is_flag=True,
    help="Each answer waits until its call is on the disk: a kill loses none whose whole answer a client had.",
)
@click.option("--max-body", type=click.IntRange(min=1), default=64, show_default=True, help="MB of a request.")
@click.option(
    "--max-answer", type=click.IntRange(min=1), default=256, show_default=True, help="MB of an answer; more is cut off."
)
@click.option(
    "--max-answers",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="MB of all answers under way together; the longest of more is cut off.",
)
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
@click.option("--spool-size", type=click.IntRange(min=8), default=1024, show_default=True, help="MB of it.")
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
    **same: Any,
) -> None:
    """Record agents through a proxy: point their base URL at it, and each call is a step in the lake.

    Chat completions, completions, the Responses API and Anthropic's messages, streaming or not; everything else passes
    by. Of vLLM, exact token ids and log-probabilities are recorded, and the client sees only what it asked for. Keys
    pass through and are stored nowhere.

    Calls are joined to episodes by their base URL (http://.../ep/KEY/v1, http://.../run/R/task/T/rollout/N/v1), by
    headers (X-Trajlake-Task, -Rollout, -Run, ...; X-Session-ID), else by the conversation that they go on with. POST
    {"reward": 1.0} to .../v1/end ends an episode, and a rollout with a number takes no calls after that; else it ends
    when it is idle, or with the proxy, and calls that come later continue it in another episode. Killed, the proxy goes
    on where it was at the next start.
    """
    token = (token or "").strip() or None  # blanks are no token, and no header has them around its value
    _check(same["run"], host, token, max_body, spool_size)
    if same["durable"] and on_full == "drop":
        raise UsageError("--durable records every call that is answered, and --on-full drop lets some go unrecorded")
    from lake.live.proxy.app import Limits
    from lake.live.proxy.forward import Settings
    from lake.live.proxy.serve import Options, serve

    options = Options(
        host=host,
        token=token,
        refuses=on_full == "refuse",
        spool_bytes=spool_size * _MB,
        settings=Settings(asks=ask, logprobs_mode=logprobs_mode, max_answer=max_answer * _MB),
        limits=Limits(max_body=max_body * _MB, max_bodies=max(512, 2 * max_body) * _MB, max_answers=max_answers * _MB),
        **same,  # under the names that they have there
    )
    _tell(serve(options, ready=lambda url: _greet(url, options.lake_uri), say=lambda text: click.echo(cell(text))))


def _check(run: str, host: str, token: str | None, max_body: int, spool_size: int) -> None:
    """Raise a TrajlakeError for options that do not go together, or without what the command needs."""
    from lake.formats.base.secrets import without_secrets
    from lake.records import check_run_name

    check_run_name(run)
    if without_secrets(run) != run:
        raise UsageError("--run is a key, and names are recorded; give the run another name")
    if host not in _LOCAL and not token:
        raise UsageError(
            f"--host {host} lets other machines in, so it needs a --token of your own (in the environment: "
            "TRAJLAKE_RECORD_TOKEN), which they send in the header X-Trajlake-Token; or leave --host out"
        )
    if 2 * max_body > spool_size:
        raise UsageError(f"--spool-size is {spool_size} MB; valid: at least twice --max-body, which is {max_body} MB")
    if find_spec("aiohttp") is None:
        raise MissingExtraError('trajlake record needs the package aiohttp: pip install "trajlake[record]"')


def _greet(url: str, lake_uri: str) -> None:
    click.echo(f"recording {cell(url)} into {cell(lake_uri)}; Ctrl-C ends it")


def _tell(outcome: "Outcome") -> None:
    calls, lake_counts = outcome.calls, outcome.delivered
    click.echo(
        f"{counted(calls.calls, 'call')}: {counted(calls.steps, 'step')}, {calls.failed} failed; "
        f"{counted(lake_counts.new, 'episode')} new, {lake_counts.present} already present, "
        f"{lake_counts.rejected} rejected"
    )
    if calls.stopped:
        click.echo(
            f"{counted(calls.stopped, 'open episode')} ended with the proxy (`stop_reason` is proxy_stopped); calls "
            "that come later begin new ones, under the same names as continuations"
        )
    if calls.left_out:
        click.echo(f"{counted(calls.left_out, 'open episode')} left out")
    if calls.dropped or calls.unreadable:
        click.echo(f"{calls.dropped} episodes found no room and {calls.unreadable} calls could not be read", err=True)
    if calls.crowded_out:
        click.echo(
            f"{calls.crowded_out} episodes were ended early: too many were open; a smaller --idle ends them in time",
            err=True,
        )
    if not outcome.is_all:
        why = lake_counts.problem or "it took too long"
        click.echo(
            f"not all of it is in the lake ({cell(why)}); the rest is kept in {outcome.root}: once the lake can be "
            "written, the next `trajlake record` with the same --lake, --port and --spool delivers it",
            err=True,
        )


@click.command()
@lake_option
@click.option(
    "--deliver",
    multiple=True,
    metavar="FOLDER",
    help="Spool to deliver to the lake now, open episodes as aborted.  [default: none]",
)
@click.option(
    "--delete", multiple=True, metavar="FOLDER", help="Spool to delete with all that it holds.  [default: none]"
)
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
@format_option
def spools(lake_uri: str, deliver: tuple[str, ...], delete: tuple[str, ...], yes: bool, output_format: str) -> None:
    """List what was recorded on this machine and is not in the lake yet.

    A spool is `in use` by a process that records, or its process died. Then it is `left`: the next recorder, proxy or
    collection of the same kind delivers it. Or it is `orphaned`: it was recorded for a lake that lay here before and
    was deleted, and is delivered only if --deliver names it. Spools of a `--spool` are not listed.
    """
    import lake as lakes
    from lake.live import adoption
    from lake.live.delivery import deliver_spool
    from lake.live.owners import owner_of

    target = lakes.open(lake_uri)
    found = {str(held.folder): held for held in adoption.spools_of(owner_of(target))}
    if unknown := sorted({*deliver, *delete} - found.keys()):
        raise UsageError(
            f"{unknown[0]} is no spool of this lake; valid: {', '.join(found) or 'none, there is no spool'}"
        )
    if busy := [name for name in (*deliver, *delete) if found[name].is_in_use]:
        raise UsageError(f"{busy[0]} is in use: stop the process that records into it, which delivers it")
    if not deliver and not delete:
        columns = ("spool", "state", "lake_id", "finished", "open", "bytes")
        echo_rows([dict(zip(columns, _row(held), strict=True)) for held in found.values()], output_format)
        return
    if delete and not yes:
        question = f"Delete {counted(len(delete), 'spool')} for good?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question} There is no terminal to ask on: add --yes. Nothing was changed")
        click.confirm(question, abort=True, err=True)
    for name in deliver:
        done = deliver_spool(found[name], target)
        click.echo(
            f"{name}: {counted(done.new, 'episode')} delivered, {done.aborted} of them aborted (already there: "
            f"{done.present}; rejected: {done.rejected})"
        )
    for name in delete:
        adoption.delete(found[name])
        click.echo(f"{name}: deleted")


def _row(held: "Held") -> tuple[Any, ...]:
    """A spool as the list shows it."""
    state = "in use" if held.is_in_use else "orphaned" if held.is_orphan else "left"
    lake_id = None if held.owner is None else held.owner.lake
    return str(held.folder), state, lake_id, held.finished, held.open, held.bytes
