"""Command `rescore`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from lake.cli_options import echo_rows, format_option, lake_option


@click.command()
@click.argument("checkpoint")
@lake_option
@click.option("--name", help="Name in the table ratios. Default: after the folder, or RUN@STEP.")
@click.option("--where", help="SQL predicate over episodes. Default: all.")
@click.option("--selection", help="Score only the episodes that this selection kept. Default: all.")
@click.option(
    "--tokens",
    type=click.Choice(["auto", "engine", "rendered"]),
    help="Which token rows: as sampled (engine), as rendered from text, or the former first (auto). Default: auto.",
)
@click.option("--token-budget", type=int, help="Tokens of one forward pass. Default: 8192.")
@click.option("--max-length", type=int, help="Longest sequence in tokens. Default: as the data needs.")
@click.option("--device", help="Torch device. Default: cpu.")
@format_option
def rescore(checkpoint: str, lake_uri: str, name: str | None, output_format: str, **flags: str | int | None) -> None:
    """Score stored tokens with a checkpoint, at the temperature they were sampled at, into the table ratios.

    CHECKPOINT is a model's folder, a run's or a checkpoint's, a .gguf file, or a row of the table checkpoints as
    RUN[@STEP] or JOB[@STEP]. What it has scored already is left out, so a killed run goes on where it was. Prints how
    far its log-probabilities are from the recorded ones, by run and policy version (the view mismatch).
    """
    from transformers.utils import logging

    import lake
    from lake import ids
    from trainer.evaluation.rescore import rescore as run_rescore

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    lk = lake.open(lake_uri)
    options = {option: value for option, value in flags.items() if value is not None}
    with _bar() as progress:
        report = run_rescore(lk, checkpoint, name=name, options=options, progress=progress)
    for note in report.notes:
        click.echo(note, err=True)
    drops = ", ".join(f"{reason} {steps}" for reason, steps in report.drops.items())
    click.echo(
        f"{report.checkpoint} (series {ids.to_text(report.series_id)}): {report.scored:,} actions scored, "
        f"{report.present:,} had been, {report.tokens:,} tokens in {report.seconds:.1f} s",
        err=True,
    )
    if report.overtaken:
        said = "actions that another run scored meanwhile, or that were taken out of the lake"
        click.echo(f"{said}: {report.overtaken:,}", err=True)
    if drops:
        click.echo(f"steps that are not scored: {drops}", err=True)
    query = "SELECT * EXCLUDE (checkpoint, series_id) FROM mismatch WHERE series_id = ? ORDER BY ALL"
    echo_rows(lk.sql(query, [report.series_id]), output_format)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar that follows the actions; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("rescore", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
