"""What an executor is: it maps a function over the parts of a job and gives the results in the order of the parts.

It may run a part a second time if the process that had it is gone, so a task must be one that may run again: what it
writes counts only once its result is used (`lake.write.parts`). Results never depend on the executor: tasks share
nothing. They are small (counts, ids of what was written): rows travel through the lake.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lake.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")
TRIES = 3
"""How often an item is started before a job gives up on processes that die under it."""


@dataclass(frozen=True, slots=True)
class OfNode(Generic[Result]):
    """What a machine answered."""

    node_id: str
    name: str
    """For people: its host name, and where several have one, the beginning of its id."""
    result: Result


class Executor(Protocol):
    """Runs the parts of a job."""

    @property
    def workers(self) -> int:
        """Items that run at once: each holds its own data in memory."""

    @property
    def is_here(self) -> bool:
        """Whether items run in the process that asks: what it holds, a model say, is at hand there."""

    def map(
        self, task: Callable[[Item], Result], items: Iterable[Item], *, without: Collection[str] = ()
    ) -> Iterator[Result]:
        """Results of `task` for each item, in the items' order.

        The task is a function of a module that may run twice for an item; it, items and results may travel to other
        processes. An item is asked for when a worker is about to be free, so a generator may end early.

        Args:
            without: ids of nodes (`on_nodes`) that get nothing.

        Raises:
            WorkerLostError: the process of an item died again and again.
            Exception: whatever the task raises, as it is; items that have not started by then are not run.
        """

    def on_nodes(self, task: Callable[[Item], Result], item: Item) -> list[OfNode[Result]]:
        """What `task` gives on each machine that may run items, once each."""


def require_workers(workers: int | None) -> None:
    """Raise UsageError for a number of workers that is none."""
    if workers is not None and workers < 1:
        msg = f"{workers} workers; valid: 1 or more"
        raise UsageError(msg)


def lost(done: int) -> str:
    """What to say when workers die again and again."""
    return (
        f"a worker process died {TRIES} times in a row ({done} parts were done before it). Often the machine was out "
        "of memory: give fewer --workers, and a smaller --memory where there is one, and run it again"
    )


def with_items(
    executor: Executor, task: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Items with their results, in order; see `Executor.map`."""
    given: deque[Item] = deque()

    def noted() -> Iterator[Item]:
        for item in items:
            given.append(item)
            yield item

    for result in executor.map(task, noted()):
        yield given.popleft(), result


def windowed(
    start: Callable[[Item], Any],
    result: Callable[[Any], Any],
    cancel: Callable[[Any], Any],
    items: Iterator[Item],
    width: int,
) -> Iterator[Any]:
    """Results in order, with at most one item waiting per worker; after an error nothing more is started."""
    running: deque[Any] = deque()
    nothing = object()
    try:
        while True:
            while len(running) < 2 * width and (item := next(items, nothing)) is not nothing:
                running.append(start(item))  # type: ignore[arg-type]
            if not running:
                return
            yield result(running.popleft())
    finally:
        for handle in running:
            cancel(handle)
