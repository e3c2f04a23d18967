"""Commands `credit` (one command per estimator), `compare` for finished jobs, and `anchors`.

The names come from the registry, so listing them imports no estimator. An estimator's command has the options of the
job and those of the estimator.
"""

import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import (
    ConfiguredCommand,
    Lakes,
    as_of_option,
    build_executor,
    config_option,
    echo_rows,
    episodes_options,
    executor_options,
    force_option,
    format_lake_flags,
    format_option,
    lakes_option,
    memory_limit_option,
    open_snapshot,
    progress_option,
    set_option,
)
from pipelines.credit.estimators import ESTIMATORS, find_estimator, read_title

if TYPE_CHECKING:
    import polars as pl

    from pipelines.credit.anchors import Anchors
    from pipelines.credit.anchors.measures import Advice, Walks
    from pipelines.credit.estimators.protocol import Estimator
    from pipelines.credit.job import CreditReport


class CreditGroup(click.Group):
    """Command group of estimators and further commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List estimators, then commands."""
        return [*sorted(ESTIMATORS), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return the command of a name; UsageError for an unknown or refused estimator."""
        return self.commands.get(cmd_name) or build_command(find_estimator(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the estimators with their titles, and the commands."""
        with formatter.section("Estimators"):
            formatter.write_dl([(name, read_title(name)) for name in sorted(ESTIMATORS)])
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str()) for name, command in self.commands.items()])


@click.group(cls=CreditGroup, subcommand_metavar="ESTIMATOR|COMMAND [OPTIONS]")
def credit() -> None:
    """Compute advantages with an estimator and write them to the table `advantages`.

    Only groups whose episodes, scores or parameters changed since the series' last job are computed.
    `trajlake credit ESTIMATOR -h` lists an estimator's options.
    """


@credit.command(short_help="Compare two credit jobs.")
@click.argument("first", metavar="CREDIT1")
@click.argument("second", metavar="CREDIT2")
@lakes_option
@click.option(
    "--rows",
    type=click.Choice(["levels", "signal", "groups", "examples"]),
    default="levels",
    show_default=True,
    help="Rows to print: agreement by level, numbers of live and other groups, all groups, or the largest changes.",
)
@click.option(
    "--examples",
    type=click.IntRange(0, 100_000),
    default=10,
    show_default=True,
    help="Maximum number of steps to print.",
)
@memory_limit_option("80 % of the machine's")
@as_of_option
@progress_option()
@format_option
def compare(
    first: str,
    second: str,
    lake_uri: Lakes,
    rows: str,
    examples: int,
    memory_limit: str | None,
    as_of: str | None,
    output_format: str,
) -> None:
    """Compare two sets of advantages.

    CREDIT is an estimator's name (its newest series), or the id of a credit series or job, or a prefix of the id. A job
    means its series at the end of the job. Columns with the suffix _1 belong to CREDIT1, those with _2 to CREDIT2. A
    group is live if two or more of its episodes have scores that differ.
    """
    import polars as pl

    from lake.read.text_table import count_noun
    from pipelines.credit.compare import compare as compare_jobs

    comparison = compare_jobs(open_snapshot(lake_uri, as_of), first, second, examples=examples, memory=memory_limit)
    steps = comparison.levels.row(0, named=True)
    share = "-" if steps["flip_share"] is None else f"{steps['flip_share']:.1%}"
    changes = dict(comparison.groups["change"].value_counts().iter_rows())
    for number, side in enumerate((comparison.first, comparison.second), start=1):
        click.echo(f"{number}: {side.title}", err=True)
    shared_steps = count_noun(steps["shared"], "step")
    click.echo(f"{shared_steps} defined in both, {steps['flips']} ({share}) with opposite signs", err=True)
    groups_in_2, groups_in_1 = (changes.get(change, 0) for change in ("gained", "lost"))
    click.echo(
        f"{count_noun(comparison.groups.height, 'group')}: {groups_in_1} live in 1 only, {groups_in_2} live in 2 only",
        err=True,
    )
    frame: pl.DataFrame = getattr(comparison, rows)
    if rows == "levels" and output_format == "table":
        # A table of three columns is readable, one of twenty is not.
        frame = frame.transpose(include_header=True, header_name="measure", column_names="level")
    echo_rows(frame, output_format)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_OPTIONS: tuple[Decorator, ...] = (
    lakes_option,
    episodes_options,
    click.option(
        "--score",
        default="env_return",
        show_default=True,
        help="Score: env_return, or a scorer or reward, optionally with @VERSION.",
    ),
    click.option(
        "--rewards",
        default="env_reward",
        show_default=True,
        help="Step rewards: env_reward, or a scorer or reward, optionally with @VERSION.",
    ),
    click.option("--grouping", help="Grouping (`trajlake group`) to compare in.  [default: the collected groups]"),
    click.option(
        "--siblings",
        type=click.Choice(["kept", "all"]),
        default="kept",
        show_default=True,
        help="Compared episodes of groups collected with oversample: those that `keep` kept, or all.",
    ),
    set_option("gamma=0.9"),
    config_option("credit"),
    click.option(
        "--check",
        "checks",
        multiple=True,
        metavar="KEY=VALUE",
        help="Action of an integrity check, e.g. singleton=refuse.  [default: per check]",
    ),
    click.option(
        "--purity/--no-purity",
        default=True,
        show_default=True,
        help="Whether to read actions and error marks of shared states, for credit_groups.",
    ),
    force_option,
    click.option(
        "--log-level",
        type=click.Choice(["warning", "debug"]),
        default="warning",
        show_default=True,
        help="Log level; debug prints the steps and the terms of their credit on stderr.",
    ),
    click.option(
        "--log-episodes",
        metavar="WHERE",
        help="SQL predicate over `episodes` whose steps are logged.  [default: two groups]",
    ),
    executor_options("ranges of groups", local="one per core, at most 4"),
    progress_option(),
    memory_limit_option("2GB, for all concurrent ranges together", former=["--memory"]),
)


