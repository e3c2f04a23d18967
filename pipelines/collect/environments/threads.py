"""Environments that block, in threads of their own, so that thousands of others go on meanwhile.

Each environment has one thread from its making to its end. What is bound to a thread (an SQLite connection, a browser)
works, and one that hangs holds up no other; a pool would give neither. The threads are daemons: a process that ends
does not wait for an environment that never answers.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message

_log = logging.getLogger("trajlake")
T = TypeVar("T")


class SyncEnvironment(Protocol):
    """An environment whose methods are plain functions; see `Environment`, whose name and split it has as well."""

    def reset(self, task: Task) -> Outcome:
        """Begin the task."""
        ...

    def step(self, action: Message) -> Outcome:
        """Take the assistant's message."""
        ...

    def close(self) -> None:
        """Let go of what the episode holds; an environment that holds nothing may do without."""
        ...


def close(environment: SyncEnvironment) -> None:
    """Close an environment that can be closed."""
    if hasattr(environment, "close"):
        environment.close()


class Inline:
    """A synchronous environment whose calls take microseconds: they run in the event loop."""

    def __init__(self, environment: SyncEnvironment, *, name: str, split: str | None) -> None:
        self.name = name
        self.split = split
        self._environment = environment

    async def reset(self, task: Task) -> Outcome:
        """Begin the task."""
        return self._environment.reset(task)

    async def step(self, action: Message) -> Outcome:
        """Take the assistant's message."""
        return self._environment.step(action)

    async def close(self) -> None:
        """Close the environment."""
        close(self._environment)


class InThread:
    """A synchronous environment in a thread of its own: it is made, played and closed there.

    Args:
        make: makes the environment.
        name: the environment's name.
        split: the environment's split.
    """

    def __init__(self, make: Callable[[], SyncEnvironment], *, name: str, split: str | None) -> None:
        self.name = name
        self.split = split
        self._make = make
        self._environment: SyncEnvironment | None = None
        self._worker = Worker()

    async def reset(self, task: Task) -> Outcome:
        """Make the environment, if that was not done yet, and begin the task."""
        return await self._worker.run(self._reset, task)

    async def step(self, action: Message) -> Outcome:
        """Take the assistant's message."""
        assert self._environment is not None, "reset comes first"
        return await self._worker.run(self._environment.step, action)

    async def close(self) -> None:
        """Close the environment; one that is still busy with a call that was given up is closed when it returns."""
        if self._worker.is_busy:
            self._worker.end(self._close)
        elif self._worker.is_started:
            await self._worker.run(self._close)
            self._worker.end()

    def _reset(self, task: Task) -> Outcome:
        if self._environment is None:
            self._environment = self._make()
        return self._environment.reset(task)

    def _close(self) -> None:
        if self._environment is not None:
            close(self._environment)


class Worker:
    """One thread, which runs calls in turn; it starts with the first one, and an agent has one for itself as well."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_started = False
        self._waiting = 0

    @property
    def is_busy(self) -> bool:
        """A call has not returned, whether or not anyone still waits for it."""
        return self._waiting > 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function gives or raises, in the thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            self._waiting -= 1
            if not answer.done():
                answer.set_result((value, error))

        def call() -> None:
            value: T | None = None
            error: BaseException | None = None
            try:
                value = function(*arguments)
            except BaseException as raised:
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, error)

        self._waiting += 1
        self._calls.put(call)
        if not self.is_started:
            self.is_started = True
            threading.Thread(target=self._serve, daemon=True, name="environment").start()
        value, error = await answer
        if error is not None:
            raise error
        return cast("T", value)

    def end(self, last: Callable[[], None] | None = None) -> None:
        """End the thread after the calls that it has been given, and after `last`, whose faults are logged."""

        def call() -> None:
            try:
                if last is not None:
                    last()
            except BaseException:
                _log.debug("an environment that was given up cannot be closed", exc_info=True)

        self._calls.put(call)
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
