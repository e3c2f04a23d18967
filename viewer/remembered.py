"""The last answers, up to so much of them."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Remembered(Generic[V]):
    """Values by key, the last used ones, whose weights together are at most `most`; for any number of threads.

    A value that weighs more than an eighth of that, and more than 1, is not remembered: it would push out too many
    others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of a key; None if there is none any more."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: V, weight: int = 1) -> None:
        """Remember a value; the ones that were not used for longest go."""
        if weight > max(1, self._most // 8):
            return
        with self._lock:
            self._weight += weight - self._values.pop(key, (value, 0))[1]
            self._values[key] = (value, weight)
            while self._weight > self._most:
                self._weight -= self._values.popitem(last=False)[1][1]
