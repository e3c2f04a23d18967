"""Command `credit`: advantages over a lake."""

from typing import Any

import click

from lake.cli_options import lake_option


@click.command()
@click.argument("estimator", type=click.Choice(["gigpo"]))
@lake_option
@click.option("--where", help="SQL predicate over `episodes`, e.g. \"run_id = 'a'\". Default: all.")
@click.option("--score", default="env_return", show_default=True, help="Episode score: env_return, or a scorer's name.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the estimator, e.g. omega=0.5."
)
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file with the options under [credit.ESTIMATOR].")
@click.option("--force", is_flag=True, help="Compute even if the same inputs and parameters have a result.")
def credit(
    estimator: str,
    lake_uri: str,
    where: str | None,
    score: str,
    settings: tuple[str, ...],
    config: str | None,
    force: bool,
) -> None:
    """Compute advantages with ESTIMATOR and write them to the table `advantages`.

    \b
    Options of gigpo (docs/guides/gigpo.md): gamma, omega, combination, episode_norm, step_norm,
    baseline, singleton, invalid_action_penalty, episode_source, step_source, default_step_reward,
    truncated, revisits, anchors (JSON).

    Unless step_source is given: the recorded step rewards, or, where none are recorded, the episode score as the
    reward of the last step.
    """
    import lake
    from lake import ids
    from pipelines.credit.job import run_credit, with_step_source

    target = lake.open(lake_uri)
    options = _options(estimator, settings, config)
    chosen = _build(options)
    if "step_source" not in options and chosen.episode_source == "score":
        chosen = with_step_source(target, chosen, where, score)
        if chosen.step_source == "terminal_score":
            click.echo("no step rewards are recorded: the episode score is the last step's reward", err=True)
    report = run_credit(target, chosen, where=where, score=score, force=force)
    summary = report.summary
    if report.skipped:
        click.echo(
            f"nothing to do: job {ids.to_text(report.job_id)} has these inputs and parameters (--force repeats it)"
        )
    share = "-" if summary.shared_fraction is None else f"{summary.shared_fraction:.1%}"
    click.echo(
        f"{summary.episodes} episodes, {summary.steps} steps in {summary.groups} groups: {summary.live_groups} live, "
        f"{summary.dead_groups} dead, {summary.singleton_groups} singleton, {summary.unscored_groups} unscored"
    )
    click.echo(
        f"{share} of steps share their anchor state with a sibling; {summary.undefined_steps} advantages undefined"
    )
    if not report.skipped:
        click.echo(f"job {ids.to_text(report.job_id)}, series {ids.to_text(report.series_id)}")


def _options(estimator: str, settings: tuple[str, ...], config: str | None) -> dict[str, Any]:
    """Options from the file, then from --set."""
    from lake.errors import UsageError
    from lake.settings import from_file, from_pairs

    found = from_file(config, ("credit", estimator)) if config else {}
    unknown = set(found) - set(_fields())
    if unknown:
        msg = f"{config}: [credit.{estimator}] has unknown options {sorted(unknown)}; valid: {', '.join(_fields())}"
        raise UsageError(msg)
    return found | from_pairs(settings)


def _fields() -> list[str]:
    from pipelines.credit.estimators.gigpo import GiGPO

    return list(GiGPO.model_fields)


def _build(options: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from lake.errors import UsageError
    from pipelines.credit.estimators.gigpo import GiGPO

    try:
        return GiGPO.model_validate(options)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        msg = f"gigpo: {faults}. Options: {', '.join(_fields())}"
        raise UsageError(msg) from error
