"""Command `group`: counterfactual groups."""

from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import Lakes, echo_rows, format_option, lakes_option

if TYPE_CHECKING:
    from pipelines.groupings import Grouping


@click.command()
@click.argument("name", required=False)
@lakes_option
@click.option(
    "--step",
    "steps",
    multiple=True,
    metavar="STEP[:KEY=VALUE,...]",
    help="E.g. subsample:size=8,draws=4.  [default: --config's]",
)
@click.option("--config", type=click.Path(dir_okay=False), help="TOML: name and steps in [group].  [default: none]")
@click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\".  [default: all]")
@click.option("--force", is_flag=True, help="Write even if there is a result of the same input; else do nothing.")
@format_option
def group(
    name: str | None,
    lake_uri: Lakes,
    steps: tuple[str, ...],
    config: str | None,
    where: str | None,
    force: bool,
    output_format: str,
) -> None:
    """Form other groups than those that were collected and write them to `groupings` as NAME.

    \b
    Steps, applied in order:
      subsample     size, draws, seed, short=drop|keep     fewer rollouts a group
      drop_failed   statuses                               without failed and aborted ones
      merge_runs    also_equal                             one group across runs, same start
      staleness_cap max_behind, unknown=drop|keep          without old policies

    With several draws each is a grouping of its own: NAME/0, NAME/1, ...
    """
    import lake
    from lake import ids
    from pipelines.groupings import run_grouping

    report = run_grouping(lake.open(lake_uri), _grouping(name, steps, config), where=where, force=force)
    for kind, words, rows in report.notes:
        click.echo(f"{kind}: {rows} {words}", err=True)
    done = "nothing to do: this is the result of" if report.skipped else "written by"
    click.echo(f"{done} job {ids.to_text(report.job_id)}", err=True)
    echo_rows(report.table, output_format)


def _grouping(name: str | None, steps: tuple[str, ...], config: str | None) -> "Grouping":
    from lake.settings import from_file, validated
    from pipelines.groupings.definition import STEPS, Grouping
    from pipelines.spelling import spelled

    found: dict[str, Any] = from_file(config, ["group"]) if config else {}
    if name is not None:
        found["name"] = name
    if steps:
        found["steps"] = [spelled(text, STEPS, "step") for text in steps]
    return validated(Grouping, found, "group: ")
