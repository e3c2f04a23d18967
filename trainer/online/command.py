"""Command `loop`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lake.cli.options import lake_option

if TYPE_CHECKING:
    from trainer.online.run import LoopResult


@click.command(
    epilog="docs/guides/loop.md shows a file; docs/reference/config.md lists every field, under "
    "trainer.online.settings.OnlineConfig.",
)
@lake_option
@click.option(
    "--config", "config_file", required=True, type=click.Path(dir_okay=False), help="TOML file: [loop] and [trainer]."
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder of the run: checkpoints, versions, final/."
)
@click.option("--run", "run_id", help="Name of the run.  [default: the name of --out]")
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any field, e.g. loop.rounds=8, loop.collect.groups=16, trainer.seed=1. Comes after the file.",
)
@click.option("--ranks", type=int, hidden=True, help="Processes that train together: refused, with what has them.")
@click.option("--resume", "resumes", is_flag=True, help="Go on with the run of that name; starts it if there is none.")
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

    Everything is rows: rollouts, advantages, what each update consumed, weights, evaluations. A killed run goes on with
    --resume, loses no finished episode, and with a model in this process ends with the same weights. The last line on
    stdout is the sha256 of the final weights.
    """
    import lake
    from lake.cli.options import quiet
    from lake.settings import typed_pairs
    from pipelines.collect.options import Teller
    from trainer.commands import file_faults
    from trainer.online.checks import check
    from trainer.online.settings import OnlineConfig, read_config
    from trainer.online.start import run_loop

    config, name = read_config(config_file, typed_pairs(pairs, OnlineConfig)), run_id or out.resolve().name
    quiet()
    tell = Teller()
    # The lake comes last: a command that is refused leaves none behind.
    config.wanted(name)
    check(config, ranks=1 if ranks is None else ranks)
    with file_faults(), _explained_interrupt():
        lk = lake.open(lake_uri, create=True)
        collecting = lake.open(lake_uri)
        done = run_loop(lk, collecting, config, out, name, resumes=resumes, say=tell.say, progress=tell.progress)
    _tell(done)


@contextmanager
def _explained_interrupt() -> Iterator[None]:
    """Ctrl-C where nothing is played says how the run goes on, too."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted; the same command with --resume goes on", err=True)
        raise


def _tell(done: "LoopResult") -> None:
    from lake.read.text_table import counted

    click.echo(
        f"{counted(done.rounds, 'round')}, {counted(done.optimizer_steps, 'update')}; ended by {done.stopped_by}; "
        f"the model is in {done.model}",
        err=True,
    )
    if done.best_version is not None:
        found, place = done.evaluations[done.best_version], done.model.parent / "best"
        where = f"in {place}" if place.is_dir() else f"and {place} is gone"
        click.echo(f"best: version {done.best_version}, success {found.success:.2f}, {where}")
    click.echo(done.weights_sha256)
