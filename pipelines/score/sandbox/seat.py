"""The place of one worker: it is started when needed, replaced when worn or dead, and the failing call is found.

When a worker dies, the calls it had not answered are asked again one at a time. A call is blamed only if a fresh worker
died of it alone (or if it ran out of its own time): so a leak of a hundred calls before is not held against it. That
costs one more death than the failing calls themselves, where halving would cost the logarithm of the batch.
"""

from pipelines.score.sandbox.contract import Outcome
from pipelines.score.sandbox.launch import Launch
from pipelines.score.sandbox.link import PRINTED_BYTES, Death, Worker

_STARTS = 2
"""Attempts to start a worker whose function neither loads nor says why."""


class Seat:
    """One worker at a time."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._worker: Worker | None = None
        self._broken: Death | None = None
        self._stopped = False
        self._printed = bytearray()

    @property
    def printed(self) -> bytes:
        """The end of what its workers printed."""
        now = self._worker.printed if self._worker else b""
        return bytes(self._printed + now)[-PRINTED_BYTES:]

    def score(self, calls: list[bytes], found: list[Outcome] | None = None) -> list[Outcome]:
        """One outcome per call, in order.

        Args:
            calls: each its encoded keyword arguments.
            found: empty; it is filled as outcomes come, and what stands in it stays. Another thread may look on.

        Raises:
            SandboxUnavailableError: a worker could not be locked in.
        """
        found = [] if found is None else found
        singly = False
        while len(found) < len(calls):
            worker = self._ready()
            if worker is None:
                found += [self._unloaded()] * (len(calls) - len(found))
                break
            last = len(found) + 1 if singly else len(calls)
            before = len(found)
            answered, blamed = self._ask(worker, calls[before:last], found)
            found += answered[len(found) - before :]
            if blamed is not None:
                found.append(Outcome(None, blamed.reason, blamed.kind, 0.0))
            singly = singly or len(found) < len(calls)
        return found

    def _ask(self, worker: Worker, calls: list[bytes], found: list[Outcome]) -> tuple[list[Outcome], Death | None]:
        """Outcomes that hold, in order, and why the call after them is to blame, if it is.

        Those up to the first that wanted memory, behind which nothing is sure, are added to `found` as they come.
        """
        fresh = worker.served == 0
        sure = True

        def heard(outcomes: list[Outcome]) -> None:
            nonlocal sure
            starved = _first_starved(outcomes)
            found.extend(outcomes[:starved] if sure else ())
            sure = sure and starved is None

        answered, death = worker.ask(calls, heard)
        starved = _first_starved(answered)
        if death is not None or starved is not None:
            self._retire()
        if starved is not None:
            # What came before may have filled its memory: that counts for the first call of a worker only.
            return answered[: 1 if fresh and starved == 0 else starved], None
        alone = len(calls) == 1 and not answered
        return answered, death if death and alone and (fresh or death.kind == "timeout") else None

    def stop(self) -> None:
        """Let nothing more be asked; may be called from any thread."""
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.kill()

    def close(self) -> None:
        """End its worker."""
        self._retire()

    def _ready(self) -> Worker | None:
        """A worker whose function is loaded; None if it cannot be loaded."""
        if self._worker is not None and self._worker.is_due:
            self._retire()
        for attempt in range(_STARTS):
            if self._stopped:
                msg = "this sandbox is closed"
                raise RuntimeError(msg)
            if self._worker is not None or self._broken is not None:
                return self._worker
            self._worker = Worker(self._launch)
            death = self._worker.start()
            if death is not None:
                self._retire()
                # What it says itself is true of the next one too; a process that died may have had bad luck.
                self._broken = death if death.kind == "exception" or attempt == _STARTS - 1 else None
        return self._worker

    def _unloaded(self) -> Outcome:
        assert self._broken is not None
        name = self._launch.function.name
        return Outcome(None, f"`{name}` cannot be loaded: {self._broken.reason}", self._broken.kind, 0.0)

    def _retire(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._keep(self._worker)
            self._worker = None

    def _keep(self, worker: Worker) -> None:
        self._printed = (self._printed + worker.printed)[-PRINTED_BYTES:]


def _first_starved(outcomes: list[Outcome]) -> int | None:
    return next((place for place, outcome in enumerate(outcomes) if outcome.kind == "memory"), None)
