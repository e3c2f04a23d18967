"""Command `anchors`: which definition of "the same state" would make steps comparable, measured without writing."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lake.cli_options import as_of_option, format_option, lake_option

if TYPE_CHECKING:
    from pipelines.credit.anchors import Anchors


@click.command()
@lake_option
@as_of_option
@click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\".  [default: all]")
@click.option(
    "--anchors",
    "given",
    multiple=True,
    metavar="JSON|FILE",
    help='A definition, e.g. \'{"kind": "json"}\', or a file with one. Repeat to compare.  [default: some simple ones]',
)
@click.option(
    "--groups",
    type=click.IntRange(min=0),
    default=500,
    show_default=True,
    help="Measure on so many groups, a fair sample; 0 for all.",
)
@format_option
def anchors(
    lake_uri: str, as_of: str | None, where: str | None, given: tuple[str, ...], groups: int, output_format: str
) -> None:
    """Measure what anchor definitions would give: how many steps could be compared, and what the comparisons are worth.

    \b
    known       share of steps that get a key
    shared      share of steps whose state two or more episodes of the group visited: those have an A_S
    singleton   share of steps in a state that no other step has (healthy: below 0.35)
    states      distinct states
    episodes    mean number of episodes that meet in a shared state
    one_action  share of shared states where all took the same action: nothing is compared there
    ways_in     mean number of distinct actions that led into a shared state: many mean a false anchor
    errors      share of shared steps whose state is marked as an error text
    seconds     CPU time for the keys

    Writes nothing. docs/guides/which-anchor.md says how to choose.
    """
    from lake.cli_options import echo_rows, opened
    from pipelines.credit.anchor_measures import CANDIDATES, measure_anchors, steps_to_measure

    definitions = dict(_read(text) for text in given) or CANDIDATES
    snapshot = opened(lake_uri, as_of)
    steps = steps_to_measure(snapshot, list(definitions.values()), where=where, groups=groups or None)
    echo_rows(measure_anchors(steps, definitions), output_format)


def _read(text: str) -> "tuple[str, Anchors]":
    """A definition and the name it is shown under: as given on the command line."""
    from pydantic import TypeAdapter, ValidationError

    from lake.errors import UsageError
    from lake.faults import faults
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
