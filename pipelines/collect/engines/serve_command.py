"""Command `serve`."""

import asyncio
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.read.text_table import cell

if TYPE_CHECKING:
    from pipelines.collect.engines.serve import ServeOptions


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("further", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="On 127.0.0.1; 0: any that is free."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: what the installed vLLM was built for.",
)
@click.option(
    "--python",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python of the environment that has vLLM.  [default: TRAJLAKE_ENGINE_PYTHON, this one, .engine]",
)
@click.option(
    "--max-len",
    type=click.IntRange(min=2),
    help="Longest sequence, prompt and answer.  [default: the model's; on a CPU at most 4096]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Number type that it computes in; auto: the weights' own.",
)
@click.option("--lora", is_flag=True, help="Let LoRA adapters be loaded.")
def serve(*, model: Path, **given: Any) -> None:
    """Serve the model folder MODEL by vLLM, so that `trajlake collect` can play with it.

    The engine tells exact token ids, the log-probabilities of what it sampled from, and the version of its weights,
    and takes new weights while it runs. It listens on this machine alone, and ends with this command. Options behind
    -- are vLLM's own.
    """
    from pipelines.collect.engines.serve import ServeOptions

    asyncio.run(_serve(model, ServeOptions(**given)))  # under the names that they have there


async def _serve(model: Path, options: "ServeOptions") -> None:
    from pipelines.collect.engines.serve import served

    folder = shlex.quote(cell(str(model)))
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, main.cancel)
    with suppress(asyncio.CancelledError):
        async with served(model, options, say=lambda text: click.echo(text, err=True)) as engine:
            click.echo(f"serving {folder} at {engine.url}; Ctrl-C ends it")
            click.echo(f"trajlake collect --engine {engine.url} --model {folder} --env ... --lake L")
            raise await engine.death()
