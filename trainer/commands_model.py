"""Command `convert-model`."""

from pathlib import Path

import click


@click.command("convert-model")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write the model to.")
def convert_model(source: Path, out: Path) -> None:
    """Write a GGUF model as a Hugging Face folder, in float32, with its tokenizer.

    `train --model` takes a .gguf file as it is; converting it once saves the time of reading it, and engines and other
    tools can load the folder. What quantisation lost stays lost.
    """
    from transformers.utils import logging

    from trainer.policy.model_files import convert_model as convert

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    click.echo(f"{out}: {convert(source, out):,} parameters")
