"""Options that say where a job runs: --executor and --workers, and the executor that they name."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from lake.execution.choice import EXECUTORS

if TYPE_CHECKING:
    from lake.execution.executor import Executor

Command = Callable[..., Any]
_WORDS = {"local": "this process", "processes": "processes of this machine", "ray": "a Ray cluster"}


def executor_options(parts: str, *, valid: Sequence[str] = EXECUTORS) -> Callable[[Command], Command]:
    """Add --executor and --workers to a command; `parts` are what runs at once, in words: "Ranges of groups"."""
    where = click.option(
        "--executor",
        type=click.Choice(list(valid)),
        default="local",
        show_default=True,
        help=f"Where it runs: {', '.join(_WORDS[name] for name in valid)}.",
    )
    many = click.option("--workers", type=click.IntRange(min=1), help=f"{parts} at once.  [default: a core each]")
    return lambda function: where(many(function))


def executor_of(executor: str, workers: int | None) -> "Executor | None":
    """The executor that the options name; None where neither was given, which is this process.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    from lake.execution.choice import executor_named

    return None if executor == "local" and workers is None else executor_named(executor, workers)
