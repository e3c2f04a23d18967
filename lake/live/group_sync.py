"""Waiting for the disk together: those who wait at a time share a sync, and the next one serves who came meanwhile."""

import asyncio
from collections.abc import Callable


class GroupSync:
    """The waits of one event loop for a disk.

    Args:
        sync: brings what was written before its call to the disk, and blocks meanwhile; whether that succeeded.
    """

    def __init__(self, sync: Callable[[], bool]) -> None:
        self._sync = sync
        self._next: asyncio.Task[bool] | None = None
        self._turn = asyncio.Lock()

    async def wait(self) -> bool:
        """Wait until what was written before this call is on the disk; whether it is."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> bool:
        async with self._turn:
            # Whoever comes from now on needs the next one: this one may be under way.
            self._next = None
            return await asyncio.to_thread(self._sync)
