"""Command `score`: reward functions and built-in scorers over a lake."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import click

from lake.cli.executor_options import executor_of, executor_options
from lake.cli.options import ConfiguredCommand, Lakes, lakes_option

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lake.lake import Lake
    from pipelines.score.functions import ScoreConfig
    from pipelines.score.job import ScoreReport
    from pipelines.score.run import Progress


def _configuration() -> "dict[str, type[BaseModel]]":
    from pipelines.score.functions import ScoreConfig
    from pipelines.score.sandbox.contract import SandboxLimits

    return {
        "Options of [score], for --set and --config": ScoreConfig,
        "Limits of the sandbox, for [score.limits] of --config": SandboxLimits,
    }


@click.command(name="import")
@click.argument("file")
@lakes_option
@click.option("--name", help="Scorer of all rows.  [default: the column `scorer`]")
def import_scores(file: str, lake_uri: Lakes, name: str | None) -> None:
    """Take scores that somebody gave: FILE is CSV, JSON, JSONL or Parquet, packed or not.

    A row names its episode by `episode_id`, or by `task_id` and what else tells episodes apart: `run_id`,
    `rollout_index`, `attempt`, `agent_id`, `collection_round`, `seed`. Its score is in `value` (or `score`, or
    `reward`), a number or a truth value; `step_index` makes it that of one step. `scorer`, `reason` and `error` are
    taken too.

    Rows that cannot be taken are in the table `rejects`. The same file again adds nothing; a score that has changed
    takes the place of the former one. Exits with 1 if nothing was taken.
    """
    import lake
    from lake.read.show import one_line
    from lake.read.text_table import cell, counted
    from lake.write.score_import import import_file

    report = import_file(lake.open(lake_uri), file, name=name)
    scorers = report.scorers or ([name] if name else [])
    by = f" of {cell(', '.join(scorers))}" if scorers else ""
    click.echo(
        f"{cell(file)}: {counted(report.new, 'score')}{by} ({report.present} already present), "
        f"{report.unmatched} unmatched, {report.invalid} invalid, of {counted(report.rows, 'row')}"
    )
    for example in report.examples:
        click.echo(f"  {one_line(example)}", err=True)
    if report.unmatched or report.invalid:
        click.echo("they are in the table `rejects`", err=True)
    if report.rows and not report.new + report.present:
        sys.exit(1)


class _Score(ConfiguredCommand):
    """`score`; where its first word is one of `children`, that command."""

    children: ClassVar[dict[str, click.Command]] = {"import": import_scores}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command that is meant, which is the one that runs."""
        if args and (child := self.children.get(args[0])):
            return child.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Score, models=_configuration)
@click.argument("target", required=False)
@lakes_option
@click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\".  [default: all]")
@click.option("--reward", metavar="NAME", help="Instead of TARGET: the weighted reward [reward.NAME] of --config.")
@click.option("--name", help="Name under which the scores are kept.  [default: the function's]")
@click.option("--arg", "arguments", multiple=True, metavar="KEY=VALUE", help="For the function.  [default: its own]")
@click.option("--retry-failed", is_flag=True, help="Only score again the episodes that have an error.")
@click.option("--force", is_flag=True, help="Score all; else those without a score.")
@click.option("--default-step-reward", type=float, help="For steps the function gave no reward.  [default: no row]")
@click.option("--allow-network", is_flag=True, help="Run a function that requires the network, outside the sandbox.")
@executor_options("Calls of a function in this process, or parts of the episodes,")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Option of [score], e.g. batch_size=16.")
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file with [score].  [default: none]")
def score(
    target: str | None,
    lake_uri: Lakes,
    where: str | None,
    reward: str | None,
    name: str | None,
    arguments: tuple[str, ...],
    retry_failed: bool,
    force: bool,
    default_step_reward: float | None,
    allow_network: bool,
    executor: str,
    workers: int | None,
    settings: tuple[str, ...],
    config: str | None,
) -> None:
    """Score episodes with TARGET, and write the scores to the table `scores`.

    TARGET is module.py:function, a reward function of yours (docs/guides/reward-functions.md), or the name of a
    built-in scorer (docs/guides/scorers.md). Episodes that this version of it has scored are left alone; a version is a
    hash of its source and of what it imports from its own folder.

    Functions run in a sandbox. One that declares requires_network (a judge) runs outside it, and only with
    --allow-network.

    `trajlake score import FILE --name human` takes scores that somebody gave: `trajlake score import -h`.
    """
    import lake

    if target == "import":
        from lake.errors import UsageError

        raise UsageError("`import` comes before all options: `trajlake score import FILE --name NAME`")
    if reward is not None:
        flags = {"--name": name, "--arg": arguments, "--set": settings, "--default-step-reward": default_step_reward}
        flags |= {"--executor": executor != "local", "--workers": workers is not None}
        _require_alone(reward, target, flags | {"--retry-failed": retry_failed, "--allow-network": allow_network})
        _score_reward(lake.open(lake_uri), reward, config, where, force=force)
        return
    from lake.errors import UsageError
    from pipelines.score.job import run_score, scorer_of

    given = {"name": name, "default_step_reward": default_step_reward, "allow_network": allow_network or None}
    options = _options(config, settings, arguments, {key: value for key, value in given.items() if value is not None})
    if executor == "local" and workers is not None:
        limits = options.limits.model_copy(update={"workers": workers})
        options = options.model_copy(update={"limits": limits})
    lk = lake.open(lake_uri)
    if target is None:
        msg = "give what to score with: module.py:function, a built-in scorer, or --reward NAME --config FILE"
        raise UsageError(msg)
    work = scorer_of(target, options)
    for note in work.notes:
        click.echo(note, err=True)
    report = run_score(
        lk,
        work,
        where=where,
        config=options,
        retry_failed=retry_failed,
        force=force,
        executor=None if executor == "local" else executor_of(executor, workers),
        progress=_print_progress,
        notice=partial(click.echo, err=True),
    )
    _print_report(report)


