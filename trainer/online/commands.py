"""The commands `loop` and `demo`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import RenamedOption, lake_option, progress_option, set_option
from lake.errors import UsageError

if TYPE_CHECKING:
    from trainer.online.demo import DemoConfig
    from trainer.online.loop import LoopResult
    from trainer.online.settings import EngineConfig


@click.command(
    epilog="docs/guides/loop.md shows a file; docs/reference/config.md lists every field, under "
    "trainer.online.settings.OnlineConfig.",
)
@lake_option
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(dir_okay=False),
    help="Settings file (TOML), with the sections [loop] and [trainer].",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run: checkpoints, final/.")
@click.option("--run", "run_id", help="Name of the run.  [default: the name of --out]")
@progress_option()
@set_option("loop.rounds=8, loop.collect.groups=16, trainer.seed=1")
@click.option("--ranks", type=int, hidden=True, help="Number of processes; refused, with the alternative.")
@click.option("--resume", "resumes", is_flag=True, help="Continue the run, or start it.")
def loop(
    lake_uri: str,
    config_file: str,
    out: Path,
    run_id: str | None,
    pairs: tuple[str, ...],
    *,
    ranks: int | None,
    resumes: bool,
) -> None:
    """Train online: collect rollouts, score, credit, train and sync, round after round.

    The lake holds rollouts, advantages, the data of each update, weights and evaluations. A killed run continues with
    --resume and loses no finished episode; with a model in this process it ends with the same weights. The last line on
    stdout is the sha256 of the final weights.
    """
    import lake
    from lake.cli.options import hide_progress_bars
    from lake.settings import parse_typed_pairs
    from pipelines.collect.commands import echo_line
    from trainer.commands import file_faults
    from trainer.online.settings import OnlineConfig, check_loop, read_config

    config, name = read_config(config_file, parse_typed_pairs(pairs, OnlineConfig)), run_id or out.resolve().name
    hide_progress_bars()
    # The lake comes last: a refused command leaves no lake behind.
    config.request_rollouts(name)
    check_loop(config, ranks=1 if ranks is None else ranks)
    from trainer.online.start import run_loop  # after the checks: it loads torch and transformers, which takes seconds

    with file_faults():
        lk = lake.open(lake_uri, create=True)
        collecting = lake.open(lake_uri)
        try:
            result = run_loop(lk, collecting, config, out, name, resumes=resumes, say=echo_line)
        except KeyboardInterrupt:  # while nothing is played; collecting has its own message
            click.echo("interrupted; the same command with --resume continues", err=True)
            raise
    _print_result(result)


def _print_result(result: "LoopResult") -> None:
    from lake.read.text_table import count_noun

    click.echo(
        f"{count_noun(result.rounds, 'round')}, {count_noun(result.optimizer_steps, 'update')}; ended by "
        f"{result.stopped_by}; the model is in {result.model}",
        err=True,
    )
    if result.best_version is not None:
        scores, folder = result.evaluations[result.best_version], result.model.parent / "best"
        where = f"in {folder}" if folder.is_dir() else f"and {folder} is gone"
        click.echo(f"best: version {result.best_version}, success {scores.success:.2f}, {where}")
    if not result.optimizer_steps:
        click.echo("No round had an update; the lines of the rounds and the alarms say why", err=True)
    click.echo(result.weights_sha256)


DEFAULT_LAKE = "demo-lake"


@click.command()
@click.option(
    "--lake", "lake_uri", help=f"Folder or URI of the lake.  [default: ./{DEFAULT_LAKE}, or -2, -3, ... if taken]"
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights, starts and samples.")
@click.option(
    "--rounds",
    cls=RenamedOption,
    former=["--iterations"],
    default=30,
    show_default=True,
    help="Number of rounds in all.",
)
@click.option("--shuffle-advantages", is_flag=True, help="Control: shuffle the advantages among each round's steps.")
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    help="Engine that is started to sample the rollouts.  [default: the model in this process]",
)
@click.option(
    "--python",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python of the environment that has vLLM.  [default: TRAJLAKE_ENGINE_PYTHON, this one, .engine]",
)
@progress_option()
def demo(lake_uri: str | None, engine: str | None, python: Path | None, **settings: Any) -> None:
    """Train a tiny agent that starts from imperfect traces, with all data in a lake.

    Takes about three minutes on two cores. The same seed gives the same result; with --engine a similar one, because an
    engine's samples never repeat. Leaves a lake for `trajlake sql` and `trajlake view`.
    """
    import lake
    from lake.cli.options import hide_progress_bars
    from pipelines.collect.commands import echo_line
    from trainer.online.demo import find_free_folder, run_demo

    hide_progress_bars()
    began = time.monotonic()
    config, engine_config = _build_config(settings), _find_engine(engine, python)
    # The lake comes last: a refused command leaves no lake behind.
    target = lake.open(find_free_folder(Path(DEFAULT_LAKE)) if lake_uri is None else lake_uri, create=True)
    result = run_demo(target, config, engine_config, say=echo_line)
    title = Path(target.uri).name if lake_uri is None else target.uri
    click.echo(f"the lake is in {title}: `trajlake view --lake {title}` explains every number", err=True)
    click.echo(
        f"demo: success {result.before:.2f} -> {result.after:.2f} over {result.rounds} rounds, "
        f"{result.episodes} episodes, {time.monotonic() - began:.0f} s"
    )


def _build_config(settings: dict[str, Any]) -> "DemoConfig":
    """Build the configuration from the flags. Raises UsageError: a flag is out of its range."""
    from pydantic import ValidationError

    from trainer.online.demo import DemoConfig

    try:
        return DemoConfig(**settings)
    except ValidationError as error:
        faults = "; ".join(f"--{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise UsageError(faults) from error


def _find_engine(engine: str | None, python: Path | None) -> "EngineConfig":
    """Return the settings of the engine that the flags name. Raises UsageError, MissingExtraError."""
    from pipelines.collect.engines.serve import find_installation
    from trainer.online.settings import EngineConfig

    if engine is None:
        if python is not None:
            raise UsageError("--python names the environment of an engine; give --engine vllm, too")
        return EngineConfig()
    find_installation(python, "auto")
    return EngineConfig(serve=True, python=None if python is None else str(python))
