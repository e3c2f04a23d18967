"""The command of one estimator: options of the job, options of the estimator, and the report in words."""

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from lake.cli_options import lake_option
from pipelines.credit.estimators import one_line

if TYPE_CHECKING:
    from pipelines.credit.estimators.protocol import Estimator
    from pipelines.credit.job import CreditReport

_ANCHORS = (
    ". A definition of anchors is easier written in a file: anchors = {...} under [credit.NAME] for --config FILE; "
    "`trajlake anchors --anchors FILE` tries one, as JSON"
)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_OPTIONS: tuple[Decorator, ...] = (
    lake_option,
    click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\". Default: all."),
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
    click.option("--grouping", help="Compare in the groups of this definition (`trajlake group`), not as collected."),
    click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the estimator, e.g. gamma=0.9."
    ),
    click.option(
        "--config",
        type=click.Path(dir_okay=False),
        help="TOML file: options in [credit.NAME], checks in [credit.integrity].",
    ),
    click.option(
        "--check", "checks", multiple=True, metavar="KEY=VALUE", help="An integrity check, e.g. singleton=refuse."
    ),
    click.option(
        "--purity/--no-purity",
        default=True,
        show_default=True,
        help="Look at actions and error texts of shared states, for credit_groups; their texts are read.",
    ),
    click.option("--force", is_flag=True, help="Compute all groups, changed or not."),
    click.option(
        "--executor",
        type=click.Choice(["local", "processes", "ray"]),
        default="local",
        show_default=True,
        help="Where groups are computed: threads, processes of this machine, or a Ray cluster.",
    ),
    click.option(
        "--workers", type=click.IntRange(min=1), help="Ranges of groups computed at once. Default: a core each."
    ),
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

    def run(**options: Any) -> None:
        _run(estimator, **options)

    for option in reversed(_OPTIONS):
        run = option(run)
    names = ", ".join(estimator.model_fields)
    text = f"{one_line(estimator.name)}\n\nOptions for --set: {names}. docs/guides/ explains them."
    return click.command(name=estimator.name, help=text, short_help=one_line(estimator.name))(run)


def _run(estimator: "type[Estimator]", **given: Any) -> None:
    """Build the configuration, run the job, report."""
    import lake
    from pipelines.credit.integrity import IntegrityConfig
    from pipelines.credit.job import run_credit, with_step_source
    from pipelines.executor import executor_named

    uri = given.pop("lake_uri")
    target = lake.open(uri)
    config = given.pop("config")
    options = _options(config, estimator.name, given.pop("settings"), list(estimator.model_fields))
    chosen = _built(estimator, options, estimator.name)
    checks = _options(config, "integrity", given.pop("checks"), list(IntegrityConfig.model_fields))
    integrity = _built(IntegrityConfig, checks, "credit.integrity")
    open_source = "step_source" not in options and getattr(chosen, "episode_source", "score") == "score"
    if open_source:
        chosen = with_step_source(target, chosen, given["where"], given["score"], given["rewards"])
    executor = executor_named(given.pop("executor"), given.pop("workers"))
    report = run_credit(target, chosen, integrity=integrity, executor=executor, notice=_say, **given)
    if open_source and getattr(chosen, "step_source", None) == "terminal_score":
        click.echo("no step rewards are recorded: the episode score is the last step's reward", err=True)
    _report(report, shlex.quote(uri))


def _say(line: str) -> None:
    click.echo(line, err=True)


def _report(report: "CreditReport", lake: str) -> None:
    """What was done, in words.

    Args:
        report: of the job.
        lake: its address, for the commands that are proposed.
    """
    from lake import ids
    from pipelines.credit.unknowns import in_words

    def tell(line: str) -> None:
        _say(line.replace("--lake LAKE", f"--lake {lake}"))

    for line in report.findings:
        tell(line)
    if report.skipped:
        click.echo(
            f"nothing changed since job {ids.to_text(report.job_id)} (--force computes it again); "
            f"{report.estimator.name} is {'now' if report.made_current else 'still'} the current credit"
        )
    summary = report.summary
    click.echo(
        f"{summary.episodes} episodes, {summary.steps} steps in {summary.groups} groups: {summary.live_groups} live, "
        f"{summary.dead_groups} dead, {summary.singleton_groups} singleton, {summary.unscored_groups} unscored"
    )
    if report.scorer_versions:
        named = (f"{name.partition('@')[0]}@{version}" for name, version in report.scorer_versions.items())
        click.echo(f"scores of {', '.join(dict.fromkeys(named))}")
    share = f"{summary.shared_fraction:.1%} of the steps are in a state that a sibling visited; "
    click.echo(f"{share if summary.has_anchors else ''}{summary.undefined_steps} advantages undefined")
    for line in (*summary.warnings(), *in_words(report.unknown)):
        tell(line)
    if not report.skipped:
        click.echo(
            f"{report.groups_computed} groups computed, {report.groups_kept} unchanged, {report.groups_ended} without "
            "episodes now"
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
    """A configuration, or what is wrong with the options."""
    from pydantic import ValidationError

    from lake.errors import UsageError
    from lake.faults import faults

    try:
        return model.model_validate(options)
    except ValidationError as error:
        advice = _ANCHORS if any("anchors" in found["loc"] for found in error.errors()) else ""
        msg = f"{name}: {faults(error)}. Options: {', '.join(model.model_fields)}{advice}"
        raise UsageError(msg) from error
