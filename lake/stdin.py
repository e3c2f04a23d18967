"""`-` as a file: standard input, and pipes like it, spooled to disk so that formats can be sniffed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO


@contextmanager
def spooled(name: str, stdin: BinaryIO) -> Iterator[Path]:
    """The path of a file; `-` stands for standard input, held in a temporary file named `stdin`.

    What can be read only once, a named pipe or the shell's `<(command)`, is held in a temporary file too.
    """
    source = Path(name)
    if name != "-" and not source.is_fifo():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        path = Path(folder, "stdin" if name == "-" else source.name)
        with path.open("wb") as file, nullcontext(stdin) if name == "-" else source.open("rb") as pipe:
            shutil.copyfileobj(pipe, file)
        yield path
