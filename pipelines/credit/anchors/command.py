"""Command `anchors`: which definition of "the same state" would make steps comparable; its figures may be kept."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lake.cli.options import Lakes, as_of_option, format_option, lake_flags, lakes_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    import polars as pl

    from pipelines.credit.anchors import Anchors
    from pipelines.credit.anchors.advice import Advice
    from pipelines.credit.anchors.measures import Walks

_LARGEST = 10


@click.command()
@lakes_option
@as_of_option
@click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\".  [default: all]")
@click.option(
    "--anchors",
    "given",
    multiple=True,
    metavar="JSON|FILE",
    help='A definition, e.g. \'{"kind": "json"}\', or a file with one. Repeat to compare.  '
    "[default: some simple ones, and the one that is suggested]",
)
@click.option(
    "--groups",
    type=click.IntRange(min=0),
    default=500,
    show_default=True,
    help="Measure on so many groups, a fair sample; 0 for all.",
)
@click.option(
    "--rows",
    type=click.Choice(["definitions", "largest"]),
    default="definitions",
    show_default=True,
    help="What --format json and csv print; a table shows both.",
)
@click.option(
    "--keep",
    "keeps",
    is_flag=True,
    help="Keep the figures in the lake, as a job: the viewer shows them beside anchors.",
)
@format_option
def anchors(
    lake_uri: Lakes,
    as_of: str | None,
    where: str | None,
    given: tuple[str, ...],
    groups: int,
    rows: str,
    keeps: bool,
    output_format: str,
) -> None:
    """Measure what anchor definitions would give: how many steps could be compared, and what the comparisons are worth.

    \b
    Largest anchors, under the first definition (exact text by default):
    steps           steps in that state, in the groups where two or more episodes visited it
    groups          those groups
    states_before   distinct states that it followed
    actions_before  distinct actions that led to it; many: it may be an error text
    actions         distinct actions taken there; 1: nothing is compared
    score_std       how much the scores of the episodes that visited it differ

    \b
    Definitions:
    known       share of steps that get a key
    shared      share of steps whose state two or more episodes of the group visited: those have an A_S
    singleton   share of steps in a state that no other step has (healthy: below 0.35)
    states      distinct states
    episodes    mean number of episodes that meet in a shared state
    one_action  share of shared states where all took the same action: nothing is compared there
    ways_in     mean number of distinct actions that led into a shared state: many mean a false anchor
    errors      share of shared steps whose state is marked as an error text
    seconds     CPU time for the keys

    Without --anchors it looks for counters and error texts in the states, and prints the definition without them as the
    command that computes with it. Writes nothing, unless --keep is given.
    docs/guides/which-anchor.md says how to choose.
    """
    import polars as pl
    from polars import selectors

    from lake.cli.options import echo_rows, opened
    from lake.opening import open as open_lake
    from pipelines.credit.anchors.advice import NAME, advise, in_a_line
    from pipelines.credit.anchors.keeping import keep
    from pipelines.credit.anchors.measures import (
        CANDIDATES,
        Walks,
        columns_of,
        largest_anchors,
        measure,
        steps_to_measure,
    )
    from pipelines.credit.estimators.protocol import STATE_COLUMNS

    definitions = dict(_read(text) for text in given) or dict(CANDIDATES)
    read = list(definitions.values())
    snapshot = opened(lake_uri, as_of)
    steps = steps_to_measure(snapshot, read, where=where, groups=groups or None)
    walks = Walks.of(steps, (*STATE_COLUMNS, *columns_of(read, steps.collect_schema().names())))
    largest = largest_anchors(walks, next(iter(definitions.values())), _LARGEST)
    if rows == "largest" and output_format != "table":
        echo_rows(largest, output_format)
        return
    advice = None if given else advise(walks)
    if advice is not None and advice.definition is not None:
        definitions[NAME] = advice.definition
    measured = measure(walks, definitions)
    if keeps:
        sample = {"where": where, "groups": groups or None}
        asked = {name: value for name, value in sample.items() if value is not None}
        keep(open_lake(lake_uri), snapshot, definitions=definitions, measured=measured, **asked)
    if output_format != "table":
        echo_rows(measured, output_format)
        return
    click.echo(f"Largest anchors, by {next(iter(definitions))}:\n")
    echo_rows(largest.with_columns(state=pl.Series([in_a_line(text) for text in largest["state"]])), output_format)
    click.echo("\nDefinitions:\n")
    echo_rows(measured.with_columns(selectors.float().round(3)), output_format)
    click.echo()
    lake = lake_flags(lake_uri)
    for line in (*_copies(walks, lake), *(() if advice is None else _suggested(advice, measured, lake))):
        click.echo(line)


def _copies(walks: "Walks", lake: str) -> "Iterator[str]":
    found = walks.copies()
    with_copies = found.filter(found["copies"] > 0)
    if with_copies.is_empty():
        return
    most = max((with_copies["copies"] / with_copies["episodes"]).to_list())
    yield (
        f"{with_copies['copies'].sum()} of {found['episodes'].sum()} episodes are exact copies of a sibling (the same "
        f"states and actions), in {with_copies.height} of {found.height} groups, at most {most:.0%} of a "
        "group. This drops them from training, and nothing else: "
        f"`trajlake select distinct --filter dedup:by=decisions,within=group {lake}`"
    )


def _suggested(advice: "Advice", measured: "pl.DataFrame", lake: str) -> "Iterator[str]":
    from pipelines.credit.anchors.advice import NAME

    yield from advice.lines()
    if advice.definition is None:
        yield (
            "No counter and no text that is surely an error was found in the states. What that can and cannot tell: "
            "docs/guides/which-anchor.md"
        )
        return
    before, after = (measured.filter(anchors=name).row(0, named=True) for name in ("exact", NAME))
    yield (
        f"Without them {after['shared']:.1%} of the steps are in a state that a sibling visited (now "
        f"{before['shared']:.1%}), {after['singleton']:.1%} are alone in theirs (now {before['singleton']:.1%}), and "
        f"{1 - after['known']:.1%} are compared with nothing (now {1 - before['known']:.1%}). If these texts are what "
        "they look like, compute with:"
    )
    yield f"trajlake credit gigpo {lake} --set {shlex.quote('anchors=' + advice.definition.model_dump_json())}"


def _read(text: str) -> "tuple[str, Anchors]":
    """A definition and the name it is shown under: as given on the command line."""
    from pydantic import TypeAdapter, ValidationError

    from lake.errors import UsageError
    from lake.settings import faults
    from pipelines.credit.anchors import Anchors

    source = text
    if not text.lstrip().startswith("{"):
        try:
            source = Path(text).read_text("utf-8")
        except OSError as error:
            msg = f"--anchors {text!r} is neither a JSON object nor a file that can be read: {error.strerror}"
            raise UsageError(msg) from error
    adapter: TypeAdapter[Anchors] = TypeAdapter(Anchors)
    try:
        return text, adapter.validate_json(source)
    except ValidationError as error:
        msg = f"--anchors {text!r}: {faults(error)}. docs/guides/which-anchor.md lists the definitions"
        raise UsageError(msg) from error
