"""The calls that are under way, by the rollout that they name."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lake.live.calls.address import Address
from lake.live.proxy.rollouts import Rollout


class UnderWay:
    """When each of them departed."""

    def __init__(self) -> None:
        self._departures: dict[Address, list[float]] = {}

    @contextmanager
    def call(self, address: Address) -> Iterator[None]:
        """While a call is."""
        departed = time.monotonic()
        calls = self._departures.setdefault(address, [])
        calls.append(departed)
        try:
            yield
        finally:
            calls.remove(departed)
            if not calls:
                del self._departures[address]

    def of(self, address: Address) -> int:
        """How many calls of an address."""
        return len(self._departures.get(address, ()))

    def may_be_of(self, rollout: Rollout, idle: float) -> bool:
        """Whether one may belong to an episode: it names it, or names none and departed before that was idle.

        Args:
            rollout: the episode.
            idle: seconds without a call after which an episode is.
        """
        departures = self._departures.get(rollout.address, ())
        return any(rollout.address.is_named or departed < rollout.touched + idle for departed in departures)
