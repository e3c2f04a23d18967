"""Commands `init-model` and `convert-model`."""

from pathlib import Path

import click

from lake.cli_options import lake_option


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
    from lake.faults import validated
    from trainer.command_faults import file_faults, quiet
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
    from trainer.command_faults import quiet
    from trainer.policy.model_files import convert_model as convert

    quiet()
    click.echo(f"{out}: {convert(source, out):,} parameters")
