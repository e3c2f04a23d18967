"""Executors by the names that a command line gives them."""

from typing import Literal

from lake.errors import UsageError
from pipelines.executor import Executor, LocalExecutor

ExecutorName = Literal["local", "processes", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = ("local", "processes", "ray")


def executor_named(name: str, workers: int | None = None) -> Executor:
    """The executor that a command line names: `local`, `processes` or `ray`.

    Raises:
        UsageError: another name, or workers below 1.
        MissingExtraError: ray is not installed.
    """
    if name == "ray":
        from pipelines.executor import RayExecutor

        return RayExecutor(workers)
    if name not in EXECUTORS:
        msg = f"no executor {name!r}; valid: {', '.join(EXECUTORS)}"
        raise UsageError(msg)
    return LocalExecutor(workers, processes=name == "processes")
