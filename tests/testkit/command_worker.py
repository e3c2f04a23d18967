"""`trajlake` in a process that `testkit.commands` forks: what its commands import is imported before the fork."""

import atexit
import importlib
import json
import os
import sys
import threading
from collections.abc import Sequence

import click

from lake.cli import main as command
from lake.cli import trajlake

for _name in trajlake.list_commands(click.Context(trajlake)):
    trajlake.get_command(click.Context(trajlake), _name)
for _name in (
    "polars",
    "duckdb",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "lake.opening",
    "lake.lake",
):
    importlib.import_module(_name)


def main(args: Sequence[str]) -> None:
    """Run a command line as a separate process would.

    Args:
        args: environment, folder and whether it gets its own session, as JSON; then the command line.
    """
    request = json.loads(args[0])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["folder"] is not None:
        os.chdir(request["folder"])
    if request["session"]:
        os.setsid()
    sys.argv = ["trajlake", *args[1:]]
    try:
        command()
    finally:
        # What the interpreter does at its end, which a forked worker never comes to.
        threading._shutdown()
        atexit._run_exitfuncs()