def build_command(estimator: "type[Estimator]") -> click.Command:
    """Build the command that runs an estimator over a lake."""
    from pipelines.credit.estimators.protocol import PRESETS

    def run(**options: Any) -> None:
        _run(estimator, **options)

    options = list(_OPTIONS)
    if presets := PRESETS.get(estimator.name):
        text = f"Options of other code: {', '.join(presets)}; --set and --config override.  [default: none]"
        options.append(click.option("--preset", metavar="NAME", help=text))
    for option in reversed(options):
        run = option(run)
    line = read_title(estimator.name)
    return click.command(
        name=estimator.name,
        cls=ConfiguredCommand,
        models=lambda: {"Options of the estimator, for --set and --config": estimator},
        help=line,
        short_help=line,
    )(run)


def _run(estimator: "type[Estimator]", **options: Any) -> None:
    import lake
    from lake.errors import UsageError
    from lake.settings import parse_pairs
    from pipelines.credit.job import configure_credit, parse_gigabytes, run_credit

    uri = options.pop("lake_uri")
    target = lake.open(uri)
    chosen = configure_credit(
        target,
        estimator.name,
        parse_pairs(options.pop("pairs")),
        config_file=options.pop("config_file"),
        preset=options.pop("preset", None),
        checks=parse_pairs(options.pop("checks")),
        where=options["where"],
        score=options["score"],
        rewards=options["rewards"],
    )
    executor = build_executor(options.pop("executor"), options.pop("workers"))
    if (limit := options.pop("memory_limit")) is not None:
        options["memory_gb"] = parse_gigabytes(limit)
    is_logged = options.pop("log_level") == "debug"
    if options["log_episodes"] is not None and not is_logged:
        raise UsageError("--log-episodes requires --log-level debug; add it, or remove --log-episodes")
    with _echo_log() if is_logged else nullcontext():
        report = run_credit(
            target,
            chosen.estimator,
            integrity=chosen.integrity,
            executor=executor,
            notice=partial(click.echo, err=True),
            **options,
        )
    if chosen.is_terminal:
        click.echo("no step rewards are recorded: the episode score is the last step's reward", err=True)
    _print_report(report, format_lake_flags(uri))


@contextmanager
def _echo_log() -> Iterator[None]:
    from pipelines.credit.step_log import LOG

    class Echo(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            click.echo(self.format(record), err=True)

    handler, before, propagates = Echo(), LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)
        LOG.propagate = propagates


