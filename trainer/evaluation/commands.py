"""Commands `eval`, `ope` and `rescore`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import click

from lake.cli.options import as_of_option, echo_rows, format_option, lake_option, opened
from lake.errors import UsageError


@click.command("eval")
@lake_option
@click.option(
    "--by",
    type=click.Choice(["run_id", "policy_version", "policy"]),
    default="run_id",
    show_default=True,
    help="What attempts are counted together.",
)
@click.option(
    "--score",
    default="env_return",
    show_default=True,
    help="Score of an attempt: env_return, or a scorer, @VERSION or not.",
)
@click.option("--threshold", type=float, default=1.0, show_default=True, help="Least score of a success.")
@click.option("--k", "ks", default="1", show_default=True, metavar="K,...", help="The k of pass@k and pass^k.")
@click.option("--against", nargs=2, metavar="A B", help="Compare A with B, task by task. Default: no comparison.")
@click.option("--where", help="SQL predicate over episodes. Default: all.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Of the random signs that --against draws where more than 20 tasks differ.",
)
@as_of_option
@format_option
def evaluate_success(
    lake_uri: str,
    by: str,
    score: str,
    threshold: float,
    ks: str,
    against: tuple[str, str] | None,
    where: str | None,
    seed: int,
    as_of: str | None,
    output_format: str,
) -> None:
    """Count successes: share, pass@k, pass^k, each with a 95 % interval, and one policy against another.

    Intervals are over tasks: they say how much other tasks of the same kind may differ. An attempt without a score is
    in no figure; how many there are is told. Names are those of --by: a run, a policy, or POLICY@VERSION.
    """
    from trainer.evaluation.success import against_rows, read_attempts, success_rows

    if not math.isfinite(threshold):
        raise UsageError(f"--threshold {threshold}: valid is a finite number")
    attempts = read_attempts(opened(lake_uri, as_of), by=by, score=score, where=where)
    counting = partial(against_rows, one=against[0], other=against[1], seed=seed) if against else success_rows
    rows = counting(attempts, ks=_numbers(ks), threshold=threshold)
    nested, unscored = int(attempts["nested"].sum()), attempts.filter(~attempts["nested"])["score"].null_count()
    if nested:
        click.echo(f"no attempts, because they came out of another episode (sub-agents, forks): {nested}", err=True)
    if unscored:
        click.echo(f"attempts without a score, which are in no figure: {unscored}", err=True)
    echo_rows(rows, output_format)


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"--k {text!r}: give whole numbers from 1 on, with commas between them, for example 1,2,4")
    return found


@click.command()
@lake_option
@click.option(
    "--target", required=True, metavar="CHECKPOINT", help="The policy to evaluate, by its name in the table ratios."
)
@click.option(
    "--behaviour",
    required=True,
    metavar="CHECKPOINT",
    help="The policy that acted, or `stored`: as the engine recorded.",
)
@click.option(
    "--score",
    default="env_return",
    show_default=True,
    help="What is earned: env_return, env_reward (of steps), or a scorer.",
)
@click.option("--where", help="SQL predicate over episodes. Default: all.")
@click.option("--gamma", type=float, default=1.0, show_default=True, help="Discount per turn.")
@click.option("--clip", type=float, default=2.0, show_default=True, help="Largest ratio of a turn that clipped takes.")
@click.option(
    "--ridge",
    type=float,
    default=1.0,
    show_default=True,
    help="Shrinkage of the state values of dr and fqe: visits that the mean of the turn counts as.",
)
@as_of_option
@format_option
def evaluate(
    lake_uri: str, target: str, behaviour: str, as_of: str | None, output_format: str, **options: str | float | None
) -> None:
    """Estimate what a policy is worth from episodes that another one played.

    Both are checkpoints that have scored the episodes (trajlake rescore), so that both log-probabilities come from the
    same arithmetic. A value that the episodes cannot support is not told; the row says why.
    """
    from trainer.evaluation.ope import evaluate as run_evaluate

    found = run_evaluate(opened(lake_uri, as_of), target, behaviour, **options)  # type: ignore[arg-type]
    for note in found.notes:
        click.echo(note, err=True)
    for reason, count in found.left_out.items():
        click.echo(f"left out: {count} episodes ({reason})", err=True)
    echo_rows(found.rows, output_format)


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
