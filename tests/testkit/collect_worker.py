"""`trajlake` in a forked process, for tests that start, stop and kill many that collect.

Without torch, which takes seconds to import: the engine has the model, and a tokenizer does without.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

sys.modules["torch"] = None  # type: ignore[assignment]
for _name in (
    "transformers.models.auto.tokenization_auto",
    "lake.cli",
    "pipelines.collect.commands",
    "pipelines.collect.environments.house",
    "pipelines.collect.manager.run",
):
    importlib.import_module(_name)  # before the process forks


def main(args: Sequence[str]) -> None:
    """Run a command.

    Args:
        args: the folder of spools, then the command line.
    """
    from lake.cli import main as command
    from pipelines.collect.manager import run

    collect = run.collect

    def collect_with_progress(lk: Any, player: Any, tasks: Any, collection: Any, **options: Any) -> Any:
        """Collect with progress lines that a test need not wait for."""
        return collect(lk, player, tasks, msgspec.structs.replace(collection, progress_seconds=0.25), **options)

    # The class `Collection` stays as it is: Ray pickles it by its name.
    run.collect = collect_with_progress  # type: ignore[assignment]
    os.environ["TRAJLAKE_SPOOL"] = args[0]
    sys.argv = ["trajlake", *args[1:]]
    command()
