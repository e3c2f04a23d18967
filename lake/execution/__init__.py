"""Executors run the parts of a job: in this process, in processes of this machine, or on a Ray cluster."""

from lake.errors import UsageError
from lake.execution.executor import Executor
from lake.execution.local import LocalExecutor
from lake.execution.on_ray import RayExecutor

EXECUTORS = ("local", "processes", "ray")


def make_executor(name: str, workers: int | None = None) -> Executor:
    """Return the executor with a name: `local`, `processes` or `ray`. Raises UsageError: another name."""
    if name == "ray":
        return RayExecutor(workers)
    if name not in EXECUTORS:
        msg = f"no executor {name!r}; valid: {', '.join(EXECUTORS)}"
        raise UsageError(msg)
    return LocalExecutor(workers, processes=name == "processes")
