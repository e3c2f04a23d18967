"""A pool of a function's workers: it takes calls and returns one outcome per call, in order, also after failures.

Each worker has its own thread here. The thread must live as long as the worker, because the kernel kills a locked
process when the thread that started it ends.
"""

import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from lake.errors import UsageError
from pipelines.score.sandbox.contract import CallOutcome, FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import prepare_launch
from pipelines.score.sandbox.worker_process import PRINTED_BYTES, Worker, WorkerSlot, spell_controls

Call = dict[str, Any] | bytes | msgspec.Raw
"""Keyword arguments of one call: a dict of JSON data, or one JSON object as text. The dict's top-level values may be
msgspec.Raw, which is JSON text."""
_AHEAD = 3
"""Messages per worker that `map` sends ahead before it waits for the oldest."""
_PAUSE_SECONDS = 0.5
"""Maximum seconds between two yields of `stream`."""
T = TypeVar("T")
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Sandbox:
    """Persistent worker processes of one function, isolated at `level`: strong, bwrap, basic or none.

    UsageError for a missing file, or a folder that a function should not read. SandboxUnavailableError if isolation
    here is weaker than `min_level`, with the missing layers. A call raises it too if a worker could not be locked in;
    then no user code has run.
    """

    def __init__(self, function: FunctionSource, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        launch = prepare_launch(function, self._limits)
        self.level = launch.level
        self._slots = [WorkerSlot(launch) for _ in range(self._limits.workers)]
        self._free: queue.SimpleQueue[WorkerSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(self._limits.workers, "sandbox")

    @property
    def printed(self) -> str:
        """The end of the function's prints, from all workers."""
        return spell_controls("".join(slot.printed.decode("utf-8", "replace") for slot in self._slots))[-PRINTED_BYTES:]

    def call(self, calls: Sequence[Call]) -> list[CallOutcome]:
        """Return one outcome per call, in order."""
        return [outcome for future in self._submit(calls) for outcome in future.result()]

    def map(self, batches: Iterable[Sequence[Call]]) -> Iterator[list[CallOutcome]]:
        """Yield the outcomes of each batch, in order; read batches ahead to keep all workers busy."""
        ahead: deque[list[Future[list[CallOutcome]]]] = deque()
        for batch in batches:
            ahead.append(self._submit(batch))
            while ahead and (
                all(future.done() for future in ahead[0]) or sum(map(len, ahead)) > _AHEAD * self._limits.workers
            ):
                yield [outcome for future in ahead.popleft() for outcome in future.result()]
        while ahead:
            yield [outcome for future in ahead.popleft() for outcome in future.result()]

    def stream(self, batches: Iterable[Sequence[tuple[T, Call]]]) -> Iterator[list[tuple[T, CallOutcome]]]:
        """Yield outcomes as they arrive, also from the middle of a batch, so that a slow call delays no other call.

        A batch has a mark and the keyword arguments of each call; batches are read ahead to keep all workers busy. Each
        yield has the new outcomes of some batch; there is one at least every half second, possibly empty. The calls of
        one worker are in order.
        """
        source, size = iter(batches), self._limits.rows_per_batch
        requests: list[_WorkerRequest[T]] = []
        exhausted = False
        while not exhausted or requests:
            while not exhausted and len(requests) < _AHEAD * self._limits.workers:
                batch = next(source, None)
                exhausted = batch is None
                for first in range(0, len(batch or ()), size):
                    calls = (batch or ())[first : first + size]
                    outcomes: list[CallOutcome] = []
                    future = self._threads.submit(self._score, [_encode_call(call) for _, call in calls], outcomes)
                    requests.append(_WorkerRequest([mark for mark, _ in calls], outcomes, future))
            wait([request.future for request in requests], _PAUSE_SECONDS, FIRST_COMPLETED)
            ended = [request.future for request in requests if request.future.done()]
            yield from [news for request in requests if (news := request.take_news())] or [[]]
            for future in ended:
                future.result()
            requests = [request for request in requests if request.future not in ended]

    def close(self) -> None:
        """End all workers, and drop their unanswered calls."""
        for slot in self._slots:
            slot.stop()
        self._threads.shutdown(cancel_futures=True)
        for slot in self._slots:
            slot.close()

    def _submit(self, calls: Sequence[Call]) -> list[Future[list[CallOutcome]]]:
        rows = [_encode_call(call) for call in calls]
        size = self._limits.rows_per_batch
        return [self._threads.submit(self._score, rows[first : first + size]) for first in range(0, len(rows), size)]

    def _score(self, rows: list[bytes], outcomes: list[CallOutcome] | None = None) -> list[CallOutcome]:
        slot = self._free.get()
        try:
            return slot.score(rows, outcomes)
        finally:
            self._free.put(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _WorkerRequest(Generic[T]):
    """Calls for one worker, and its outcomes so far."""

    marks: list[T]
    outcomes: list[CallOutcome]
    """The worker's thread fills this list."""
    future: Future[list[CallOutcome]]
    reported: int = 0

    def take_news(self) -> list[tuple[T, CallOutcome]]:
        """Return the outcomes since the last call of this method."""
        first, self.reported = self.reported, len(self.outcomes)
        return list(zip(self.marks[first : self.reported], self.outcomes[first : self.reported], strict=True))


def _encode_call(call: Call) -> bytes:
    """Encode a call as MessagePack, which workers decode fastest, or else as JSON. A worker detects which."""
    if isinstance(call, bytes | msgspec.Raw):
        return bytes(call)
    try:
        return _to_json(call) if msgspec.Raw in map(type, call.values()) else _to_msgpack(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        msg = f"the arguments of a call must be JSON data: {error}"
        raise UsageError(msg) from None


def inspect_function(
    path: str, name: str, limits: SandboxLimits | None = None, adapter: str | None = None
) -> dict[str, Any]:
    """Return a function's description; a worker imports its module, this process does not.

    Keys: `mode`, `is_async`, `parameters` (names), `accepts_any` (whether it takes **kwargs), `requires_network`, and
    `declared` (attributes from its decorator, `__trajlake_reward__`). UsageError if it does not exist or cannot be
    loaded; SandboxUnavailableError if isolation here is weaker than `min_level`.
    """
    worker = Worker(prepare_launch(FunctionSource(path, name, adapter=adapter), limits or SandboxLimits()))
    try:
        death = worker.start()
    finally:
        worker.close()
    if death is not None:
        msg = f"{path}:{name} cannot be loaded: {death.reason}"
        raise UsageError(msg)
    signature = msgspec.structs.asdict(worker.signature)
    return {key: field for key, field in signature.items() if key not in ("kind", "error")}
