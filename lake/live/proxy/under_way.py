"""The calls that are under way, by the rollout that they name."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lake.live.calls.address import Address
from lake.live.proxy.rollouts import Rollout

_Departure = tuple[float, Callable[[], object]]


class UnderWay:
    """When each of them departed, and how it is broken off."""

    def __init__(self) -> None:
        self._departures: dict[Address, list[_Departure]] = {}

    @contextmanager
    def call(self, address: Address, break_off: Callable[[], object]) -> Iterator[None]:
        """While a call is; `break_off` ends it early."""
        departure = time.monotonic(), break_off
        calls = self._departures.setdefault(address, [])
        calls.append(departure)
        try:
            yield
        finally:
            calls.remove(departure)
            if not calls:
                del self._departures[address]

    def break_off(self, address: Address) -> None:
        """End the calls of an address, and of its sub-agents."""
        for known, calls in self._departures.items():
            if known.is_part_of(address):
                for _, break_off in calls:
                    break_off()

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
        return any(rollout.address.is_named or departed < rollout.touched + idle for departed, _ in departures)
