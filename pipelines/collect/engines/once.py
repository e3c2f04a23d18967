"""A question to an engine that is asked once for all who want to know.

Rollouts begin together: without this, each of two thousand would ask the engine what it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Once(Generic[Answer]):
    """Keeps the answer; whoever asks meanwhile waits for it, and a failure fails them all.

    Args:
        ask: asked again after a failure, and after `forget`.
    """

    def __init__(self, ask: Callable[[], Awaitable[Answer]]) -> None:
        self._ask = ask
        self._asked: asyncio.Future[Answer] | None = None

    async def __call__(self) -> Answer:
        """The answer. Raises what asking raises."""
        asked = self._asked
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception() is not None)):
            asked = self._asked = asyncio.ensure_future(self._ask())
        return await asyncio.shield(asked)  # one who is cancelled takes the answer from nobody

    def forget(self) -> None:
        """Another may answer from now on."""
        self._asked = None
