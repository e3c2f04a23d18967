"""Command `credit`: advantages over a lake, one command per estimator, and `compare` for finished jobs.

The names come from the registry, so listing them imports no estimator. An estimator's command has options of the job,
options of the estimator, and the report in words.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lake.cli.executor_options import executor_of, executor_options
from lake.cli.options import (
    ConfiguredCommand,
    Lakes,
    as_of_option,
    echo_rows,
    format_option,
    lake_flags,
    lakes_option,
    opened,
)
from pipelines.credit.estimators import ESTIMATORS, estimator_class, one_line

if TYPE_CHECKING:
    from pipelines.credit.estimators.protocol import Estimator
    from pipelines.credit.job import CreditReport


class CreditGroup(click.Group):
    """Estimators and commands in one space of names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Estimators, then commands."""
        return [*sorted(ESTIMATORS), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of a name; UsageError if there is none, or the estimator is refused, with the reason."""
        return self.commands.get(cmd_name) or estimator_command(estimator_class(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Estimators with the first line of their docstring, and commands."""
        with formatter.section("Estimators"):
            formatter.write_dl([(name, one_line(name)) for name in sorted(ESTIMATORS)])
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str()) for name, command in self.commands.items()])


@click.group(cls=CreditGroup, subcommand_metavar="ESTIMATOR|COMMAND [OPTIONS]")
def credit() -> None:
    """Compute advantages with an estimator and write them to the table `advantages`.

    Only groups whose episodes, scores or parameters changed since the series' last job are computed.
    `trajlake credit ESTIMATOR -h` lists an estimator's options.
    """


@credit.command(short_help="Compare two credit jobs.")
@click.argument("one", metavar="CREDIT1")
@click.argument("two", metavar="CREDIT2")
@lakes_option
@click.option(
    "--rows",
    type=click.Choice(["levels", "signal", "groups", "examples"]),
    default="levels",
    show_default=True,
    help="What to print: agreement by level, numbers of live and other groups, every group, or the largest changes.",
)
@click.option(
    "--examples", type=click.IntRange(0, 100_000), default=10, show_default=True, help="Steps to show at most."
)
@click.option("--memory-limit", metavar="SIZE", help="Memory, e.g. 2GB; beyond it queries spill.  [default: 80 %]")
@as_of_option
@format_option
def compare(
    one: str,
    two: str,
    lake_uri: Lakes,
    rows: str,
    examples: int,
    memory_limit: str | None,
    as_of: str | None,
    output_format: str,
) -> None:
    """Compare two sets of advantages.

    CREDIT is an estimator's name (its newest series), or the id of a credit series or job, or its beginning. A job
    means its series as it was when the job ended. Columns ending in _1 are of CREDIT1, those in _2 of CREDIT2. A group
    is live if two or more of its episodes are scored and their scores differ.
    """
    import polars as pl

    from lake.read.text_table import counted
    from pipelines.credit.compare import compare as compare_jobs

    found = compare_jobs(opened(lake_uri, as_of), one, two, examples=examples, memory=memory_limit)
    steps = found.levels.row(0, named=True)
    share = "-" if steps["flip_share"] is None else f"{steps['flip_share']:.1%}"
    changes = dict(found.groups["change"].value_counts().iter_rows())
    for number, side in enumerate((found.one, found.two), start=1):
        click.echo(f"{number}: {side.title}", err=True)
    shared = counted(steps["shared"], "step")
    click.echo(f"{shared} defined in both, {steps['flips']} ({share}) with opposite signs", err=True)
    gained, lost = (changes.get(change, 0) for change in ("gained", "lost"))
    click.echo(f"{counted(found.groups.height, 'group')}: {lost} live in 1 only, {gained} live in 2 only", err=True)
    frame: pl.DataFrame = getattr(found, rows)
    if rows == "levels" and output_format == "table":
        # Three columns are read, twenty are not.
        frame = frame.transpose(include_header=True, header_name="measure", column_names="level")
    echo_rows(frame, output_format)


_ANCHORS = (
    ". A definition of anchors is easier written in a file: anchors = {...} under [credit.NAME] for --config FILE; "
    "`trajlake anchors --anchors FILE` tries one, as JSON"
)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_OPTIONS: tuple[Decorator, ...] = (
    lakes_option,
    click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\".  [default: all]"),
    click.option(
        "--score",
        default="env_return",
        show_default=True,
        help="Episode score: env_return, or a scorer or reward, @VERSION or not.",
    ),
    click.option(
        "--rewards",
        default="env_reward",
        show_default=True,
        help="Step rewards: env_reward, or a scorer or reward, @VERSION or not.",
    ),
    click.option(
        "--grouping", help="Compare in the groups of this definition (`trajlake group`).  [default: as collected]"
    ),
    click.option(
        "--siblings",
        type=click.Choice(["kept", "all"]),
        default="kept",
        show_default=True,
        help="Of groups collected with --oversample: episodes that are compared, those that --keep kept or all.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of the estimator, e.g. gamma=0.9; listed below.  [default: as listed]",
    ),
    click.option(
        "--config",
        type=click.Path(dir_okay=False),
        help="TOML file: options in [credit.NAME], checks in [credit.integrity].  [default: none]",
    ),
    click.option(
        "--check",
        "checks",
        multiple=True,
        metavar="KEY=VALUE",
        help="An integrity check, e.g. singleton=refuse.  [default: every check's own]",
    ),
    click.option(
        "--purity/--no-purity",
        default=True,
        show_default=True,
        help="Look at actions and error texts of shared states, for credit_groups; their texts are read.",
    ),
    click.option("--force", is_flag=True, help="Compute all groups; else those that changed."),
    click.option(
        "--log-level",
        type=click.Choice(["warning", "debug"]),
        default="warning",
        show_default=True,
        help="debug: steps and what their credit is made of, on stderr.",
    ),
    click.option(
        "--log-episodes",
        metavar="WHERE",
        help="SQL predicate over `episodes`: whose steps are logged.  [default: two groups]",
    ),
    executor_options("Ranges of groups"),
    click.option(
        "--memory",
        "memory_gb",
        type=click.FloatRange(min=0, min_open=True),
        default=2.0,
        show_default=True,
        help="GB that the ranges computed at once may take together.",
    ),
)


def estimator_command(estimator: "type[Estimator]") -> click.Command:
    """The command that runs an estimator over a lake."""
    from pipelines.credit.estimators.options import PRESETS

    def run(**options: Any) -> None:
        _run(estimator, **options)

    options = list(_OPTIONS)
    if presets := PRESETS.get(estimator.name):
        text = f"Options as in other code: {', '.join(presets)}; --set and --config win.  [default: none]"
        options.append(click.option("--preset", metavar="NAME", help=text))
    for option in reversed(options):
        run = option(run)
    line = one_line(estimator.name)
    return click.command(
        name=estimator.name,
        cls=ConfiguredCommand,
        models=lambda: {"Options of the estimator, for --set and --config": estimator},
        help=line,
        short_help=line,
    )(run)


def _run(estimator: "type[Estimator]", **given: Any) -> None:
    import lake
    from lake.errors import UsageError
    from pipelines.credit.estimators.options import PRESETS
    from pipelines.credit.health.integrity import IntegrityConfig
    from pipelines.credit.job import run_credit, with_step_source

    uri = given.pop("lake_uri")
    target = lake.open(uri)
    config = given.pop("config")
    settings = _options(config, estimator.name, given.pop("settings"), list(estimator.model_fields))
    preset: Mapping[str, Any] = {}
    if (name := given.pop("preset", None)) is not None:
        presets = PRESETS[estimator.name]
        if name not in presets:
            msg = f"{estimator.name} has no preset {name!r}; valid: {', '.join(presets)}"
            raise UsageError(msg)
        preset = presets[name]
    chosen = _built(estimator, {**preset, **settings}, estimator.name)
    checks = _options(config, "integrity", given.pop("checks"), list(IntegrityConfig.model_fields))
    integrity = _built(IntegrityConfig, checks, "credit.integrity")
    open_source = "step_source" not in settings and settings.get("episode_source", "score") == "score"
    if open_source:
        chosen = with_step_source(target, chosen, given["where"], given["score"], given["rewards"])
        if getattr(chosen, "step_source", None) == "terminal_score":
            # A preset's sum of rewards is then the score itself.
            chosen = chosen.model_copy(update={"episode_source": "score"})
    executor = executor_of(given.pop("executor"), given.pop("workers"))
    is_logged = given.pop("log_level") == "debug"
    if given["log_episodes"] is not None and not is_logged:
        raise UsageError("--log-episodes chooses what --log-level debug logs; add that, or leave it out")
    with _logged() if is_logged else nullcontext():
        report = run_credit(
            target, chosen, integrity=integrity, executor=executor, notice=partial(click.echo, err=True), **given
        )
    if open_source and getattr(chosen, "step_source", None) == "terminal_score":
        click.echo("no step rewards are recorded: the episode score is the last step's reward", err=True)
    _report(report, lake_flags(uri))


@contextmanager
def _logged() -> Iterator[None]:
    """Print records of the logger of credit on stderr, from DEBUG on."""
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


def _report(report: "CreditReport", lake: str) -> None:
    """What was done, in words; `--lake LAKE` in the commands that are proposed becomes what was given."""
    from lake import ids
    from lake.read.text_table import counted
    from pipelines.credit.flags import in_words

    def tell(line: str) -> None:
        click.echo(line.replace("--lake LAKE", lake), err=True)

    for line in report.findings:
        tell(line)
    if report.skipped:
        click.echo(
            f"nothing changed since job {ids.to_text(report.job_id)} (--force computes it again); "
            f"{report.estimator.name} is {'now' if report.made_current else 'still'} the current credit"
        )
    summary = report.summary
    click.echo(
        f"{counted(summary.episodes, 'episode')}, {counted(summary.steps, 'step')} in "
        f"{counted(summary.groups, 'group')}: {summary.live_groups} live, {summary.dead_groups} dead, "
        f"{summary.singleton_groups} singleton, {summary.unscored_groups} unscored"
    )
    if report.scorer_versions:
        named = (f"{name.partition('@')[0]}@{version}" for name, version in report.scorer_versions.items())
        click.echo(f"scores of {', '.join(dict.fromkeys(named))}")
    share = f"{summary.shared_fraction:.1%} of the steps are in a state that a sibling visited; "
    click.echo(f"{share if summary.has_anchors else ''}{counted(summary.undefined_steps, 'advantage')} undefined")
    for line in (*summary.warnings(), *in_words(report.unknown), *report.other_scores):
        tell(line)
    if not report.skipped:
        click.echo(
            f"{counted(report.groups_computed, 'group')} computed, {report.groups_kept} unchanged, "
            f"{report.groups_ended} removed"
        )
        click.echo(
            f"{report.estimator.name} is the current credit: series {ids.to_text(report.series_id)}, "
            f"job {ids.to_text(report.job_id)}"
        )


def _options(config: str | None, section: str, pairs: tuple[str, ...], valid: list[str]) -> dict[str, Any]:
    """Options from the file, then from KEY=VALUE pairs."""
    from lake.errors import UsageError
    from lake.settings import from_file, from_pairs

    found = from_file(config, ("credit", section)) if config else {}
    if unknown := set(found) - set(valid):
        msg = f"{config}: [credit.{section}] has unknown options {sorted(unknown)}; valid: {', '.join(valid)}"
        raise UsageError(msg)
    return found | from_pairs(pairs)


def _built(model: Any, options: dict[str, Any], name: str) -> Any:
    from pydantic import ValidationError

    from lake.errors import UsageError
    from lake.settings import faults

    try:
        return model.model_validate(options)
    except ValidationError as error:
        advice = _ANCHORS if any("anchors" in found["loc"] for found in error.errors()) else ""
        msg = f"{name}: {faults(error)}. Options: {', '.join(model.model_fields)}{advice}"
        raise UsageError(msg) from error
