"""Traces of MassGen that go on: what the mixins of `lake.live.massgen` collect, in the form of MassGen's store.

A trace that has ended is an episode by the same rules as a file of it (`lake.formats.massgen.traces`).
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lake import ids
from lake.errors import UsageError
from lake.formats.base.rows import ShapeError, finished
from lake.formats.chat.messages import Message, text_of
from lake.formats.massgen.traces import NAME, to_record
from lake.live.frames import plain
from lake.live.sink import Sink, guarded
from lake.live.steps import messages, number
from lake.records import Reject, episode_id

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_T = TypeVar("_T")
MAX_SPANS = 100_000
"""Of a trace; more are counted in its metadata and left out."""
_LONGEST_TASK = 500


class TraceCollector:
    """Begins traces, and hands those that have ended to a recorder. Thread-safe."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder

    @property
    def _sink(self) -> Sink:
        return self._recorder._sink

    @guarded()
    def attempt(self, make: Callable[[], _T]) -> _T | None:
        """What a function makes; None if it fails, which is counted and told."""
        return make()

    def begin(self, agent_id: str, given: Sequence[Any], metadata: dict[str, Any]) -> "Trace":
        """A trace begins.

        Args:
            agent_id: whose it is.
            given: the messages that the agent is given; the task is the text of the last one of the user.
            metadata: what else is known.
        """
        about = plain(metadata) | {"num_messages": len(given)}
        seen: list[Message] = []
        try:
            seen = messages(given)
            about["messages"] = seen
        except ShapeError as error:
            self._sink.trouble(f"messages of a MassGen agent were not understood and are left out: {error}")
        said = [text_of(message.get("content"), "\n") for message in seen if message["role"] == "user"]
        task = said[-1] if said and said[-1].strip() else "Unknown task"
        return Trace(self, agent_id, task if len(task) <= _LONGEST_TASK else f"{task[:_LONGEST_TASK]}...", about)

    @guarded()
    def record(self, trace: "Trace") -> None:
        """Record a trace that has ended."""
        record = to_record(trace.value())
        problem = finished(record, NAME)
        if problem is not None and record.steps:
            raw = msgspec.json.encode(trace.value()).decode()
            self._recorder.reject(Reject(position=0, reason="invalid", message=problem, raw=raw, source_format=NAME))
            return
        trace.id = ids.to_text(episode_id(record, self._recorder.run))
        self._recorder.record(record)


class Trace:
    """What an agent does in one call of `chat`, as spans."""

    def __init__(self, collector: TraceCollector, agent_id: str, task: str, metadata: dict[str, Any]) -> None:
        self.trace_id = str(uuid.uuid4())
        self.id: str | None = None
        """Its episode's id in the lake, as people see it, once it has ended."""
        self.metadata = metadata
        """What is known of it beside its spans; may be added to until it ends."""
        self._collector, self._agent_id, self._task = collector, agent_id, task
        self._lock = threading.Lock()
        self._start, self._tick = time.time(), time.monotonic()
        self._end: float | None = None
        self._status = "running"
        self._spans: list[dict[str, Any]] = []

    @property
    def _sink(self) -> Sink:
        return self._collector._sink

    @guarded()
    def add(self, span_type: str, *, span_id: str | None = None, at: float | None = None, **fields: Any) -> None:
        """Add a span, of a type and with the fields that `lake.formats.massgen.traces` names.

        Args:
            span_type: `reward` for what the environment or a person gives; the others are added while the agent runs.
            span_id: of a tool, the id of the call; a random one unless given.
            at: seconds since 1970; now unless given.
            fields: of the span.
        """
        if span_type == "reward":
            fields["reward"] = number(fields.get("reward"))
        head = {"span_id": span_id or str(uuid.uuid4()), "span_type": span_type, "timestamp": at or self._now()}
        with self._lock:
            if self._end is not None:
                raise UsageError("the trace has ended; judgements that come later are added with `Lake.add_scores`")
            if len(self._spans) < MAX_SPANS:
                self._spans.append(head | plain(fields))
            else:
                self.metadata["spans_left_out"] = self.metadata.get("spans_left_out", 0) + 1

    @guarded()
    def called(self, name: str, arguments: Any, call_id: str | None) -> None:
        """Add a call of a tool, once: a stream may tell it in pieces and again as a whole."""
        fields = {"tool_name": name, "arguments": _arguments(arguments)}
        for span in reversed(self._spans):
            if span["span_type"] != "tool":
                break
            if span["span_id"] == call_id and span["tool_name"] == name and span["arguments"] == fields["arguments"]:
                return
        later = {"result": None, "success": True, "execution_time": 0.0, "error": None}
        self.add("tool", span_id=call_id, **fields, **later)

    @guarded()
    def answered(self, name: str, text: str, call_id: str | None, *, is_error: bool) -> None:
        """Say what a tool gave back: the last call of this id and name that has no answer."""
        for span in reversed(self._spans):
            is_open = span["span_type"] == "tool" and span["result"] is None and span["error"] is None
            if is_open and span["tool_name"] == name and call_id in (None, span["span_id"]):
                span["execution_time"] = self._now() - span["timestamp"]
                span.update({"success": False, "error": text} if is_error else {"result": text})
                return

    def end(self, status: str = "completed", error: str | None = None) -> None:
        """End it, unless it has ended: `completed`, `failed`, or `running` if nobody waited for its end."""
        with self._lock:
            if self._end is not None:
                return
            self._end, self._status = self._now(), status
        if error is not None:
            self.metadata["error"] = error
        self._collector.record(self)

    def value(self) -> dict[str, Any]:
        """The trace as MassGen's store has it; the total is the sum of its reward spans."""
        rewards = [span["reward"] for span in self._spans if span["span_type"] == "reward"]
        return {
            "trace_id": self.trace_id,
            "agent_id": self._agent_id,
            "task": self._task,
            "spans": self._spans,
            "metadata": self.metadata,
            "start_time": self._start,
            "end_time": self._end,
            "duration": None if self._end is None else self._end - self._start,
            "total_reward": sum(rewards) if rewards else None,
            "status": self._status,
        }

    def _now(self) -> float:
        """The time by the clock as it was at the beginning: one that is set meanwhile reorders nothing."""
        return self._start + time.monotonic() - self._tick


def _arguments(given: Any) -> Any:
    """The arguments of a call as MassGen's store has them: an object, or what cannot be read as one."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {} if given in (None, "") else {"raw": given}
