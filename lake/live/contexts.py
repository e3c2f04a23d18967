"""Contexts that record when they are left, sync and async alike."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

from lake.live.sink import Sink


class Context:
    """Something that an agent enters, works in, and leaves; an exception that leaves it is recorded and goes on."""

    _sink: Sink

    def _leave(self, error: BaseException | None) -> None:
        """Record it. Raises nothing."""
        raise NotImplementedError

    def _must_wait(self) -> bool:
        """Whether leaving may have to wait for a disk."""
        return self._sink.must_wait

    def _enter(self) -> None:
        """Its work begins."""

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._must_wait():
            await beside_the_loop(self._leave, error)
        else:
            self._leave(error)


async def beside_the_loop(function: Callable[..., None], *args: Any) -> None:
    """Call what may wait for a disk; an event loop has others to serve meanwhile."""
    try:
        await asyncio.to_thread(function, *args)
    except RuntimeError:
        # The loop is closing, or it is none of asyncio's.
        function(*args)
