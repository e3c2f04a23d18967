"""`-` as a file: standard input, and pipes like it, spooled to disk so that formats can be sniffed."""

import os
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

PATIENCE_SECONDS = 1.0
"""How long nothing may come from a named pipe before that is told."""


@contextmanager
def spooled(name: str, stdin: BinaryIO, tell: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """The path of a file; `-` stands for standard input, held in a temporary file named `stdin`.

    What can be read only once, a named pipe or the shell's `<(command)`, is held in a temporary file too.

    Args:
        name: of the file.
        stdin: standard input.
        tell: is told, once, that a named pipe keeps us waiting.
    """
    source = Path(name)
    if name != "-" and not source.is_fifo():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        path = Path(folder, "stdin" if name == "-" else source.name)
        with path.open("wb") as file, nullcontext(stdin) if name == "-" else _opened(source, tell) as pipe:
            shutil.copyfileobj(pipe, file)
        yield path


def _opened(fifo: Path, tell: Callable[[str], None]) -> BinaryIO:
    """A named pipe, once there is something to read, or a writer has come and gone."""
    # Opened as a blocking file it would wait for its writer inside open(), where nobody can say so.
    pipe = open(fifo, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        look = select.poll()
        look.register(pipe, select.POLLIN)
        if not look.poll(PATIENCE_SECONDS * 1000):
            tell(f"{fifo} is a named pipe into which nobody has written yet: waiting for a writer (Ctrl-C gives up)")
            look.poll()
        os.set_blocking(pipe.fileno(), True)
    except BaseException:
        pipe.close()
        raise
    return pipe
