"""Command `train`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import Lakes, SectionedCommand, echo_rows, format_option, lakes_option
from trainer.losses import LOSSES, Aggregation, Unit

if TYPE_CHECKING:
    from lake.lake import Lake
    from trainer.config import TrainConfig
    from trainer.runs.progress import ProgressReporter
    from trainer.runs.stages import Stage
    from trainer.runs.training_run import TrainResult

_SECTIONS = {
    "Run": (
        "lake_uri",
        "out",
        "run_id",
        "config_file",
        "pairs",
        "resume",
        "repeated",
        "plan_only",
        "measure",
        "output_format",
    ),
    "Model": ("model", "reference", "device", "dtype", "ranks"),
    "Data": (
        "where",
        "selection",
        "validate",
        "advantages",
        "live_only",
        "tokens",
        "max_staleness",
        "max_length",
    ),
    "Loss": ("loss", "aggregation", "unit"),
    "Course": ("epochs", "episodes_per_step", "token_budget", "learning_rate", "seed", "checkpoint_every"),
}
"""Headings of the help text."""
_FIELDS = {name: name for part in ("Model", "Data", "Loss", "Course") for name in _SECTIONS[part] if name != "ranks"}
_FIELDS |= {
    "validate": "validation.where",
    "loss": "loss.name",
    "aggregation": "loss.aggregation",
    "unit": "loss.unit",
}
"""Option -> the field of TrainConfig that it sets."""
_AGGREGATIONS, _UNITS = (click.Choice([member.value for member in kind]) for kind in (Aggregation, Unit))


@click.command(
    cls=SectionedCommand,
    sections=_SECTIONS,
    epilog="A flag is for what changes from run to run; `--set` and the file reach everything that "
    "docs/reference/config.md lists under trainer.config.TrainConfig.",
)
@lakes_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run: checkpoints, final/.")
@click.option("--run", "run_id", help="Name of the run.  [default: the name of --out]")
@click.option(
    "--config", "config_file", type=click.Path(), help="TOML file; [trainer] in it sets any field.  [default: none]"
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any field of the configuration, e.g. keep_last=2, loss.beta=0.5, loggers=wandb. Comes after the file.",
)
@click.option("--resume", is_flag=True, help="Continue the run in --out; starts it if there is none.")
@click.option("--repeat", "repeated", metavar="RUN", help="Repeat a run on the data it read: its name, or its job.")
@click.option("--plan", "plan_only", is_flag=True, help="Show what would be trained; train and write nothing.")
@click.option("--measure", is_flag=True, help="With --plan: load the model and time it.  [default: go by earlier jobs]")
@format_option
@click.option("--model", help="Model folder in Hugging Face layout, or a .gguf file. Required, here or in the file.")
@click.option("--reference", help="Model that the loss compares with.  [default: the model as it is at the start]")
@click.option("--device", help="Torch device, e.g. cuda.  [default: cpu]")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Type of matrix products.  [default: float32]"
)
@click.option("--ranks", type=int, help="Processes that train together, sharded (FSDP2).  [default: one, not sharded]")
@click.option("--where", help='SQL predicate over episodes, for example "env_return > 0".  [default: all]')
@click.option("--selection", help="Train on what a selection kept: its name, or a select job.  [default: no selection]")
@click.option("--validate", metavar="WHERE", help="SQL predicate: episodes to hold out and measure.  [default: none]")
@click.option(
    "--advantages",
    help="Whose advantages: an estimator's name, or (the beginning of) a credit series' or job's id. "
    "[default: the current credit]",
)
@click.option(
    "--live-only/--all-groups", default=None, help="Leave out dead groups.  [default: where the loss uses advantages]"
)
@click.option(
    "--tokens",
    type=click.Choice(["auto", "engine", "rendered"]),
    help="Token rows: as sampled (engine), rendered from text, or the former first (auto).  [default: auto]",
)
@click.option(
    "--max-staleness", type=int, help="Leave out steps whose policy is more versions old.  [default: no limit]"
)
@click.option("--max-length", type=int, help="Longest sequence in tokens.  [default: as the data needs]")
@click.option("--loss", type=click.Choice(list(LOSSES)), help="What to optimise. Required, here or in the file.")
@click.option("--aggregation", type=_AGGREGATIONS, help="How tokens are averaged.  [default: by loss]")
@click.option("--unit", type=_UNITS, help="What they are averaged over.  [default: by loss]")
@click.option("--epochs", type=int, help="Passes over the data.  [default: 1]")
@click.option("--episodes-per-step", type=int, help="Episodes of an optimizer step.  [default: 8]")
@click.option("--token-budget", type=int, help="Tokens of one forward pass.  [default: 8192]")
@click.option("--lr", "learning_rate", type=float, help="Peak learning rate.  [default: by model size]")
@click.option("--seed", type=int, help="Seed of the order of the episodes.  [default: 0]")
@click.option("--checkpoint-every", type=int, help="Optimizer steps between checkpoints.  [default: 50]")
def train(
    lake_uri: Lakes,
    out: Path,
    run_id: str | None,
    config_file: str | None,
    pairs: tuple[str, ...],
    resume: bool,
    repeated: str | None,
    ranks: int | None,
    plan_only: bool,
    measure: bool,
    output_format: str,
    **flags: Any,
) -> None:
    """Train a policy on the lake's trajectories.

    Text-only trajectories are tokenised with the model's chat template first, once. A killed run goes on with --resume
    and ends with the same weights. A configuration with [[trainer.stages]] trains one stage after the other. The last
    line on stdout is the sha256 of the final weights.
    """
    import lake
    from lake.cli.options import quiet
    from trainer.backends.ranks import launched, reported_once
    from trainer.commands import explain_interrupt, file_faults
    from trainer.runs.stages import read_stages
    from trainer.train_settings import configured, given_settings, read_settings

    with reported_once():
        _check_flags(ranks, plan_only=plan_only, measure=measure)
        given = given_settings(pairs, {_FIELDS[name]: value for name, value in flags.items() if value is not None})
        if repeated is not None:
            _check_repeat(given, config_file, resume=resume, plan_only=plan_only)
        settings = read_settings(config_file, given)
        stages = read_stages(settings) if repeated is None else []
        was_started = (out / "run.json").exists() or any(out.glob("*/run.json"))
        is_new = repeated is None and not stages and not (resume and was_started)
        config = configured(settings) if is_new else None
        lk = lake.open(lake_uri)
    quiet()
    if plan_only:
        runs = {stage.name: stage.config for stage in stages} or {"": config or configured(settings)}
        for stage, planned in runs.items():
            _print_plan(lk, planned, output_format, stage=stage, measure=measure)
        return
    if ranks is not None and not launched():
        from trainer.backends.ranks import launch_ranks

        raise SystemExit(launch_ranks(ranks, sys.argv[1:]))
    from trainer.runs.progress import progress_reporter
    from trainer.runs.repeat import repeat

    with file_faults(), explain_interrupt(out):
        with progress_reporter() as reporter:
            if repeated is not None:
                result = repeat(
                    lk, repeated, out, run_id=run_id or out.name, on_step=reporter.on_step, on_plan=reporter.on_plan
                )
            else:
                result = _trained(lk, config, stages, settings, out, run_id, reporter, resume=resume)
        _print_result(result)


def _check_flags(ranks: int | None, *, plan_only: bool, measure: bool) -> None:
    """Refuse (UsageError) less than one rank, and --measure without --plan: flags about the command, not the run."""
    from lake.errors import UsageError

    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks is {ranks}; it takes a number of processes, from 1")
    if measure and not plan_only:
        raise UsageError("--measure times a model for --plan; leave it out, or add --plan")


def _trained(
    lk: "Lake",
    config: "TrainConfig | None",
    stages: "list[Stage]",
    settings: dict[str, Any],
    out: Path,
    named: str | None,
    reporter: "ProgressReporter",
    *,
    resume: bool,
) -> "TrainResult":
    """Start or continue a run, or the stages of one."""
    from lake.errors import UsageError
    from trainer.backends.ranks import join_ranks
    from trainer.runs.offline import resume as resume_run
    from trainer.runs.offline import train as start_run
    from trainer.runs.runs import RunFolder, check_unchanged
    from trainer.runs.stages import train_stages

    run_id = named or out.name
    ranks = join_ranks(str(settings.get("device", "cpu")))
    if stages:
        begun = ranks.on_rank_zero(lambda: any(RunFolder(out / stage.name).read() for stage in stages))
        if begun and not resume:
            raise UsageError(f"{out} holds a run already; continue it with --resume, or choose another --out")
        return train_stages(lk, stages, out, run_id=run_id, on_step=reporter.on_step, on_plan=reporter.on_plan)
    if config is not None:
        return start_run(lk, config, out, run_id=run_id, on_step=reporter.on_step, on_plan=reporter.on_plan)
    record = ranks.on_rank_zero(RunFolder(out).read)
    if record is None:
        staged = sorted(path.parent.name for path in out.glob("*/run.json"))
        msg = f"{out} holds a run of stages ({', '.join(staged)}): give the --config that it was started with again"
        raise UsageError(msg)
    if named not in (None, record.run_id):
        msg = f"--run {named}: the run in {out} is called {record.run_id}; leave --run out, or choose another --out"
        raise UsageError(msg)
    check_unchanged(settings, record.config)
    return resume_run(lk, out, on_step=reporter.on_step, on_plan=reporter.on_plan)


def _check_repeat(given: dict[str, Any], config_file: str | None, *, resume: bool, plan_only: bool) -> None:
    """Refuse (UsageError) other options: a repetition has the configuration of the run it repeats."""
    from lake.errors import UsageError
    from lake.settings import leaves
    from trainer.train_settings import flag_of

    others = [flag_of(field) for field in leaves(given)]
    others += ["--config"] * bool(config_file) + ["--resume"] * resume + ["--plan"] * plan_only
    if others:
        raise UsageError(f"--repeat takes the run's own configuration: leave out {', '.join(others)}")


def _print_plan(lk: "Lake", config: "TrainConfig", output_format: str, *, stage: str, measure: bool) -> None:
    """The plan of a run, or of one of its stages (one that follows another with the first one's model)."""
    from trainer.runs.preview import estimate_seconds, plan_rows, preview

    if stage:
        click.echo(f"stage {stage}", err=True)
    with preview(lk, config) as prepared:
        too_long = prepared.selection.too_long
        for note in ([] if too_long is None else [too_long.describe(prepared.selection.max_length)]) + prepared.notes:
            click.echo(note, err=True)
        seconds, how = estimate_seconds(prepared.snapshot, prepared.plan, config, measure=measure)
        echo_rows(plan_rows(prepared, epochs=config.epochs, seconds=seconds, how=how), output_format)


def _print_result(result: "TrainResult") -> None:
    from lake import ids
    from trainer.backends.ranks import leave_ranks
    from trainer.runs.progress import counted

    if not leave_ranks().leads:
        return
    for note in result.notes:
        click.echo(note, err=True)
    steps = counted(result.optimizer_steps, "optimizer step")
    click.echo(f"job {ids.to_text(result.job_id)}: {steps}, model in {result.model}")
    click.echo(f"weights sha256 {result.weights_sha256}")
