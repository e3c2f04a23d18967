"""Command `ingest`."""

import sys

import click

from lake.cli_options import lake_option


@click.command()
@click.argument("files", nargs=-1, required=True)
@lake_option
@click.option("--run", "run_id", help="Run of records that name none. Default: the file's stem.")
@click.option("--format", "format_name", help="Format of the files (tau_bench, jsonl). Default: sniffed.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=512, show_default=True, help="Episodes a commit at most."
)
def ingest(files: tuple[str, ...], lake_uri: str, run_id: str | None, format_name: str | None, batch_size: int) -> None:
    """Read trajectory FILES into a lake (made if it is not there). `-` reads stdin.

    Every record is taken exactly once: the same file again adds nothing, a killed ingest is simply run again. Records
    that cannot be taken are in the table `rejects` with position, reason and raw text.
    """
    import lake
    from lake.ingest import ingest as ingest_file
    from lake.ingest import prepare
    from lake.stdin import spooled

    for file in files:
        with spooled(file, sys.stdin.buffer) as path:
            # Before a lake is made: a wrong path must leave nothing behind.
            prepare(path, run_id=run_id, format_name=format_name)
            target = lake.open(lake_uri, create=True)
            report = ingest_file(target, path, run_id=run_id, format_name=format_name, batch_size=batch_size)
        click.echo(
            f"{file}: {report.new} episodes, {report.steps} steps, {report.rejected} rejects "
            f"({report.present} already present) in run {report.run_id}"
        )
        if report.rejected:
            hint = "trajlake sql 'SELECT position, reason, message FROM rejects ORDER BY position'"
            click.echo(f"{report.rejected} of {report.records} records were rejected; see: {hint}", err=True)
