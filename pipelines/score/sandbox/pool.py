"""A function's workers, seen from outside: calls go in, one outcome per call comes out, in order, whatever happens.

Each worker has a thread of its own here. It must live as long as the worker: a locked process is killed when the thread
that started it ends.
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
from pipelines.score.sandbox.contract import FunctionSource, Outcome, SandboxLimits
from pipelines.score.sandbox.launch import prepare
from pipelines.score.sandbox.link import PRINTED_BYTES, Worker, WorkerSlot
from pipelines.score.sandbox.replies import printable

Call = dict[str, Any] | bytes | msgspec.Raw
"""Keyword arguments of one call: a dict of JSON data, whose values (not what is in them) may be msgspec.Raw, which is
JSON text; or one JSON object that is text already."""
_AHEAD = 3
"""Messages per worker that `map` has under way before it waits for the oldest."""
_PAUSE_SECONDS = 0.5
"""`stream` says what there is at least so often."""
T = TypeVar("T")
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Sandbox:
    """Persistent worker processes of one function, locked in at `level`: strong, bwrap, basic or none.

    UsageError if there is no such file, or it lies in a folder that a function should not read; SandboxUnavailableError
    if isolation here is weaker than `min_level`, with the missing layers. Running calls raises it, too, if a worker
    could not be locked in; then nothing was run.
    """

    def __init__(self, function: FunctionSource, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        launch = prepare(function, self._limits)
        self.level = launch.level
        self._slots = [WorkerSlot(launch) for _ in range(self._limits.workers)]
        self._free: queue.SimpleQueue[WorkerSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(self._limits.workers, "sandbox")

    @property
    def printed(self) -> str:
        """The end of what the function printed, in all workers."""
        return printable("".join(slot.printed.decode("utf-8", "replace") for slot in self._slots))[-PRINTED_BYTES:]

    def call(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order."""
        return [outcome for part in self._submit(calls) for outcome in part.result()]

    def map(self, batches: Iterable[Sequence[Call]]) -> Iterator[list[Outcome]]:
        """The outcomes of each batch, in their order; batches are read ahead to keep all workers busy."""
        ahead: deque[list[Future[list[Outcome]]]] = deque()
        for batch in batches:
            ahead.append(self._submit(batch))
            while ahead and (
                all(part.done() for part in ahead[0]) or sum(map(len, ahead)) > _AHEAD * self._limits.workers
            ):
                yield [outcome for part in ahead.popleft() for outcome in part.result()]
        while ahead:
            yield [outcome for part in ahead.popleft() for outcome in part.result()]

    def stream(self, batches: Iterable[Sequence[tuple[T, Call]]]) -> Iterator[list[tuple[T, Outcome]]]:
        """Outcomes as they come, also out of the middle of a batch: a slow call holds up nothing but itself.

        A batch holds, of each call, something to know it by, and its keyword arguments; batches are read ahead to keep
        all workers busy. Yields what has come since of some batch, every half second at least: it may be nothing. Each
        worker's calls are in their order.
        """
        source = iter(batches)
        under_way: list[_Message[T]] = []
        more = True
        while more or under_way:
            while more and len(under_way) < _AHEAD * self._limits.workers:
                batch = next(source, None)
                more = batch is not None
                under_way += self._sent(batch or ())
            wait([message.future for message in under_way], _PAUSE_SECONDS, FIRST_COMPLETED)
            ended = [message.future for message in under_way if message.future.done()]
            yield from [news for message in under_way if (news := message.news())] or [[]]
            for future in ended:
                future.result()
            under_way = [message for message in under_way if message.future not in ended]

    def close(self) -> None:
        """End all workers; what they were still asked is dropped."""
        for slot in self._slots:
            slot.stop()
        self._threads.shutdown(cancel_futures=True)
        for slot in self._slots:
            slot.close()

    def _submit(self, calls: Sequence[Call]) -> list[Future[list[Outcome]]]:
        rows = [_encoded(call) for call in calls]
        size = self._limits.rows_per_batch
        return [self._threads.submit(self._score, rows[first : first + size]) for first in range(0, len(rows), size)]

    def _sent(self, batch: Sequence[tuple[T, Call]]) -> "Iterator[_Message[T]]":
        size = self._limits.rows_per_batch
        for first in range(0, len(batch), size):
            part = batch[first : first + size]
            found: list[Outcome] = []
            future = self._threads.submit(self._score, [_encoded(call) for _, call in part], found)
            yield _Message([mark for mark, _ in part], found, future)

    def _score(self, rows: list[bytes], found: list[Outcome] | None = None) -> list[Outcome]:
        slot = self._free.get()
        try:
            return slot.score(rows, found)
        finally:
            self._free.put(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Message(Generic[T]):
    """Calls that one worker is asked, and what it has answered so far."""

    marks: list[T]
    found: list[Outcome]
    """Filled by the worker's thread."""
    future: Future[list[Outcome]]
    reported: int = 0

    def news(self) -> list[tuple[T, Outcome]]:
        """What has come since the last time."""
        first, self.reported = self.reported, len(self.found)
        return list(zip(self.marks[first : self.reported], self.found[first : self.reported], strict=True))


def _encoded(call: Call) -> bytes:
    """MessagePack where it can be, because workers decode it fastest; else JSON. A worker tells them apart."""
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
    """What a function is, found out in a worker: its module is not imported here.

    `mode`, `is_async`, `parameters` (names), `accepts_any` (whether it takes **kwargs), `requires_network`, and
    `declared`: the attributes its decorator set (`__trajlake_reward__`). UsageError if it cannot be loaded, or there is
    none; SandboxUnavailableError if isolation here is weaker than `min_level`.
    """
    worker = Worker(prepare(FunctionSource(path, name, adapter=adapter), limits or SandboxLimits()))
    try:
        death = worker.start()
    finally:
        worker.close()
    if death is not None:
        msg = f"{path}:{name} cannot be loaded: {death.reason}"
        raise UsageError(msg)
    facts = msgspec.structs.asdict(worker.facts)
    return {key: value for key, value in facts.items() if key not in ("kind", "error")}