def _print_report(report: "CreditReport", lake: str) -> None:
    """Print the report; suggested commands get the user's --lake flags."""
    from lake import ids
    from lake.read.text_table import count_noun
    from pipelines.credit.estimators.protocol import describe_unknown

    def echo_hint(line: str) -> None:
        click.echo(line.replace("--lake LAKE", lake), err=True)

    for line in report.findings:
        echo_hint(line)
    if report.skipped:
        click.echo(
            f"nothing changed since job {ids.to_text(report.job_id)} (--force computes it again); "
            f"{report.estimator.name} is {'now' if report.made_current else 'still'} the current credit"
        )
    summary = report.summary
    click.echo(
        f"{count_noun(summary.episodes, 'episode')}, {count_noun(summary.steps, 'step')} in "
        f"{count_noun(summary.groups, 'group')}: {summary.live_groups} live, {summary.dead_groups} dead, "
        f"{summary.singleton_groups} singleton, {summary.unscored_groups} unscored"
    )
    if report.scorer_versions:
        versions = (f"{name.partition('@')[0]}@{version}" for name, version in report.scorer_versions.items())
        click.echo(f"scores of {', '.join(dict.fromkeys(versions))}")
    share = f"{summary.shared_fraction:.1%} of the steps are in a state that a sibling visited; "
    click.echo(f"{share if summary.has_anchors else ''}{count_noun(summary.undefined_steps, 'advantage')} undefined")
    for line in (*summary.warnings(), *describe_unknown(report.unknown), *report.other_scores):
        echo_hint(line)
    if not report.skipped:
        click.echo(
            f"{count_noun(report.groups_computed, 'group')} computed, {report.groups_kept} unchanged, "
            f"{report.groups_ended} removed"
        )
        click.echo(
            f"{report.estimator.name} is the current credit: series {ids.to_text(report.series_id)}, "
            f"job {ids.to_text(report.job_id)}"
        )


_LARGEST = 10


@click.command()
@lakes_option
@as_of_option
@episodes_options
@click.option(
    "--anchors",
    "definition_texts",
    multiple=True,
    metavar="JSON|FILE",
    help='Definition, e.g. \'{"kind": "json"}\', or a file with one. Repeatable.  '
    "[default: some simple ones and a suggested one]",
)
@click.option(
    "--groups",
    type=click.IntRange(min=0),
    default=500,
    show_default=True,
    help="Number of groups to measure, a fair sample; 0: all.",
)
@click.option(
    "--rows",
    type=click.Choice(["definitions", "largest"]),
    default="definitions",
    show_default=True,
    help="Rows that --format json and csv print; a table shows both.",
)
@click.option(
    "--keep",
    "keeps",
    is_flag=True,
    help="Store the figures in the lake as a job; the viewer shows them next to anchors.",
)
@progress_option()
@format_option
def anchors(
    lake_uri: Lakes,
    as_of: str | None,
    where: str | None,
    definition_texts: tuple[str, ...],
    groups: int,
    rows: str,
    keeps: bool,
    output_format: str,
) -> None:
    """Measure anchor definitions: the share of comparable steps, and the quality of the comparisons.

    \b
    Largest anchors, under the first definition (exact text by default):
    steps           steps in the state, in groups where two or more episodes visited it
    groups          number of these groups
    states_before   distinct states before it
    actions_before  distinct actions that led to it; many: possibly an error text
    actions         distinct actions in it; 1: no comparison
    score_std       deviation of the scores of the episodes that visited it

    \b
    Definitions:
    known       share of steps with a key
    shared      share of steps whose state two or more episodes of the group visited; these have an A_S
    singleton   share of steps in a state that no other step has (healthy: below 0.35)
    states      number of distinct states
    episodes    mean number of episodes in a shared state
    one_action  share of shared states with one action, which give no comparison
    ways_in     mean number of distinct actions that led to a shared state; many: a false anchor
    errors      share of shared steps whose state is marked as an error text
    seconds     CPU time for the keys

    Without --anchors the command finds counters and error texts in the states, and prints the credit command with a
    definition that excludes them. It writes to the lake only with --keep.
    docs/guides/which-anchor.md helps to choose a definition.
    """
    import polars as pl
    from polars import selectors

    from lake.cli.options import echo_rows, open_snapshot
    from lake.opening import open as open_lake
    from pipelines.credit.anchors.measures import (
        CANDIDATES,
        SUGGESTED,
        Walks,
        advise,
        collect_columns,
        find_largest_anchors,
        measure,
        record_measures,
        scan_steps,
        shorten,
    )
    from pipelines.credit.estimators.protocol import STATE_COLUMNS

    definitions = dict(_read_definition(text) for text in definition_texts) or dict(CANDIDATES)
    read = list(definitions.values())
    snapshot = open_snapshot(lake_uri, as_of)
    steps = scan_steps(snapshot, read, where=where, groups=groups or None)
    walks = Walks.of(steps, (*STATE_COLUMNS, *collect_columns(read, steps.collect_schema().names())))
    largest = find_largest_anchors(walks, next(iter(definitions.values())), _LARGEST)
    if rows == "largest" and output_format != "table":
        echo_rows(largest, output_format)
        return
    advice = None if definition_texts else advise(walks)
    if advice is not None and advice.definition is not None:
        definitions[SUGGESTED] = advice.definition
    measures = measure(walks, definitions)
    if keeps:
        sample = {"where": where, "groups": groups or None}
        sample_options = {name: value for name, value in sample.items() if value is not None}
        record_measures(open_lake(lake_uri), snapshot, definitions=definitions, measured=measures, **sample_options)
    if output_format != "table":
        echo_rows(measures, output_format)
        return
    if largest.is_empty():
        click.echo("No two episodes of a group visited the same state; siblings are played by --group-size 2 or more")
    else:
        click.echo(f"Largest anchors, by {next(iter(definitions))}:\n")
        echo_rows(largest.with_columns(state=pl.Series([shorten(text) for text in largest["state"]])), output_format)
    click.echo("\nDefinitions:\n")
    echo_rows(measures.with_columns(selectors.float().round(3)), output_format)
    click.echo()
    lake = format_lake_flags(lake_uri)
    for line in (*_describe_copies(walks, lake), *(() if advice is None else _describe_advice(advice, measures, lake))):
        click.echo(line)


