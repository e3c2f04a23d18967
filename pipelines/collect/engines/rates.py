"""Limits of how often something is done, as endpoints ask for: calls, or tokens, a second."""

import asyncio


class RateLimit:
    """So many units a second, evenly; those who wait are served in the order in which they came.

    Args:
        per_second: units; None: no limit.
    """

    def __init__(self, per_second: float | None) -> None:
        self._seconds = 0.0 if per_second is None else 1.0 / per_second
        self._free_at = 0.0

    def charge(self, units: float) -> float:
        """Count units as used. Gives the time, on the clock of the event loop, from which on they may be."""
        begins = max(self._free_at, asyncio.get_running_loop().time())
        self._free_at = begins + units * self._seconds
        return begins

    async def take(self, units: float) -> None:
        """Wait until units may be used."""
        begins = self.charge(units)
        while (left := begins - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)
