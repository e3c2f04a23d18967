"""Command `demo`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.errors import UsageError

if TYPE_CHECKING:
    from lake.lake import Lake
    from trainer.online.demo import DemoConfig, DemoResult
    from trainer.online.settings import EngineConfig

DEFAULT_LAKE = "demo-lake"


@click.command()
@click.option("--lake", "lake_uri", help=f"Folder of the lake.  [default: ./{DEFAULT_LAKE}, or -2, -3, ... if taken]")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, starts and samples.")
@click.option("--iterations", default=30, show_default=True, help="Rounds of collect, credit, train.")
@click.option("--shuffle-advantages", is_flag=True, help="Control: shuffle the advantages among each round's steps.")
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    help="Rollouts are sampled by an engine that is started for it.  [default: by the model in this process]",
)
@click.option(
    "--python",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python of the environment that has vLLM, for --engine.  [default: TRAJLAKE_ENGINE_PYTHON, this one, .engine]",
)
def demo(lake_uri: str | None, engine: str | None, python: Path | None, **given: Any) -> None:
    """Train a tiny agent from imperfect traces to a good one, every number through a lake.

    Takes about three minutes on two cores. The same seed gives the same result; with --engine a similar one, because no
    engine samples twice alike. Leaves a lake for `trajlake sql` and `trajlake view`.
    """
    import lake
    from lake.cli.options import quiet
    from trainer.online.demo import free_lake_folder

    quiet()
    began = time.monotonic()
    config, served = _config(given), _served(engine, python, given)
    # The lake comes last: a command that is refused leaves none behind.
    target = lake.open(free_lake_folder(Path(DEFAULT_LAKE)) if lake_uri is None else lake_uri, create=True)
    result = _run(target, config, served)
    shown = Path(target.uri).name if lake_uri is None else target.uri
    click.echo(f"the lake is in {shown}: `trajlake view --lake {shown}` explains every number", err=True)
    click.echo(
        f"demo: success {result.before:.2f} -> {result.after:.2f} over {result.iterations} iterations, "
        f"{result.episodes} episodes, {time.monotonic() - began:.0f} s"
    )


def _config(given: dict[str, Any]) -> "DemoConfig":
    """The demo that the flags ask for. Raises UsageError: one of them cannot be meant."""
    from pydantic import ValidationError

    from trainer.online.demo import DemoConfig

    try:
        return DemoConfig(**given)  # under the names that they have there
    except ValidationError as error:
        faults = "; ".join(f"--{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise UsageError(faults) from error


def _served(engine: str | None, python: Path | None, given: dict[str, Any]) -> "EngineConfig | None":
    """The engine that the flags ask for, once it is known that there is one. Raises UsageError, MissingExtraError."""
    from pipelines.collect.engines.serve_checks import find_installation
    from trainer.online.settings import EngineConfig

    if engine is None:
        if python is not None:
            raise UsageError("--python names the environment of an engine; give --engine vllm, too")
        return None
    if given["shuffle_advantages"]:
        raise UsageError("--shuffle-advantages is a control of the demo without --engine; leave one of them out")
    find_installation(python, "auto")
    return EngineConfig(serve=True, python=None if python is None else str(python))


def _run(target: "Lake", config: "DemoConfig", served: "EngineConfig | None") -> "DemoResult":
    from pipelines.collect.options import Teller
    from trainer.online.demo import run_demo
    from trainer.online.demo_engine import run_demo_with_engine

    tell = Teller()
    if served is None:
        return run_demo(target, config, tell.say)
    return run_demo_with_engine(target, config, served, say=tell.say, progress=tell.progress)
