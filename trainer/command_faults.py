"""What the commands that train or write models share: quiet libraries, and files that cannot be written as one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


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
        msg = f"{place or 'writing a file'}: {reason or error}; {advice}"
        raise LakeAccessError(msg) from error


@contextmanager
def told_when_interrupted(out: Path) -> Iterator[None]:
    """Ctrl-C says how the run goes on.

    Args:
        out: folder of the run.
    """
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
