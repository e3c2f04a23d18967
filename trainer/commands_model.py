"""Commands `init-model` and `convert-model`.

What the commands that train or write models share: quiet libraries, and files that cannot be written as one line.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lake.cli.options import lake_option


@contextmanager
def file_faults() -> Iterator[None]:
    """A file of the run that cannot be read or written, as one line.

    Raises:
        LakeAccessError: names the file, and what to do.
    """
    from safetensors import SafetensorError

    from lake.errors import LakeAccessError, TrajlakeError

    try:
        yield
    except TrajlakeError:
        raise
    except (OSError, SafetensorError) as error:
        # safetensors has a full disk as an error of its own.
        place, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        advice = "free space, mend its permissions, or choose another --out; a run under way continues with --resume"
        raise LakeAccessError(f"{place or 'writing a file'}: {reason or error}; {advice}") from error


@contextmanager
def told_when_interrupted(out: Path) -> Iterator[None]:
    """Ctrl-C says how the run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if any(out.glob("checkpoints/*")):
            click.echo(f"interrupted; --out {out} --resume goes on from the last checkpoint", err=True)
        elif out.is_dir():
            click.echo(
                f"interrupted before the first checkpoint: --out {out} --resume starts over. --set checkpoint_every=N "
                "writes one every N updates",
                err=True,
            )
        raise


def quiet() -> None:
    """Keep transformers' own progress bars off the terminal, without importing it for that."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


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
    from lake.settings import validated
    from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model

    quiet()
    config = validated(TinyModelConfig, {name: value for name, value in flags.items() if value is not None})
    with file_faults():
        made = make_tiny_model(lake.open(lake_uri).snapshot(), out, config)
    click.echo(
        f"{made.folder}: {made.parameters:,} parameters, {made.vocabulary:,} token ids from {made.texts:,} texts"
    )


@click.command("convert-model")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write the model to.")
def convert_model(source: Path, out: Path) -> None:
    """Write a GGUF model as a Hugging Face folder, in float32, with its tokenizer.

    `train --model` takes a .gguf file as it is; converting it once saves the time of reading it, and engines and other
    tools can load the folder. What quantisation lost stays lost.
    """
    from trainer.policy.model_files import convert_model as convert

    quiet()
    click.echo(f"{out}: {convert(source, out):,} parameters")
