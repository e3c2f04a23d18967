"""Command `eval`."""

import math
from functools import partial

import click

from lake.cli_options import as_of_option, echo_rows, format_option, lake_option, opened
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
    from trainer.evaluation.attempts import read_attempts
    from trainer.evaluation.success import against_rows, success_rows

    if not math.isfinite(threshold):
        msg = f"--threshold {threshold}: valid is a finite number"
        raise UsageError(msg)
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
        msg = f"--k {text!r}: give whole numbers from 1 on, with commas between them, for example 1,2,4"
        raise UsageError(msg)
    return found
