"""Command `evaluate`."""

import click

from lake.cli_options import as_of_option, echo_rows, format_option, lake_option, opened


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
