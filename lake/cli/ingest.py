"""Command `ingest`."""

import shlex
import sys
from typing import TYPE_CHECKING

import click

import lake
from lake.cli.options import lake_option
from lake.read.text_table import counted

if TYPE_CHECKING:
    from lake.write.ingest import Report

_RUNS_NAMED = 3
_SHOWN = 300
"""Characters of a reject's message."""


@click.command()
@click.argument("files", nargs=-1, required=True)
@lake_option
@click.option("--run", "run_id", help="Run of records that name none.  [default: the file's name without its ending]")
@click.option("--format", "format_name", help="tau_bench or jsonl.  [default: recognised by how a file begins]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Most episodes of a commit; it also ends at 32 MB of text.",
)
def ingest(files: tuple[str, ...], lake_uri: str, run_id: str | None, format_name: str | None, batch_size: int) -> None:
    """Read trajectory FILES into a lake (made if it is not there). `-` reads stdin; .gz and .zst are unpacked.

    Every record is taken exactly once: the same file again adds nothing, a killed ingest is simply run again. Records
    that cannot be taken are in the table `rejects` with position, reason and raw text. Exits with 1 if there were
    only such.
    """
    from lake.write.ingest import Progress, prepare, spooled
    from lake.write.ingest import ingest as ingest_file

    taken = rejected = 0
    for file in files:

        def show(progress: Progress, file: str = file) -> None:
            size = "" if progress.size is None else f" of {progress.size / 1e6:,.0f}"
            click.echo(f"{file}: {progress.records:,} records, {progress.done / 1e6:,.0f}{size} MB", err=True)

        with spooled(file, sys.stdin.buffer, lambda text: click.echo(text, err=True)) as path:
            # Before a lake is made: a wrong path must leave nothing behind.
            prepare(path, run_id=run_id, format_name=format_name)
            target = lake.open(lake_uri, create=True)
            report = ingest_file(
                target, path, run_id=run_id, format_name=format_name, batch_size=batch_size, progress=show
            )
        taken += report.new + report.present
        rejected += report.rejected
        _tell(file, report, lake_uri)
    if rejected and not taken:
        sys.exit(1)


def _tell(file: str, report: "Report", lake_uri: str) -> None:
    """Print what became of a file."""
    names = sorted(report.runs) or [report.run_id]
    more = ", ..." if len(names) > _RUNS_NAMED else ""
    runs = f"run {names[0]}" if len(names) == 1 else f"{len(names)} runs ({', '.join(names[:_RUNS_NAMED])}{more})"
    click.echo(
        f"{file}: {counted(report.new, 'episode')}, {counted(report.steps, 'step')}, "
        f"{counted(report.rejected, 'reject')} "
        f"({report.present} already present) in {runs}"
    )
    target = f"--lake {shlex.quote(lake_uri)}"
    if report.new and report.copies:
        without = f"trajlake select distinct --filter dedup:by=decisions,within=group {target}"
        click.echo(f"{report.copies}; leave them out with `{without}`", err=True)
    if report.rejected:
        if report.first_fault is not None:
            position, message = report.first_fault
            text = " ".join(message.split())
            click.echo(f"{file}, record {position}: {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}", err=True)
        hint = f"trajlake sql {target} 'SELECT position, reason, message FROM rejects ORDER BY position'"
        was = "was" if report.rejected == 1 else "were"
        click.echo(f"{report.rejected} of {counted(report.records, 'record')} {was} rejected; see: {hint}", err=True)
