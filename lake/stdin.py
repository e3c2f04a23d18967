"""`-` as a file: standard input, spooled to disk so that formats can be sniffed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def spooled(name: str, stdin: BinaryIO) -> Iterator[Path]:
    """The path of a file; `-` stands for standard input, held in a temporary file named `stdin`."""
    if name != "-":
        yield Path(name)
        return
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        path = Path(folder, "stdin")
        with path.open("wb") as file:
            shutil.copyfileobj(stdin, file)
        yield path
