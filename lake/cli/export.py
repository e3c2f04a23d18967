"""Command `export`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

import lake
from lake.cli.executor_options import executor_of, executor_options
from lake.cli.options import Lakes, lakes_option
from lake.errors import UsageError
from lake.read.text_table import counted

if TYPE_CHECKING:
    from lake.export.request import Manifest

_PAIRS = ("siblings", "anchors")
_FORMATS = (
    "jsonl, messages, prompt-completion, preference, unpaired (these four also with -parquet behind them), "
    "trl-completions, verl, verl-rollouts, atif, eval-protocol, eval-protocol-db, scout, massgen. "
    "See docs/guides/export.md."
)


@click.command()
@lakes_option
@click.option("--format", "format_name", default="jsonl", show_default=True, help=_FORMATS)
@click.option("--out", required=True, type=click.Path(), help="A file (.jsonl, .parquet), or a new folder of shards.")
@click.option("--where", help="SQL predicate over `episodes`.  [default: all]")
@click.option("--selection", help="Only what this selection kept: its name, or a select job's id.  [default: all]")
@click.option("--run", "run_id", help="Only this run.  [default: all]")
@click.option("--credit", help="Whose advantages: an estimator, series or job, or `none`.  [default: the current ones]")
@click.option(
    "--score", help="Which score counts, of rewards, pairs and labels.  [default: the credit's, else env_return]"
)
@click.option(
    "--pairs",
    type=click.Choice(_PAIRS),
    default="siblings",
    show_default=True,
    help="Preference pairs of episodes of a group, or of decisions in one anchor state.",
)
@click.option(
    "--threshold",
    type=float,
    help="Unpaired: least score that is labelled true.  [default: above the mean of its group]",
)
@click.option(
    "--shard-episodes",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Most episodes of a shard; a group is never divided.",
)
@executor_options("Shards")
def export(
    lake_uri: Lakes,
    format_name: str,
    out: str,
    where: str | None,
    selection: str | None,
    run_id: str | None,
    credit: str | None,
    score: str | None,
    pairs: str,
    threshold: float | None,
    shard_episodes: int,
    executor: str,
    workers: int | None,
) -> None:
    """Write episodes in a format that others read.

    Killed and run again it goes on where it was. A manifest beside the files says what they hold, from which snapshot
    and jobs, and what the format has no place for. Retracted and forgotten episodes are never exported.
    """
    if "://" in out:
        raise UsageError(f"{out}: an export is written to this machine: name a file or folder, and copy it there")
    from lake.export import target
    from lake.export.job import export as run
    from lake.export.request import Request
    from lake.export.target import Choices

    choices = Choices(score=score, pairs=cast("Literal['siblings', 'anchors']", pairs), threshold=threshold)
    request = Request(target(format_name), Path(out), where, selection, run_id, credit, choices, shard_episodes)

    def show(done: int, chosen: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"{out}: {done:,} of {chosen:,} episodes", err=True)

    manifest = run(lake.open(lake_uri), request, show, executor=executor_of(executor, workers))
    shards = "" if len(manifest.shards) == 1 else f" in {len(manifest.shards)} shards"
    written = counted(manifest.rows, "file" if request.target.container == "tree" else "row")
    click.echo(
        f"{out}: {written} of {counted(manifest.episodes, 'episode')} "
        f"({counted(manifest.steps, 'step')}) as {format_name}{shards}"
    )
    if manifest.score is not None:
        click.echo(f"score: {manifest.score}", err=True)
    if manifest.left_out:
        listed = ", ".join(_told(manifest, what) for what in manifest.left_out)
        click.echo(f"not in it: {listed}", err=True)


def _told(manifest: "Manifest", what: str) -> str:
    """How much of something is left out, and some of its names."""
    names = ", ".join(manifest.names.get(what, ()))
    return f"{what} ({manifest.left_out[what]:,}{f': {names}' if names else ''})"
