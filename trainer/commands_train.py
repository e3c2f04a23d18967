"""Commands `train` and `init-model`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lake.cli_options import echo_rows, format_option, lake_option

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lake.lake import Lake
    from trainer.config import TrainConfig
    from trainer.training_run import TrainResult

Config = TypeVar("Config", bound="BaseModel")
_TUNABLE = (
    "model",
    "loss",
    "where",
    "selection",
    "advantages",
    "live_only",
    "tokens",
    "epochs",
    "episodes_per_step",
    "token_budget",
    "max_length",
    "learning_rate",
    "seed",
    "checkpoint_every",
)
"""Options that are fields of TrainConfig."""


@click.command()
@lake_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run: checkpoints, final/.")
@click.option("--model", help="Model folder in Hugging Face layout.")
@click.option("--loss", type=click.Choice(["sft", "awr", "ppo"]), help="What to optimise.")
@click.option("--run", "run_id", help="Name of the run. Default: the name of --out.")
@click.option("--where", help='SQL predicate over episodes, for example "env_return > 0". Default: all.')
@click.option("--selection", help="Train on what a selection kept: its name, or a select job. Default: no selection.")
@click.option("--advantages", help="Credit job or series. Default: the series of the newest credit job.")
@click.option(
    "--live-only/--all-groups", default=None, help="Leave out dead groups. Default: where the loss uses advantages."
)
@click.option("--tokens", type=click.Choice(["auto", "engine", "rendered"]), help="Which token rows. Default: auto.")
@click.option("--epochs", type=int, help="Passes over the data. Default: 1.")
@click.option("--episodes-per-step", type=int, help="Episodes of an optimizer step. Default: 8.")
@click.option("--token-budget", type=int, help="Tokens of one forward pass. Default: 8192.")
@click.option("--max-length", type=int, help="Longest sequence in tokens. Default: 8192.")
@click.option("--lr", "learning_rate", type=float, help="Peak learning rate. Default: by model size.")
@click.option("--seed", type=int, help="Decides the order of the episodes. Default: 0.")
@click.option("--checkpoint-every", type=int, help="Optimizer steps between checkpoints. Default: 50.")
@click.option("--config", "config_file", type=click.Path(), help="TOML file; its section [trainer] sets any field.")
@click.option("--resume", is_flag=True, help="Continue the run in --out; starts it if there is none.")
@click.option("--plan", "plan_only", is_flag=True, help="Say what would be trained, and train nothing.")
@format_option
def train(
    lake_uri: str,
    out: Path,
    run_id: str | None,
    config_file: str | None,
    resume: bool,
    plan_only: bool,
    output_format: str,
    **flags: Any,
) -> None:
    """Train a policy on the lake's trajectories.

    Text-only trajectories are tokenised with the model's chat template first, once. A killed run goes on with --resume
    and ends with the same weights. The last line on stdout is the sha256 of the final weights.
    """
    import lake
    from trainer.offline import resume as resume_run
    from trainer.offline import train as start_run
    from trainer.progress import training_bar
    from trainer.runs import RunFolder

    _quiet()
    lk = lake.open(lake_uri)
    given = {name: flags[name] for name in _TUNABLE if flags[name] is not None}
    if plan_only:
        _print_plan(lk, _configured(config_file, given), output_format)
        return
    record = RunFolder(out).read() if resume else None
    if record is not None:
        _check_unchanged(_settings(config_file, given), record.config)
    with _file_faults(), training_bar() as on_step:
        if record is not None:
            result = resume_run(lk, out, on_step=on_step)
        else:
            result = start_run(lk, _configured(config_file, given), out, run_id=run_id or out.name, on_step=on_step)
    _print_result(result)


@click.command("init-model")
@lake_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write the model to.")
@click.option("--vocabulary", type=int, help="Token ids at most. Default: 2048.")
@click.option("--hidden-size", type=int, help="Width, a multiple of 32. Default: 64.")
@click.option("--layers", type=int, help="Transformer blocks. Default: 2.")
@click.option("--seed", type=int, help="Seed of the weights. Default: 0.")
def init_model(lake_uri: str, out: Path, **flags: int | None) -> None:
    """Make a small random model with a tokenizer trained on the lake's own texts, for trying things."""
    import lake
    from trainer.tiny_model import TinyModelConfig, make_tiny_model

    _quiet()
    config = _validated(TinyModelConfig, {name: value for name, value in flags.items() if value is not None})
    with _file_faults():
        made = make_tiny_model(lake.open(lake_uri).snapshot(), out, config)
    click.echo(
        f"{made.folder}: {made.parameters:,} parameters, {made.vocabulary:,} token ids from {made.texts:,} texts"
    )


