"""The command `trajlake`: finds each layer's commands by entry point, prints faults as one line.

The composition root is pyproject.toml: the entry points `trajlake.commands` name one table per layer, mapping a
command's name to where it lives and its one-line help. Nothing but click is imported until a command runs.
"""

import signal
import sys
import threading
import time
from functools import cache
from importlib import import_module
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

CommandTable = dict[str, tuple[str, str]]
"""Command name -> ("module:attribute" of a click command, one line of help)."""


@cache
def _table() -> CommandTable:
    """The commands of all layers. Only our own distribution is read: listing all that are installed takes longer."""
    table: CommandTable = {}
    for entry in sorted(distribution("trajlake").entry_points.select(group="trajlake.commands"), key=lambda e: e.name):
        table |= entry.load()
    return table


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands by name; former names, which have no line of help, are left out."""
        return sorted(name for name, (_, text) in _table().items() if text)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what its errors advise names the lake, if the command did."""
        from lake.errors import TrajlakeError

        try:
            return super().invoke(ctx)
        except TrajlakeError as error:
            from lake.cli.options import TYPED_LAKE, with_lake

            if TYPED_LAKE in ctx.meta:
                error.args = (with_lake(str(error), ctx.meta[TYPED_LAKE]), *error.args[1:])
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        place = _table().get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place[0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(_table().items()) if text])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TRAJLAKE"},
    epilog="Results go to stdout, messages to stderr. `trajlake COMMAND -h` explains a command.",
)
@click.version_option(package_name="trajlake", message="%(prog)s %(version)s")
def trajlake() -> None:
    """A lakehouse for LLM-agent trajectories: ingest, query, credit, train, view."""


def _interrupt_again(caught: "UnraisableHookArgs") -> None:
    """Ctrl-C in the middle of a finaliser, which cannot raise, would be a traceback and then forgotten."""

    def later() -> None:
        time.sleep(0.1)  # until this hook has returned: it cannot raise either
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    if caught.exc_type is KeyboardInterrupt:
        threading.Thread(target=later, daemon=True).start()
    else:
        sys.__unraisablehook__(caught)


def main() -> None:
    """Run the command line; a user's fault is one line on stderr, without control characters, and a status not 0."""
    from lake.errors import TrajlakeError
    from lake.read.text_table import cell

    sys.unraisablehook = _interrupt_again
    try:
        trajlake(prog_name="trajlake")
    except TrajlakeError as error:
        click.echo(f"trajlake: {cell(str(error))}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of stdout (head, a pager) has gone: not a fault. Keep the interpreter from flushing into it.
        sys.stderr.close()
        sys.exit(0)
    except UnicodeEncodeError as error:
        # UTF-8 can show everything but a text that is none.
        fault = "this terminal cannot show the result", "set PYTHONIOENCODING=utf-8"
        if error.encoding == "utf-8":
            part = error.object[max(0, error.start - 20) : error.end + 20]
            fault = f"the text {part!a} is no Unicode", "take the lone surrogates out of it"
        click.echo(f"trajlake: {fault[0]} ({error.reason}); {fault[1]}", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"trajlake: {cell(str(error))}", err=True)
        sys.exit(1)
    except RecursionError:
        click.echo("trajlake: a document that the command read is nested too deeply; nothing more was done", err=True)
        sys.exit(1)


COMMANDS = {
    "ingest": ("lake.cli.ingest:ingest", "Read trajectory files into a lake."),
    "record": ("lake.cli.record:record", "Record agents through a proxy, as they call a model."),
    "spools": ("lake.cli.record:spools", "List what was recorded and is not in a lake yet."),
    "export": ("lake.cli.export:export", "Write episodes in a format that others read."),
    "sql": ("lake.cli.read:sql", "Query a lake with one SELECT."),
    "show": ("lake.cli.read:show", "Print an episode to read."),
    "tables": ("lake.cli.read:tables", "List tables, or their columns."),
    "history": ("lake.cli.read:history", "List the commits of a lake."),
    "diff": ("lake.cli.maintain:diff", "Say what changed between two snapshots."),
    "snapshot": ("lake.cli.maintain:snapshot", "Name the lake as it is now, list the names, drop one."),
    "annotate": ("lake.cli.annotate:annotate", "Put labels and ratings on episodes and steps."),
    "retract": ("lake.cli.maintain:retract", "Hide episodes from later readers."),
    "restore": ("lake.cli.maintain:restore", "Show retracted episodes again."),
    "forget": ("lake.cli.maintain:forget", "Erase episodes for good."),
    "compact": ("lake.cli.maintain:compact", "Merge small files into sorted ones."),
    "vacuum": ("lake.cli.maintain:vacuum", "Delete files that nobody needs."),
    "doctor": ("lake.cli.read:doctor", "Check a lake and this installation."),
}
