"""The learning study: seven arms online on text games that people know, at equal tokens, over paired seeds.

`python -m benchmarks.learning --out build/learning` from the checkout; docs/learning.md has protocol and results.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lake.errors import TrajlakeError, UsageError
from lake.storage.locks import hold_file_lock


@contextmanager
def exit_plainly(program: str) -> Iterator[None]:
    """End the process with one line and no traceback after a mistake of the user, a fault of a disk and Ctrl-C."""
    try:
        yield
    except (TrajlakeError, OSError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: interrupted; the same command continues")


@contextmanager
def hold_folder(out: Path) -> Iterator[None]:
    """Keep other processes that run something out of a study's folder. Raises UsageError there."""
    out.mkdir(parents=True, exist_ok=True)
    with hold_file_lock(out / ".lock", wait=False) as lock:
        if lock is None:
            raise UsageError(f"another process runs in {out}: wait until it ends, or choose another --out")
        yield