def _require_alone(reward: str, target: str | None, flags: dict[str, Any]) -> None:
    from lake.errors import UsageError

    if target is not None:
        msg = f"give {target} or --reward {reward}, not both: a reward is made of scores that are there already"
        raise UsageError(msg)
    if idle := [flag for flag, value in flags.items() if value or isinstance(value, float)]:
        msg = f"of no effect on a reward: {', '.join(idle)}; everything that decides it is in --config FILE"
        raise UsageError(msg)


def _options(
    config: str | None, settings: tuple[str, ...], arguments: tuple[str, ...], given: dict[str, Any]
) -> "ScoreConfig":
    """Options from the file, then from --set, then from their own flags."""
    from lake.settings import from_file, from_pairs, validated
    from pipelines.score.functions import ScoreConfig

    found = from_file(config, ("score",)) if config else {}
    found |= from_pairs(settings) | given
    if arguments:
        before = found.get("arguments")
        found["arguments"] = (before if isinstance(before, dict) else {}) | from_pairs(arguments)
    return validated(ScoreConfig, found, "[score]: ")


def _score_reward(lk: "Lake", reward: str, config: str | None, where: str | None, *, force: bool) -> None:
    from lake import ids
    from lake.errors import UsageError
    from lake.read.show import one_line
    from lake.read.text_table import counted
    from pipelines.score.rewards import load_reward, run_reward

    if config is None:
        msg = f"--reward {reward} needs --config FILE, a TOML file with the section [reward.{reward}]"
        raise UsageError(msg)
    definition = load_reward(config, reward)
    report = run_reward(lk, definition, where=where, force=force)
    made = ", ".join(f"{alias} = {component}" for alias, component in report.components.items())
    click.echo(f"reward {reward}@{report.version}: {made}")
    steps = report.known_steps + report.unknown_steps
    of_steps = (
        f"; {counted(steps, 'step')}: {report.known_steps} known, {report.unknown_steps} unknown" if steps else ""
    )
    click.echo(
        f"{counted(report.episodes, 'episode')}: {report.known} known, {report.unknown} unknown, {report.unchanged} "
        f"unchanged{of_steps}"
    )
    if definition.level == "both" and not steps and not report.skipped:
        click.echo('level is "both", but no component has scored a step: no step has a reward', err=True)
    if report.made_current:
        click.echo(f"{reward}@{report.version} is current again", err=True)
    for reason, count in report.reasons.items():
        click.echo(f"  {count} without a reward: {one_line(reason)}", err=True)
    if report.job_id is not None and not report.skipped:
        click.echo(f"job {ids.to_text(report.job_id)}, series {ids.to_text(report.series_id)}")
    if report.unknown and not report.known and not report.known_steps:
        _fail_without_scores(f"reward {reward} is unknown everywhere", report.reasons)


def _print_progress(progress: "Progress") -> None:
    """A line on stderr after every commit, and every `commit_seconds`."""
    rate = progress.done / progress.seconds if progress.seconds > 0 else 0.0
    speed = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
    text = f"{progress.done} of {progress.total} episodes scored, {progress.failed} with errors, {speed} a second"
    click.echo(text, err=True)
    sys.stderr.flush()


def _print_report(report: "ScoreReport") -> None:
    from lake import ids
    from lake.read.text_table import counted

    click.echo(f"scorer {report.scorer}@{report.version}")
    if report.made_current:
        click.echo(f"{report.scorer}@{report.version} is current again", err=True)
    if not report.scored and not report.overtaken:
        click.echo(f"nothing to do: {report.present} of {report.selected} episodes have been scored")
        if report.failed_before:
            click.echo(f"--retry-failed scores the {report.failed_before} that ended with errors again", err=True)
        return
    click.echo(
        f"{counted(report.scored, 'episode')} scored in {report.seconds:.1f} s: {report.known} with a score, "
        f"{report.unscored} without, {report.failed} with errors; {counted(report.steps, 'step')}; "
        f"{report.present} were scored before"
    )
    if report.overtaken:
        click.echo(f"{report.overtaken} were scored by another run, or taken out of the lake, meanwhile", err=True)
    _print_faults(report)
    if report.failed:
        click.echo("--retry-failed scores again those with errors", err=True)
    if report.job_ids:
        click.echo(f"jobs {' '.join(map(ids.to_text, report.job_ids))}, series {ids.to_text(report.series_id)}")
    if report.has_no_values and report.failed:
        _fail_without_scores(f"no episode has a score: {report.failed} of {report.scored} failed", report.errors)


def _print_faults(report: "ScoreReport") -> None:
    from lake.read.show import one_line, printable
    from lake.read.text_table import counted

    for reason, count in report.reasons.items():
        click.echo(f"  {count} without a score: {one_line(reason)}", err=True)
    if report.unmatched:
        click.echo(f"{report.unmatched} step outputs match no step", err=True)
    if report.answers:
        click.echo(f"{counted(report.answers, 'new answer')} of judges", err=True)
    for example in report.examples:
        click.echo(f"  {one_line(example)}", err=True)
    if report.printed:
        click.echo(f"the function printed:\n{printable(report.printed).rstrip()}", err=True)


def _fail_without_scores(what: str, reasons: dict[str, int]) -> None:
    """One line with the most frequent reason, and an exit status for whoever runs this in a script."""
    from lake.read.show import one_line

    why, count = next(iter(reasons.items()), ("no reason is given", 0))
    click.echo(f"{what}, most often ({count}) because: {one_line(why)}", err=True)
    raise click.exceptions.Exit(1)
