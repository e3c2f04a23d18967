"""Windows are cut and begun by a thread of their own, as far ahead of the model as memory allows.

How fast the model goes does not matter: while it is busy with one window the next are read, several of them where they
are small, as the first ones are. So it waits for the store only where that is slower on the whole, and at the start.
"""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Self

from trainer.data.plan.plan import OptimizerStep
from trainer.data.stream.windows import Window


class ReadAhead:
    """Windows in their order, each begun as early as possible. Use as a context: leaving it ends the thread.

    Those that are held, the one in use included, have `limit` bytes at most if each has half of that at most; the next
    one is always begun.
    """

    def __init__(self, windows: Iterator[Window], limit: int) -> None:
        self._windows, self._limit = windows, limit
        self._held: deque[Window] = deque()
        self._changed = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trajlake-windows", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Begin no more windows."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def steps(self) -> Iterator[tuple[OptimizerStep, Window]]:
        """The optimizer steps, each with its window; asking for one of the next window lets go of the one before."""
        while (window := self._first()) is not None:
            for step in window.steps:
                yield step, window
            with self._changed:
                self._held.popleft()
                self._changed.notify_all()

    def _first(self) -> Window | None:
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._ended)
            if self._held:
                return self._held[0]
        if self._error is not None:
            raise self._error
        return None

    def _run(self) -> None:
        try:
            while self._room() and (window := next(self._windows, None)) is not None:
                window.begin()
                with self._changed:
                    self._held.append(window)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error  # raised where steps are asked for
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _room(self) -> bool:
        """Wait until one more window may be held; False where none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._held) < 2 or self._bytes() <= self._limit // 2)
            return not self._stopped

    def _bytes(self) -> int:
        return sum(window.bytes for window in self._held)
