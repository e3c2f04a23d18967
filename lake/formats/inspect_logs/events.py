"""Events of Inspect logs: what they know of the decisions, and everything else as spans.

A call of a model (`model`) gives its usage, time, stop reason and log-probabilities to the decision that it led to: the
one whose message has the id of its output, or where messages have none, says the same, if that is plain. Calls that led
to none (graders, other agents, attempts that failed) are spans with what was answered. Prompts repeat the conversation,
so of each only the messages are kept that neither the sample nor an earlier call has; the provider's own request and
response are left out, as they repeat both.

`span_begin` and `span_end` (in early logs `step`) are one span. A `tool` keeps arguments and result where no message
has them, and not how a viewer shows it. `state` keeps changes of anything but messages, output, tools and store, which
stand elsewhere. `sample_init` repeats the sample. `error`, `info`, `score`, `sample_limit`, `approval`, `store`,
`sandbox` and all others stay whole. Scores on the way (`intermediate`) that name their scorer are also scores of the
decision before them.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from lake.formats.base.fields import as_object, as_text
from lake.formats.base.rows import ShapeError
from lake.formats.inspect_logs.calls import Inputs, answer_of, complete, matched, utc
from lake.formats.inspect_logs.messages import Resolve, filled, list_of
from lake.records import SpanRecord, StepRecord

_OF_ALL = ("event", "uuid", "span_id", "timestamp", "completed")
_OF_MODELS = ("model", "input", "input_refs", "tools", "output", "call", "traceback_ansi")
_REPEATED_STATE = ("/messages", "/output", "/store", "/tools", "/tool_choice")
_COUNTED = ("input_tokens", "output_tokens", "total_tokens", "total_cost")
"""What the columns of a step say."""


class Score(NamedTuple):
    """A score that was given on the way."""

    scorer: str
    score: dict[str, Any]
    step_index: int


class _Event(NamedTuple):
    """An event in its place."""

    value: dict[str, Any]
    span_id: str
    parent: str | None
    is_retried: bool
    """It belongs to an attempt that was given up."""


class Known(msgspec.Struct):
    """What the sample says itself, so that events need not repeat it."""

    messages: Sequence[Any]
    scores: Sequence[Any] = ()
    target: Any = None
    error: Mapping[str, Any] = {}
    sampling: Mapping[str, Any] = {}


class Transcript:
    """The events of a sample."""

    def __init__(self, trace_id: str, events: Sequence[Any], retries: Sequence[Any], resolve: Resolve) -> None:
        """Raises ShapeError: an event is none."""
        self.spans: list[SpanRecord] = []
        self.scores: list[Score] = []
        self.tools: dict[str, Any] = {}
        self._trace_id = trace_id
        self._resolve = resolve
        self._ids: set[str] = set()
        self._open: dict[str, SpanRecord] = {}
        self._steps: list[SpanRecord] = []
        """Of early logs: those that are open, which nest by their order."""
        self._events = list(self._flat(events, "events"))
        for index, retry in enumerate(retries):
            self._events += self._retried(as_object(retry), index)
        calls = [event for event in self._events if event.value["event"] == "model" and not event.is_retried]
        self._answers = [
            (event, answer) for event in calls if (answer := answer_of(as_object(event.value.get("output"))))
        ]

    @property
    def generated(self) -> set[str]:
        """Ids of the messages that calls of models gave."""
        return {answer["id"] for _, answer in self._answers if isinstance(answer.get("id"), str)}

    def times(self) -> tuple[datetime | None, datetime | None]:
        """When the first and the last event were."""
        times = [event.value.get("timestamp") for event in self._events if not event.is_retried]
        return (utc(times[0]), utc(times[-1])) if times else (None, None)

    def tell(self, steps: Sequence[StepRecord], given: Sequence[Any], known: Known, pool: Sequence[Any]) -> None:
        """Give the steps what is known of their calls, and make the spans.

        Args:
            steps: the decisions; completed in place.
            given: the message of each, as the sample has it.
            known: what the sample says.
            pool: the messages that prompts refer to.
        """
        self._known, self._inputs = known, Inputs(known.messages, pool, self._resolve)
        self._callers = {
            call["id"]: index for index, step in enumerate(steps) for call in step.tool_calls or () if "id" in call
        }
        self._answered = {
            call_id
            for message in known.messages
            if as_object(message).get("role") == "tool" and (call_id := as_text(message.get("tool_call_id")))
        }
        places = matched(((event.span_id, answer) for event, answer in self._answers), given, self._resolve)
        last: int | None = None
        for event in self._events:
            last = places.get(event.span_id, last)
            self._tell(event, steps, places.get(event.span_id), last)

    def _tell(self, event: _Event, steps: Sequence[StepRecord], step: int | None, last: int | None) -> None:
        value, kind = event.value, event.value["event"]
        name = as_text(value.get("name")) or as_text(value.get("source")) or kind
        if kind == "model":
            self._model(event, steps, step)
        elif kind == "tool":
            self._tool(event)
        elif kind == "score":
            self._score(event, last)
        elif kind == "error":
            self._error(event)
        elif kind in ("span_end", "step") and value.get("action") != "begin":
            self._end(value)
        elif kind in ("span_begin", "step"):
            known = ("id", "parent_id", "type", "name", "action")
            self._begin(self._add(event, as_text(value.get("type")) or "span", name, *known), value)
        elif kind == "state":
            if changes := [change for change in list_of(value.get("changes")) if not _repeats(change)]:
                self._add(event, kind, name, "changes", changes=changes)
        elif kind != "sample_init":
            self._add(event, kind, name, "events", *(["name"] if name == value.get("name") else []))

    def _begin(self, span: SpanRecord, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self._steps.append(span)
        else:
            span.parent_span_id = as_text(event.get("parent_id"))
            self._open[span.span_id] = span

    def _end(self, event: Mapping[str, Any]) -> None:
        span = self._open.pop(str(event.get("id")), None)
        if event["event"] == "step" and self._steps:
            span = self._steps.pop()
        if span is not None:
            span.ended_at = utc(event.get("timestamp"))

    def _add(
        self, event: _Event, kind: str, name: str, *known: str, error: str | None = None, **more: Any
    ) -> SpanRecord:
        value = event.value
        started, ended = utc(value.get("timestamp")), utc(value.get("completed"))
        attributes = filled(value, *_OF_ALL, *known) | more
        if started is None and value.get("timestamp") is not None:
            attributes["timestamp"] = value["timestamp"]
        call = value if kind == "tool" else as_object(value.get("call"))
        around = self._steps[-1].span_id if self._steps and not event.is_retried else None
        span = SpanRecord(
            trace_id=self._trace_id,
            span_id=event.span_id,
            parent_span_id=event.parent or as_text(value.get("span_id")) or around,
            kind=kind,
            name=name,
            step_index=self._callers.get(as_text(call.get("id"))),
            started_at=started,
            ended_at=ended,
            error=error,
            attributes=self._resolve(attributes) or None,
        )
        self.spans.append(span)
        return span

    def _model(self, event: _Event, steps: Sequence[StepRecord], step: int | None) -> None:
        value, output = event.value, as_object(event.value.get("output"))
        more: dict[str, Any] = {"input": self._inputs.new(value)}
        known = [*_OF_MODELS, "error"]
        if value.get("config") == self._known.sampling:
            known.append("config")
        if value.get("tool_choice") in ("auto", "none"):
            known.append("tool_choice")
        if step is None:
            more["output"] = filled(output, "completion")
        else:
            complete(steps[step], output, self._resolve)
            # Before `completed` was written, the time of an event was that of its end.
            steps[step].started_at = utc(value.get("timestamp")) if value.get("completed") else None
            more["output"] = filled(output, "choices", "completion", "model", "usage", "time")
            more["choices"] = output["choices"][1:]
            if filled(as_object(output.get("usage")), *_COUNTED):
                more["usage"] = output["usage"]
            self._offered(value.get("tools"))
        name = as_text(value.get("model")) or "model"
        span = self._add(event, "model", name, *known, error=as_text(value.get("error")), **filled(more))
        span.step_index = step

    def _offered(self, tools: Any) -> None:
        for tool in list_of(tools):
            if isinstance(tool, dict) and isinstance(tool.get("name"), str) and tool["name"] not in self.tools:
                self.tools[tool["name"]] = {"type": "function", "function": self._resolve(filled(tool))}

    def _tool(self, event: _Event) -> None:
        value = event.value
        known = ["id", "type", "function", "events", "view", "error"]
        if as_text(value.get("id")) in self._answered:
            known += ["arguments", "result"]
        error = as_object(value.get("error"))
        said = ": ".join(filter(None, (as_text(error.get("type")), as_text(error.get("message")))))
        more = {"error": error} if error and not said else {}
        self._add(event, "tool", as_text(value.get("function")) or "tool", *known, error=said or None, **more)

    def _score(self, event: _Event, last: int | None) -> None:
        value, known = event.value, ["scorer"]
        score, scorer = value.get("score"), as_text(value.get("scorer"))
        if value.get("target") == self._known.target:
            known.append("target")
        if not value.get("intermediate"):
            known += ["score", "intermediate"] if score in self._known.scores else []
        elif isinstance(score, dict) and scorer and last is not None and not event.is_retried:
            self.scores.append(Score(scorer, self._resolve(score), last))
            known.append("score")
        span = self._add(event, "score", scorer or "score", *known)
        if value.get("intermediate"):
            span.step_index = last

    def _error(self, event: _Event) -> None:
        error = as_object(event.value.get("error"))
        repeats = all(error.get(key) == self._known.error.get(key) for key in ("message", "traceback"))
        more = {} if repeats else {"error": filled(error, "message", "traceback_ansi")}
        self._add(event, "error", "error", "error", error=as_text(error.get("message")), **filled(more))

    def _retried(self, retry: dict[str, Any], index: int) -> Iterator[_Event]:
        span_id = self._own(f"attempt-{index}")
        value = filled(retry, "events", "traceback_ansi") | {"event": "error_retry", "name": f"attempt {index}"}
        yield _Event(value, span_id, None, is_retried=True)
        yield from self._flat(retry.get("events") or (), f"error_retries[{index}].events", span_id, is_retried=True)

    def _flat(
        self, events: Any, place: str, parent: str | None = None, *, is_retried: bool = False
    ) -> Iterator[_Event]:
        """Events and, in early logs, those inside them."""
        if not isinstance(events, list | tuple):
            raise ShapeError(f"Expected `array`, got `{type(events).__name__}` - at `$.{place}`")
        for index, value in enumerate(events):
            if not isinstance(value, dict) or not as_text(value.get("event")):
                raise ShapeError(f"`{place}[{index}]` is no event; valid: an object with the name of its `event`")
            named = as_text(value.get("id")) if value["event"] == "span_begin" else None
            made = _Event(
                value, self._own(named or as_text(value.get("uuid")) or f"{place}[{index}]"), parent, is_retried
            )
            yield made
            if value["event"] in ("tool", "subtask") and isinstance(value.get("events"), list):
                yield from self._flat(value["events"], f"{place}[{index}].events", made.span_id, is_retried=is_retried)

    def _own(self, name: str) -> str:
        """An id that no other span has."""
        own, number = name, len(self._ids)
        while own in self._ids:
            own, number = f"{name}#{number}", number + 1
        self._ids.add(own)
        return own


def _repeats(change: Any) -> bool:
    path = as_object(change).get("path")
    return isinstance(path, str) and path.startswith(_REPEATED_STATE)
