"""The executor that somebody names."""

from lake.errors import UsageError
from lake.execution.executor import Executor
from lake.execution.local import LocalExecutor
from lake.execution.on_ray import RayExecutor

EXECUTORS = ("local", "processes", "ray")


def executor_named(name: str, workers: int | None = None) -> Executor:
    """The executor of a name: `local`, `processes` or `ray`; UsageError for another name."""
    if name == "ray":
        return RayExecutor(workers)
    if name not in EXECUTORS:
        msg = f"no executor {name!r}; valid: {', '.join(EXECUTORS)}"
        raise UsageError(msg)
    return LocalExecutor(workers, processes=name == "processes")
