"""Command `template`: writes a file to begin with."""

from pathlib import Path

import click

_PLAYED_BY = {"environment": "--env {file}:make", "agent": "--agent {file}:agent"}
"""What can be written -> the option of `trajlake collect` that plays it."""


@click.command()
@click.argument("kind", type=click.Choice(tuple(_PLAYED_BY)))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def template(kind: str, file: Path) -> None:
    """Write a FILE to begin with: an environment, or an agent, that runs as it is.

    A file that is there already is left alone.
    """
    from lake.errors import UsageError

    if file.suffix != ".py":
        raise UsageError(f"{file} is to be Python; call it {file}.py")
    source = Path(__file__).with_name("templates") / f"{kind}.py"
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(source.read_text("utf-8").replace("THIS_FILE.py", str(file)))
    except FileExistsError:
        raise UsageError(f"{file} is there already; give another name, or move it away") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {file}; play it: trajlake collect {_PLAYED_BY[kind].format(file=file)} ...")
