"""Command `select`: filters over a lake."""

import inspect
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import ConfiguredCommand, Lakes, echo_rows, format_option, lakes_option

if TYPE_CHECKING:
    from pipelines.select import Selection
    from pipelines.select.base import Filter


def _filters() -> "dict[str, type[Filter]]":
    from pipelines.select.filters import FILTERS

    first = {name: (inspect.getdoc(one) or "").partition("\n\n")[0] for name, one in FILTERS.items()}
    return {f"{name}\n{first[name]}": one for name, one in FILTERS.items()}


@click.command(cls=ConfiguredCommand, models=_filters)
@click.argument("name", required=False)
@lakes_option
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="FILTER[:KEY=VALUE,...]",
    help="A filter: dead_groups, length:min_steps=2,max_steps=30, max_steps=30.  [default: --config's]",
)
@click.option("--config", type=click.Path(dir_okay=False), help="TOML: name and filters in [select].  [default: none]")
@click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\".  [default: all]")
@click.option(
    "--score", help="Which score counts: env_return, a scorer or a reward.  [default: the credit's, else env_return]"
)
@click.option(
    "--credit",
    help="Compare within the groups of these advantages: an estimator's name, or (the beginning of) a credit series' "
    "or job's id.  [default: the groups as collected]",
)
@click.option("--force", is_flag=True, help="Write even if there is a result of the same input; else do nothing.")
@format_option
def select(
    name: str | None,
    lake_uri: Lakes,
    filters: tuple[str, ...],
    config: str | None,
    where: str | None,
    score: str | None,
    credit: str | None,
    force: bool,
    output_format: str,
) -> None:
    """Choose what is trained on and write it to `selections` as NAME, each drop with its reason.

    Filters are applied in order; their options are listed below (docs/guides/select-and-compare.md explains them).
    """
    import lake
    from lake import ids
    from lake.read.text_table import counted
    from pipelines.select import run_select

    chosen = _selection(name, filters, config)
    report = run_select(lake.open(lake_uri), chosen, where=where, score=score, credit=credit, force=force)
    done = "nothing to do: this is the result of" if report.skipped else "written by"
    click.echo(f"{chosen.name}: {report.kept} of {counted(report.episodes, 'episode')} kept", err=True)
    click.echo(f"{done} job {ids.to_text(report.job_id)}", err=True)
    click.echo(f"score: {report.score.title}", err=True)
    echo_rows(report.report, output_format)


def _selection(name: str | None, filters: tuple[str, ...], config: str | None) -> "Selection":
    from lake.errors import UsageError
    from lake.settings import from_file, validated
    from pipelines.select.filters import FILTERS
    from pipelines.select.job import Selection
    from pipelines.spelling import spelled

    found: dict[str, Any] = from_file(config, ["select"]) if config else {}
    if name is not None:
        found["name"] = name
    if filters:
        found["filters"] = [spelled(text, FILTERS, "filter") for text in filters]
    if "name" in found and "filters" not in found:
        msg = "give what to select by: --filter FILTER, or filters under [select] of --config FILE"
        raise UsageError(msg)
    return validated(Selection, found, "select: ")
