"""Command `demo`."""

import time
from pathlib import Path

import click

DEFAULT_LAKE = "demo-lake"


@click.command()
@click.option("--lake", "lake_uri", help=f"Folder of the lake. Default: ./{DEFAULT_LAKE}, or -2, -3, ... if taken.")
@click.option("--seed", default=0, show_default=True, help="Decides weights, starts and samples.")
@click.option("--iterations", default=30, show_default=True, help="Rounds of collect, credit, train.")
@click.option("--shuffle-advantages", is_flag=True, help="Control: shuffle the advantages among each round's steps.")
def demo(lake_uri: str | None, seed: int, iterations: int, shuffle_advantages: bool) -> None:
    """Train a tiny agent from imperfect traces to a good one, every number through a lake.

    Takes about three minutes on two cores. The same seed gives the same result. Leaves a lake for `trajlake sql` and
    `trajlake view`.
    """
    from pydantic import ValidationError
    from transformers.utils import logging

    import lake
    from lake.errors import UsageError
    from trainer.online.demo import DemoConfig, free_lake_folder, run_demo

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    began = time.monotonic()
    try:
        config = DemoConfig(seed=seed, iterations=iterations, shuffle_advantages=shuffle_advantages)
    except ValidationError as error:
        faults = "; ".join(f"--{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise UsageError(faults) from error
    target = lake.open(free_lake_folder(Path(DEFAULT_LAKE)) if lake_uri is None else lake_uri, create=True)
    result = run_demo(target, config, lambda line: click.echo(line, err=True))
    shown = Path(target.uri).name if lake_uri is None else target.uri
    click.echo(f"the lake is in {shown}: `trajlake view --lake {shown}` explains every number", err=True)
    click.echo(
        f"demo: success {result.before:.2f} -> {result.after:.2f} over {result.iterations} iterations, "
        f"{result.episodes} episodes, {time.monotonic() - began:.0f} s"
    )
