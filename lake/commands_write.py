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
    "--batch-size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Episodes a commit at most; it also closes at 32 MB of text.",
)
def ingest(files: tuple[str, ...], lake_uri: str, run_id: str | None, format_name: str | None, batch_size: int) -> None:
    """Read trajectory FILES into a lake (made if it is not there). `-` reads stdin.

    Every record is taken exactly once: the same file again adds nothing, a killed ingest is simply run again. Records
    that cannot be taken are in the table `rejects` with position, reason and raw text. Exits with 1 if there were
    only such.
    """
    import lake
    from lake.ingest import Progress, prepare
    from lake.ingest import ingest as ingest_file
    from lake.stdin import spooled

    taken = rejected = 0
    for file in files:

        def show(progress: Progress, file: str = file) -> None:
            megabytes = f"{progress.done / 1e6:,.0f} of {progress.size / 1e6:,.0f} MB"
            click.echo(f"{file}: {progress.records:,} records, {megabytes}", err=True)

        with spooled(file, sys.stdin.buffer) as path:
            # Before a lake is made: a wrong path must leave nothing behind.
            prepare(path, run_id=run_id, format_name=format_name)
            target = lake.open(lake_uri, create=True)
            report = ingest_file(
                target, path, run_id=run_id, format_name=format_name, batch_size=batch_size, progress=show
            )
        taken += report.new + report.present
        rejected += report.rejected
        click.echo(
            f"{file}: {report.new} episodes, {report.steps} steps, {report.rejected} rejects "
            f"({report.present} already present) in run {report.run_id}"
        )
        if report.rejected:
            hint = "trajlake sql 'SELECT position, reason, message FROM rejects ORDER BY position'"
            click.echo(f"{report.rejected} of {report.records} records were rejected; see: {hint}", err=True)
    if rejected and not taken:
        sys.exit(1)