def _describe_copies(walks: "Walks", lake: str) -> "Iterator[str]":
    copies = walks.count_copies()
    with_copies = copies.filter(copies["copies"] > 0)
    if with_copies.is_empty():
        return
    most = max((with_copies["copies"] / with_copies["episodes"]).to_list())
    yield (
        f"{with_copies['copies'].sum()} of {copies['episodes'].sum()} episodes are exact copies of a sibling (the same "
        f"states and actions), in {with_copies.height} of {copies.height} groups, at most {most:.0%} of a "
        "group. To drop only them from training: "
        f"`trajlake select distinct --filter dedup:by=decisions,within=group {lake}`"
    )


def _describe_advice(advice: "Advice", measured: "pl.DataFrame", lake: str) -> "Iterator[str]":
    from pipelines.credit.anchors.measures import SUGGESTED

    yield from advice.lines()
    if advice.definition is None:
        yield (
            "No counter and no certain error text was found in the states. docs/guides/which-anchor.md lists the "
            "limits of this search"
        )
        return
    before, after = (measured.filter(anchors=name).row(0, named=True) for name in ("exact", SUGGESTED))
    yield (
        f"Without them {after['shared']:.1%} of the steps are in a state that a sibling visited (now "
        f"{before['shared']:.1%}), {after['singleton']:.1%} are alone in theirs (now {before['singleton']:.1%}), and "
        f"{1 - after['known']:.1%} are compared with nothing (now {1 - before['known']:.1%}). If these texts are what "
        "they look like, compute with:"
    )
    yield f"trajlake credit gigpo {lake} --set {shlex.quote('anchors=' + advice.definition.model_dump_json())}"


def _read_definition(text: str) -> "tuple[str, Anchors]":
    """Read a definition; return it with its text on the command line as its name."""
    from pydantic import TypeAdapter, ValidationError

    from lake.errors import UsageError
    from lake.settings import describe_faults
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
        msg = f"--anchors {text!r}: {describe_faults(error)}. docs/guides/which-anchor.md lists the definitions"
        raise UsageError(msg) from error
