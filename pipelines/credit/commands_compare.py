"""Command `compare`: two sets of advantages side by side."""

import click

from lake.cli.options import as_of_option, echo_rows, format_option, lake_option, opened


@click.command()
@click.argument("one", metavar="CREDIT1")
@click.argument("two", metavar="CREDIT2")
@lake_option
@click.option(
    "--rows",
    type=click.Choice(["levels", "signal", "groups", "examples"]),
    default="levels",
    show_default=True,
    help="What to print: agreement by level, numbers of live and other groups, every group, or the largest changes.",
)
@click.option(
    "--examples", type=click.IntRange(0, 100_000), default=10, show_default=True, help="Steps to show at most."
)
@click.option("--memory-limit", metavar="SIZE", help="Memory of the queries, for example 2GB; beyond it they spill.")
@as_of_option
@format_option
def compare(
    one: str,
    two: str,
    lake_uri: str,
    rows: str,
    examples: int,
    memory_limit: str | None,
    as_of: str | None,
    output_format: str,
) -> None:
    """Compare two sets of advantages.

    CREDIT is an estimator's name (its newest series), or the id of a credit series or job, or its beginning. A job
    means its series as it was when the job ended. Columns ending in _1 are of CREDIT1, those in _2 of CREDIT2. A group
    is live if two or more of its episodes are scored and their scores differ.
    """
    import polars as pl

    from pipelines.credit.compare import compare as compare_jobs

    found = compare_jobs(opened(lake_uri, as_of), one, two, examples=examples, memory=memory_limit)
    steps = found.levels.row(0, named=True)
    share = "-" if steps["flip_share"] is None else f"{steps['flip_share']:.1%}"
    changes = dict(found.groups["change"].value_counts().iter_rows())
    for number, side in enumerate((found.one, found.two), start=1):
        click.echo(f"{number}: {side.title}", err=True)
    click.echo(f"{steps['shared']} steps defined in both, {steps['flips']} ({share}) have opposite signs", err=True)
    gained, lost = (changes.get(change, 0) for change in ("gained", "lost"))
    click.echo(f"{found.groups.height} groups: {gained} are live in 2 and not in 1, {lost} in 1 and not in 2", err=True)
    frame: pl.DataFrame = getattr(found, rows)
    if rows == "levels" and output_format == "table":
        # Three columns are read, twenty are not.
        frame = frame.transpose(include_header=True, header_name="measure", column_names="level")
    echo_rows(frame, output_format)