@contextmanager
def _file_faults() -> Iterator[None]:
    """A file of the run that cannot be read or written, as one line."""
    from lake.errors import LakeAccessError, TrajlakeError

    try:
        yield
    except TrajlakeError:
        raise
    except OSError as error:
        advice = "free space, mend its permissions, or choose another --out; a run under way continues with --resume"
        msg = f"{error.filename or 'writing a file'}: {error.strerror or error}; {advice}"
        raise LakeAccessError(msg) from error


def _quiet() -> None:
    """Keep transformers' own progress bars off the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _settings(config_file: str | None, given: dict[str, Any]) -> dict[str, Any]:
    from lake.settings import from_file

    return (from_file(config_file, ["trainer"]) if config_file else {}) | given


def _configured(config_file: str | None, given: dict[str, Any]) -> "TrainConfig":
    from lake.errors import UsageError
    from trainer.config import TrainConfig

    settings = _settings(config_file, given)
    missing = [f"--{name}" for name in ("model", "loss") if name not in settings]
    if missing:
        msg = f"{' and '.join(missing)} missing: say which model to train and what to optimise"
        raise UsageError(msg)
    return _validated(TrainConfig, settings)


def _validated(model: "type[Config]", settings: dict[str, Any]) -> "Config":
    """A configuration object; its faults as one line."""
    from pydantic import ValidationError

    from lake.errors import UsageError

    try:
        return model.model_validate(settings)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UsageError(faults) from error


def _check_unchanged(settings: dict[str, Any], stored: dict[str, Any]) -> None:
    """A resumed run keeps its configuration: options given again must say the same.

    Raises:
        UsageError: names the options that differ.
    """
    from lake.errors import UsageError

    changed = list(_differences(settings, stored))
    if changed:
        msg = f"a resumed run keeps its configuration, and these differ: {', '.join(changed)}; leave them out"
        raise UsageError(msg)


def _differences(settings: Mapping[str, Any], stored: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        was = stored.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            yield from _differences(value, was, f"{prefix}{name}.")
        elif was != value:
            yield f"{prefix}{name} {value!r} (the run has {was!r})"


def _print_plan(lk: "Lake", config: "TrainConfig", output_format: str) -> None:
    from trainer.estimate import estimate_seconds
    from trainer.model import load_policy
    from trainer.offline import make_deterministic, resolve
    from trainer.preparation import load_tokenizer, prepare
    from trainer.report import plan_rows

    make_deterministic(config)
    policy = load_policy(config.model, config.device)
    config = resolve(config, policy)
    prepared = prepare(lk, config, load_tokenizer(config.model))
    for note in prepared.notes:
        click.echo(note, err=True)
    seconds, how = estimate_seconds(prepared.snapshot, policy, prepared.plan, config)
    echo_rows(plan_rows(prepared, epochs=config.epochs, seconds=seconds, how=how), output_format)


def _print_result(result: "TrainResult") -> None:
    from lake import ids

    for note in result.notes:
        click.echo(note, err=True)
    click.echo(f"job {ids.to_text(result.job_id)}: {result.optimizer_steps} optimizer steps, model in {result.model}")
    click.echo(f"weights sha256 {result.weights_sha256}")
