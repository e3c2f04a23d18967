"""Inspect logs (inspect_ai): `.eval` archives, their samples whole or in chunks, and `.json` documents.

.. code-block:: text

    .json           {version, status, eval, plan, results, stats, error, samples[], reductions[]}
    .eval           header.json (the same without samples), _journal/start.json ({version, eval, plan}),
                    samples/ID_epoch_N.json, summaries.json, reductions.json; deflate, from 0.3.208 on zstd
    in chunks       samples/ID_epoch_N/sample.json (with message_refs), metadata.json,
                    {messages,events,attachments}/START.json (calls, skeleton.json, events/*.json are not needed)
    eval            eval_id, run_id, task, task_id, model, model_generate_config, config{epochs}, dataset, packages
    sample          id, epoch, input, target, messages[], output, scores{}, events[], events_data, attachments{},
                    metadata, store, model_usage, error{}, error_retries[], limit{}, started_at, uuid
    early           `score` for scores (version 1), `transcript{events, content}` for events and attachments

Versions 1 (0.3.8), 2, and 3 (development) of `version` are read. Source: inspect_ai 0.3.8, 0.3.100 and 0.3.285, and
what they, 0.3.25, 0.3.43, 0.3.75, 0.3.150, 0.3.210 and 0.3.245 write.

Episode: a sample of an epoch. task_id is the sample's id, rollout_index is epoch - 1, attempt is the number of its
retries. The run is the eval, named task-model-BEGINNING of its eval_id (early logs, up to 0.3.75, have task_id and
run_id instead). Fields of the header that change while an eval runs are not part of an episode, so a sample of a
growing log does not change later.

Step: an assistant's message of the sample that a model wrote; events add the fields of its call, and spans. Ids of
messages are in `extra`, because siblings that begin alike have different ones.

Reward: `env_return` is the score of the sample if its eval has one scorer; with several, the log does not say which
one counts. Booleans and numbers keep their value. Each key of an object is `scorer.key`; NaN is unscored.

A sample in chunks has for messages, events and attachments a list in START.json for about every thousand. Its
conversation is `message_refs`, ranges of the messages; the names of its attachments are their numbers. The entries that
are not needed repeat these or can be computed from them.

Messages: a message's content is text or parts; reasoning is a separate part, or in early logs a key. A call is {id,
function, arguments, parse_error?}. A tool's message has `function` and `error{type, message}`, in version 1
`tool_error`. The model saw the message of a tool's error without text, and so does the reader's content. Images, and
long texts of events, are `attachment://KEY`, in early logs `tc://KEY`.

Messages of the input have `source: input`; those of a model have `generate`. An assistant's message with neither (of a
bridge to another framework, or a solver) is a decision if it names its model, if a call of a model gave it, or if no
message of its sample has `generate`.

Events: a call of a model (`model`) gives its usage, time, stop reason and log-probabilities to its decision. That is
the one whose message has the id of the call's output, or without ids the one with the same content, if it is unique.
Calls without a decision (graders, other agents, failed attempts) are spans with their answers. Prompts repeat the
conversation, so a span has only the messages that neither the sample nor an earlier call has. The provider's request
and response repeat both and are dropped.

`span_begin` and `span_end` (in early logs `step`) are one span. A `tool` has arguments and result only if no message
has them, and not its display. `state` has changes of anything but messages, output, tools and store, which other
events have. `sample_init` repeats the sample and is dropped. All others stay complete. Intermediate scores that name
their scorer are also scores of the decision before them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

from lake.formats.base.archives import EntryError, list_entries
from lake.formats.base.fields import (
    ScoreList,
    as_list,
    as_object,
    as_text,
    parse_count,
    parse_finite,
    parse_number,
    parse_time,
)
from lake.formats.base.format import FileHead, Format, Item
from lake.formats.base.json_array import Element, ObjectMember, Rewriter
from lake.formats.base.rows import (
    ShapeError,
    UnsupportedError,
    convert_value,
    drop_empty,
    omit_fields,
    parse_document,
    read_object_members,
)
from lake.formats.base.secrets import remove_keys
from lake.formats.base.source import Input
from lake.formats.chat.messages import ChatDecisions, Message, join_text, make_tool_call, parse_chat
from lake.formats.chat.sessions import sum_usage
from lake.records import EpisodeRecord, Reject, SpanRecord, StepRecord, format_record

NAME = "inspect"
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Grades: correct, partial, incorrect, no answer."""
_PLACEHOLDER = "88F74D2C"
"""The tool's name of the scorer of a sample of version 1 whose log does not name it."""
_CUT_REASONS = ("max_tokens", "model_length", "length")
"""Stop reasons of an answer that a limit cut short."""
HEADERS = ("header.json", "_journal/start.json")
"""Entries with version, eval and plan: the first exists in a finished log, the second from the start."""
_SAMPLE_ENTRY = re.compile(r"samples/.+_epoch_\d+\.json")
_CHUNKED_ENTRY = re.compile(r"samples/.+_epoch_\d+/sample\.json")
_CHUNK = re.compile(r"(samples/.+_epoch_\d+)/(messages|events|attachments)/(\d+)\.json")
_SEQUENCES = ("messages", "events", "attachments")
_MAX_MESSAGES = 1_000_000
_NEWEST_VERSION = 3
_INGEST_EVAL = "ingest the .eval file that it comes from"
_NO_SAMPLES = (
    "it is an Inspect log without samples{}: its eval ended before the first one or was set not to log them, or this "
    "is the header alone; ingest the .eval file with its samples"
)
_Resolve = Callable[[Any], Any]
_PROTOCOLS = ("attachment://", "tc://")
_EVENT_KEYS = ("event", "uuid", "span_id", "timestamp", "completed")
_MODEL_KEYS = ("model", "input", "input_refs", "tools", "output", "call", "traceback_ansi")
_REPEATED_STATE = ("/messages", "/output", "/store", "/tools", "/tool_choice")
_USAGE_KEYS = ("input_tokens", "output_tokens", "total_tokens", "total_cost")
"""Keys of usage that the columns of a step hold."""


def recognise(look: FileHead) -> bool:
    """Return whether a file is an archive or a document of a log."""
    if look.kind == "zip":
        return HEADERS[1] in look.names or any(map(is_sample, look.names))
    return look.kind in ("object", "lines") and look.has("version", "status", "eval") and _describes_eval(look.first)


def no_trajectory(look: FileHead) -> str | None:
    """Name the tool's files that hold no sample."""
    if look.kind == "array":
        if look.has("id", "epoch", "input", "target") and not look.has("messages"):
            return f"it lists summaries of the samples of an Inspect log; {_INGEST_EVAL}"
        if look.has("scorer", "samples") and isinstance(look.first.get("samples"), list):
            return f"it lists reduced scores of an Inspect log; {_INGEST_EVAL}"
    elif look.kind == "zip":
        if recognise(look) and not any(map(is_sample, look.names)) and list_entries(look.path)[1] is None:
            return _NO_SAMPLES.format("")
    elif look.has("version", "eval", "plan") and not look.has("status") and _describes_eval(look.first):
        return f"it is the beginning of an Inspect log, without samples; {_INGEST_EVAL}"
    elif recognise(look) and isinstance(look.first["eval"], dict):
        # Whether the whole document has no sample; the first sample ends the reading.
        members = read_object_members(Input(look.path, ""), "samples")
        if all(isinstance(m, ObjectMember) and (m.key != "samples" or m.value is None) for m in members):
            return _NO_SAMPLES.format(f" (its status: {look.first['status']})")
    return None


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file, by the index of the sample from 0."""
    with file.path.open("rb") as source:
        if source.read(2) != b"PK":
            yield from _read_document(file)
            return
        archive = _EvalArchive(file, source)
        try:
            header = _parse_header(archive.read_header())
        except (UnsupportedError, ShapeError) as error:
            yield _build_reject(error, {})
            return
        for name, sample in archive.read_samples():
            for item in _convert_sample(sample, header):
                if isinstance(item, Reject):
                    item.message = f"{name}: {item.message}"
                yield item


# ---------------------------------------------------------------- messages


def _resolve_references(attachments: Mapping[str, str], value: Any) -> Any:
    """Replace references by their texts; unknown references stay."""
    # A recursive inner function would be a reference cycle, which ingest does not collect.
    if isinstance(value, str):
        return attachments.get(value.partition("://")[2], value) if value.startswith(_PROTOCOLS) else value
    if isinstance(value, dict):
        return {key: _resolve_references(attachments, field) for key, field in value.items()}
    return [_resolve_references(attachments, element) for element in value] if isinstance(value, list) else value


def _make_message_key(message: Mapping[str, Any], resolve: _Resolve) -> str | bytes:
    """Return the identity of a message: its id, or in early logs its content."""
    if isinstance(message.get("id"), str):
        return str(message["id"])
    content = [message.get("role"), message.get("content"), message.get("tool_calls")]
    return msgspec.json.encode(resolve(content), order="deterministic")


def _find_decisions(messages: Sequence[Any], answer_ids: set[str]) -> list[bool]:
    """Return whether each message is a decision. `answer_ids`: ids of the messages that calls of models gave."""
    answers = [message if as_object(message).get("role") == "assistant" else {} for message in messages]
    is_marked = any(answer.get("source") == "generate" for answer in answers)

    def is_decision(answer: Message) -> bool:
        if not answer or answer.get("source") in ("input", "operator"):
            return False
        is_known = answer.get("source") == "generate" or answer.get("id") in answer_ids
        return is_known or as_text(answer.get("model")) is not None or not is_marked

    return list(map(is_decision, answers))


def _convert_message(raw: Any, path: str, resolve: _Resolve) -> Message:
    """Return a message in the form of chat APIs, without its id. Raises ShapeError: it is not a message."""
    if not isinstance(raw, dict):
        raise ShapeError(f"Expected `object`, got `{type(raw).__name__}` - at `$.{path}`")
    message: Message = resolve(omit_fields(raw, "id") or {})
    if message.get("role") == "assistant":
        return _convert_assistant(message, path)
    return _convert_tool_message(message) if message.get("role") == "tool" else message


def _convert_assistant(message: Message, path: str) -> Message:
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_convert_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if message.get("source") == "generate":
        del message["source"]
    content = as_list(message.get("content"))
    content = content if all(isinstance(part, dict) for part in content) else []
    thoughts = [part for part in content if part.get("type") == "reasoning"]
    if thoughts:
        # Encrypted reasoning has a summary instead of a text.
        texts = (as_text(part.get("summary" if part.get("redacted") else "reasoning")) for part in thoughts)
        message["reasoning_content"] = "\n".join(filter(None, texts))
    elif isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message.pop("reasoning")
    answers = [drop_empty(part) for part in content if part.get("type") != "reasoning"]
    is_plain = all(part.get("type") == "text" and part.keys() <= {"type", "text"} for part in answers)
    if len(thoughts) == 1 and content[0] is thoughts[0] and len(answers) <= 1 and is_plain:
        # Most models write reasoning, then an answer. Any other order stays in `content`, with all its parts.
        message["content"] = join_text(answers)
        mapped_keys = ("type",) if thoughts[0].get("redacted") else ("type", "reasoning", "redacted")
        message["reasoning_part"] = drop_empty(thoughts[0], *mapped_keys) or None
    return message


def _convert_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), str):
        raise ShapeError(f"`{path}` is not a call; valid: an object with `id`, `function` and `arguments`")
    fields = drop_empty(call, "id", "function", "arguments", "type")
    return make_tool_call(call["function"], call.get("arguments"), as_text(call.get("id"))) | fields


def _convert_tool_message(raw: Message) -> Message:
    error = raw.get("error") or raw.get("tool_error")
    fields = {"role": "tool", "tool_call_id": raw.get("tool_call_id"), "name": raw.get("function")}
    message = {key: field for key, field in fields.items() if field is not None}
    message |= omit_fields(raw, "role", "tool_call_id", "function") or {}
    text = as_object(error).get("message", error)
    content = raw.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, str | dict) for part in content)
    if isinstance(text, str) and not join_text(content if is_parts or isinstance(content, str) else None, "\n"):
        message["content"] = text
    return message | {"is_error": bool(error)}


def _match_calls(answers: Iterable[tuple[str, Any]], messages: Sequence[Any], resolve: _Resolve) -> dict[str, int]:
    """Return the index of the decision that each call, a span and its answer, led to; by the span."""
    decisions: dict[str | bytes, list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        decisions[_make_message_key(message, resolve)].append(index)
    calls: dict[str | bytes, list[str]] = defaultdict(list)
    for span_id, answer in answers:
        calls[_make_message_key(answer, resolve)].append(span_id)
    pairs: dict[str, int] = {}
    for key, indices in decisions.items():
        spans = calls[key]
        if isinstance(key, str) and len(indices) == 1:
            spans = spans[-1:]
        if len(spans) == len(indices):
            pairs |= dict(zip(spans, indices, strict=True))
    return pairs


class _PromptMessages:
    """The messages of prompts, each once."""

    def __init__(self, messages: Sequence[Any], pool: Sequence[Any], resolve: _Resolve) -> None:
        self._pool, self._resolve = pool, resolve
        self._keys = {_make_message_key(message, resolve) for message in messages if isinstance(message, dict)}
        self._is_read = bytearray(len(pool))
        """1 for each message of the pool that a prompt had."""

    def select_new(self, event: Mapping[str, Any]) -> list[Any]:
        """Return the messages of a prompt that neither the sample nor an earlier prompt has."""
        messages = list(as_list(event.get("input")))
        for ref in as_list(event.get("input_refs")):
            match ref:
                case [int(start), int(end)] if 0 <= start <= end:
                    while (start := self._is_read.find(0, start, end)) >= 0:
                        messages.append(self._pool[start])
                        self._is_read[start] = 1
        new_messages = []
        for message in messages:
            if not isinstance(message, dict):
                continue
            if not isinstance(message.get("id"), str):
                # Prompts repeat the raw message, so most need no look at their references.
                raw = msgspec.json.encode(message)
                if raw in self._keys:
                    continue
                self._keys.add(raw)
            key = _make_message_key(message, self._resolve)
            if key not in self._keys:
                self._keys.add(key)
                new_messages.append(self._resolve(message))
        return new_messages


def _parse_utc(value: Any) -> datetime | None:
    """Return a time in UTC, as newer versions write it when they rewrite a log."""
    time = parse_time(value) if isinstance(value, str) else None
    with suppress(OverflowError):
        return time and time.astimezone(UTC)
    return None


def _fill_step(step: StepRecord, output: Mapping[str, Any], resolve: _Resolve) -> None:
    """Write the model, counts, cost and times of a call's output on its step."""
    choice, usage = _get_choice(output), as_object(output.get("usage"))
    step.model = step.model or as_text(output.get("model"))
    step.finish_reason = as_text(choice.get("stop_reason"))
    step.latency = _parse_finite_number(output.get("time"))
    step.cost = _parse_finite_number(usage.get("total_cost"))
    step.completion_tokens = parse_count(usage.get("output_tokens"))
    # Tokens that the provider read from a cache, or wrote to one, are counted apart.
    keys = ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")
    counts = [parse_count(usage.get(key)) for key in keys]
    if counts[0] is not None:
        step.prompt_tokens = sum(count or 0 for count in counts)
    step.extra = (step.extra or {}) | resolve(drop_empty(choice, "message", "stop_reason")) or None


def _parse_finite_number(value: Any) -> float | None:
    return None if isinstance(value, bool) else parse_finite(value)


def _get_answer(output: Mapping[str, Any]) -> dict[str, Any]:
    return as_object(_get_choice(output).get("message"))


def _get_choice(output: Mapping[str, Any]) -> dict[str, Any]:
    return as_object(next(iter(as_list(output.get("choices"))), None))


class _SpanEvent(NamedTuple):
    value: dict[str, Any]
    span_id: str
    parent: str | None
    is_retried: bool
    """It belongs to an attempt that failed and was repeated."""


class _SampleFields(NamedTuple):
    messages: Sequence[Any]
    scores: Sequence[Any]
    target: Any
    error: Mapping[str, Any]
    sampling: Mapping[str, Any]


class _Transcript:
    """The events of a sample."""

    def __init__(self, trace_id: str, events: Sequence[Any], retries: Sequence[Any], resolve: _Resolve) -> None:
        """Raises ShapeError: an element of `events` is not an event."""
        self.spans: list[SpanRecord] = []
        self.scores: list[tuple[str, dict[str, Any], int]] = []
        """Scorers, scores and steps of the scores before the end."""
        self.tools: dict[str, Any] = {}
        self._trace_id = trace_id
        self._resolve = resolve
        self._ids: set[str] = set()
        self._open: dict[str, SpanRecord] = {}
        self._nested_steps: list[SpanRecord] = []
        """The open steps of early logs, which nest by their order."""
        self._events = list(self._flatten(events, "events"))
        for index, retry in enumerate(retries):
            self._events += self._flatten_retry(as_object(retry), index)
        calls = [event for event in self._events if event.value["event"] == "model" and not event.is_retried]
        answers = ((event, _get_answer(as_object(event.value.get("output")))) for event in calls)
        self._answers = [(event, answer) for event, answer in answers if answer]

    def list_answer_ids(self) -> set[str]:
        return {answer["id"] for _, answer in self._answers if isinstance(answer.get("id"), str)}

    def find_time_range(self) -> tuple[datetime | None, datetime | None]:
        times = [event.value.get("timestamp") for event in self._events if not event.is_retried]
        return (_parse_utc(times[0]), _parse_utc(times[-1])) if times else (None, None)

    def fill_steps(
        self, steps: Sequence[StepRecord], messages: Sequence[Any], sample: _SampleFields, pool: Sequence[Any]
    ) -> None:
        """Write the fields of calls on steps, whose messages are `messages`, and make the spans.

        Events need not repeat the fields `sample`; prompts refer to messages of `pool`.
        """
        self._sample, self._prompts = sample, _PromptMessages(sample.messages, pool, self._resolve)
        pairs = ((call, index) for index, step in enumerate(steps) for call in step.tool_calls or ())
        self._callers = {call["id"]: index for call, index in pairs if "id" in call}
        self._answered_calls = {
            call_id
            for message in sample.messages
            if as_object(message).get("role") == "tool" and (call_id := as_text(message.get("tool_call_id")))
        }
        indices = _match_calls(((event.span_id, answer) for event, answer in self._answers), messages, self._resolve)
        last: int | None = None
        for event in self._events:
            last = indices.get(event.span_id, last)
            self._add_event(event, steps, indices.get(event.span_id), last)

    def _add_event(self, event: _SpanEvent, steps: Sequence[StepRecord], step: int | None, last: int | None) -> None:
        value, kind = event.value, event.value["event"]
        name = as_text(value.get("name")) or as_text(value.get("source")) or kind
        if kind == "model":
            self._add_model_call(event, steps, step)
        elif kind == "tool":
            self._add_tool_call(event)
        elif kind == "score":
            self._add_score(event, last)
        elif kind == "error":
            error = as_object(value.get("error"))
            is_repeated = all(error.get(key) == self._sample.error.get(key) for key in ("message", "traceback"))
            fields = {} if is_repeated else drop_empty({"error": drop_empty(error, "message", "traceback_ansi")})
            self._add_span(event, "error", "error", "error", error=as_text(error.get("message")), **fields)
        elif kind in ("span_end", "step") and value.get("action") != "begin":
            self._end_span(value)
        elif kind in ("span_begin", "step"):
            mapped_keys = ("id", "parent_id", "type", "name", "action")
            span = self._add_span(event, as_text(value.get("type")) or "span", name, *mapped_keys)
            if kind == "step":
                self._nested_steps.append(span)
            else:
                span.parent_span_id = as_text(value.get("parent_id"))
                self._open[span.span_id] = span
        elif kind == "state":
            paths = ((change, str(as_object(change).get("path"))) for change in as_list(value.get("changes")))
            if changes := [change for change, path in paths if not path.startswith(_REPEATED_STATE)]:
                self._add_span(event, kind, name, "changes", changes=changes)
        elif kind != "sample_init":
            self._add_span(event, kind, name, "events", *(["name"] if name == value.get("name") else []))

    def _end_span(self, event: Mapping[str, Any]) -> None:
        span = self._open.pop(str(event.get("id")), None)
        if event["event"] == "step" and self._nested_steps:
            span = self._nested_steps.pop()
        if span is not None:
            span.ended_at = _parse_utc(event.get("timestamp"))

    def _add_span(
        self, event: _SpanEvent, kind: str, name: str, *mapped_keys: str, error: str | None = None, **fields: Any
    ) -> SpanRecord:
        value = event.value
        started, ended = _parse_utc(value.get("timestamp")), _parse_utc(value.get("completed"))
        attributes = drop_empty(value, *_EVENT_KEYS, *mapped_keys) | fields
        if started is None and value.get("timestamp") is not None:
            attributes["timestamp"] = value["timestamp"]
        call = value if kind == "tool" else as_object(value.get("call"))
        around = self._nested_steps[-1].span_id if self._nested_steps and not event.is_retried else None
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

    def _add_model_call(self, event: _SpanEvent, steps: Sequence[StepRecord], step: int | None) -> None:
        value, output = event.value, as_object(event.value.get("output"))
        fields: dict[str, Any] = {"input": self._prompts.select_new(value)}
        mapped_keys = [*_MODEL_KEYS, "error"]
        if value.get("config") == self._sample.sampling:
            mapped_keys.append("config")
        if value.get("tool_choice") in ("auto", "none"):
            mapped_keys.append("tool_choice")
        if step is None:
            fields["output"] = drop_empty(output, "completion")
        else:
            _fill_step(steps[step], output, self._resolve)
            # Without `completed`, the time of an event is that of its end.
            steps[step].started_at = _parse_utc(value.get("timestamp")) if value.get("completed") else None
            fields["output"] = drop_empty(output, "choices", "completion", "model", "usage", "time")
            fields["choices"] = output["choices"][1:]
            if drop_empty(as_object(output.get("usage")), *_USAGE_KEYS):
                fields["usage"] = output["usage"]
            for tool in as_list(value.get("tools")):
                if isinstance(tool, dict) and isinstance(tool.get("name"), str) and tool["name"] not in self.tools:
                    function = self._resolve(drop_empty(tool))
                    self.tools[tool["name"]] = {"type": "function", "function": function}
        name, error = as_text(value.get("model")) or "model", as_text(value.get("error"))
        span = self._add_span(event, "model", name, *mapped_keys, error=error, **drop_empty(fields))
        span.step_index = step

    def _add_tool_call(self, event: _SpanEvent) -> None:
        value = event.value
        mapped_keys = ["id", "type", "function", "events", "view", "error"]
        if as_text(value.get("id")) in self._answered_calls:
            mapped_keys += ["arguments", "result"]
        error = as_object(value.get("error"))
        text = ": ".join(filter(None, (as_text(error.get("type")), as_text(error.get("message")))))
        fields = {"error": error} if error and not text else {}
        name = as_text(value.get("function")) or "tool"
        self._add_span(event, "tool", name, *mapped_keys, error=text or None, **fields)

    def _add_score(self, event: _SpanEvent, last: int | None) -> None:
        value, mapped_keys = event.value, ["scorer"]
        score, scorer = value.get("score"), as_text(value.get("scorer"))
        if value.get("target") == self._sample.target:
            mapped_keys.append("target")
        if not value.get("intermediate"):
            mapped_keys += ["score", "intermediate"] if score in self._sample.scores else []
        elif isinstance(score, dict) and scorer and last is not None and not event.is_retried:
            self.scores.append((scorer, self._resolve(score), last))
            mapped_keys.append("score")
        span = self._add_span(event, "score", scorer or "score", *mapped_keys)
        if value.get("intermediate"):
            span.step_index = last

    def _flatten_retry(self, retry: dict[str, Any], index: int) -> Iterator[_SpanEvent]:
        span_id = self._make_span_id(f"attempt-{index}")
        value = drop_empty(retry, "events", "traceback_ansi") | {"event": "error_retry", "name": f"attempt {index}"}
        yield _SpanEvent(value, span_id, None, is_retried=True)
        yield from self._flatten(retry.get("events") or (), f"error_retries[{index}].events", span_id, is_retried=True)

    def _flatten(
        self, events: Any, path: str, parent: str | None = None, *, is_retried: bool = False
    ) -> Iterator[_SpanEvent]:
        """Yield events and, in early logs, the events inside them."""
        if not isinstance(events, list | tuple):
            raise ShapeError(f"Expected `array`, got `{type(events).__name__}` - at `$.{path}`")
        for index, value in enumerate(events):
            if not isinstance(value, dict) or not as_text(value.get("event")):
                raise ShapeError(f"`{path}[{index}]` is not an event; valid: an object with the name of its `event`")
            name = as_text(value.get("id")) if value["event"] == "span_begin" else None
            span_id = self._make_span_id(name or as_text(value.get("uuid")) or f"{path}[{index}]")
            yield _SpanEvent(value, span_id, parent, is_retried)
            if value["event"] in ("tool", "subtask") and isinstance(value.get("events"), list):
                yield from self._flatten(value["events"], f"{path}[{index}].events", span_id, is_retried=is_retried)

    def _make_span_id(self, name: str) -> str:
        span_id, number = name, len(self._ids)
        while span_id in self._ids:
            span_id, number = f"{name}#{number}", number + 1
        self._ids.add(span_id)
        return span_id


# ---------------------------------------------------------------- samples


class _PromptPool(msgspec.Struct):
    messages: list[Any] = []


class _EarlyTranscript(msgspec.Struct):
    events: list[Any] = []
    content: dict[str, str] = {}


class _EvalSample(msgspec.Struct):
    id: int | str
    epoch: Annotated[int, Meta(ge=1, le=2**31)]
    input: Any = None
    target: str | list[Any] | None = None
    messages: list[Any] = []
    output: dict[str, Any] = {}
    scores: dict[str, dict[str, Any]] | None = None
    score: dict[str, Any] | None = None
    events: list[Any] = []
    transcript: _EarlyTranscript | None = None
    attachments: dict[str, str] = {}
    events_data: _PromptPool | None = None
    error: dict[str, Any] | None = None
    error_retries: list[Any] | None = None
    limit: dict[str, Any] | None = None
    uuid: str | None = None
    started_at: str | None = None
    completed_at: str | None = None

    def __post_init__(self) -> None:
        if self.transcript is not None:
            self.events, self.attachments = self.transcript.events, self.transcript.content
        if self.scores is None:
            self.scores = {} if self.score is None else {_PLACEHOLDER: self.score}


class _EvalHeader(msgspec.Struct, dict=True):
    version: int
    eval: dict[str, Any]
    plan: dict[str, Any]
    scorer: str | None = None
    """The scorer of a log of version 1, whose samples do not name it."""

    @cached_property
    def run_id(self) -> str | None:
        """A readable name: task, model, and the beginning of the eval's id."""
        names = {key: as_text(self.eval.get(key)) for key in ("eval_id", "task_id", "run_id", "task", "model")}
        ids = [names["eval_id"]] if names["eval_id"] else [names["task_id"], names["run_id"]]
        beginnings = (name[:8] for name in ids if name)
        return "-".join(filter(None, [names["task"], names["model"], *beginnings])) if any(ids) else None

    @cached_property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings: those of the model, then those of the task."""
        configs = (as_object(self.eval.get("model_generate_config")), as_object(self.plan.get("config")))
        return {key: value for config in configs for key, value in drop_empty(remove_keys(config)).items()}

    @cached_property
    def extra(self) -> dict[str, Any]:
        """The other fields, without the list of all samples, which every sample would repeat."""
        mapped_keys = ("task", "model", "model_generate_config", "dataset", "scorers", "metrics", "viewer")
        fields = _drop_repeated(drop_empty(self.eval, *mapped_keys))
        fields |= drop_empty({"dataset": drop_empty(as_object(self.eval.get("dataset")), "sample_ids")})
        steps = [_drop_repeated(as_object(step)) for step in as_list(self.plan.get("steps"))]
        extra: dict[str, Any] = remove_keys(drop_empty({"eval": fields, "plan": steps}))
        return extra


def _drop_repeated(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its empty fields, and without `X_passed` if it equals `X`."""
    return {
        key: field
        for key, field in drop_empty(fields).items()
        if not key.endswith("_passed") or field != fields.get(key.removesuffix("_passed"))
    }


def _build_record(value: Any, header: _EvalHeader) -> EpisodeRecord:
    # Some writers write null for a missing field.
    sample = msgspec.convert(omit_fields(value) if isinstance(value, dict) else value, _EvalSample)
    resolve: _Resolve = partial(_resolve_references, sample.attachments) if sample.attachments else lambda field: field
    trace_id = sample.uuid or f"{sample.id}_epoch_{sample.epoch}"
    transcript = _Transcript(trace_id, sample.events, sample.error_retries or (), resolve)
    messages, chat = _parse_sample(sample, transcript, resolve)
    decisions = [messages[index] for index in chat.message_indices]
    scores = {
        (header.scorer or "score") if name == _PLACEHOLDER else name: resolve(score)
        for name, score in (sample.scores or {}).items()
    }
    output = _fill_last_step(sample.output, decisions, chat.steps, resolve)
    raw_scores = list((sample.scores or {}).values())
    fields = _SampleFields(messages, raw_scores, sample.target, sample.error or {}, header.sampling)
    transcript.fill_steps(chat.steps, decisions, fields, sample.events_data.messages if sample.events_data else ())
    first, last = transcript.find_time_range()
    ids = [message.get("id") for message in messages]
    extra = drop_empty(value, *_EvalSample.__struct_fields__) | {
        "input": _find_input(sample.input, chat.initial_messages, resolve),
        "output": output,
        "message_ids": ids if any(ids) else None,  # early logs have no ids
        "uuid": sample.uuid,
        "limit": sample.limit,
        "error": drop_empty(sample.error or {}, "message", "traceback_ansi"),
    }
    score_list = ScoreList()
    for name, score, step_index in (*((*pair, None) for pair in scores.items()), *transcript.scores):
        _add_score(score_list, name, score, step_index)
    scorers, grades = header.eval.get("scorers"), [score.get("value") for score in scores.values()]
    has_one_score = len(grades) == 1 and not (isinstance(scorers, list) and len(scorers) > 1)
    version = as_text(as_object(header.eval.get("packages")).get("inspect_ai")) or f"log {header.version}"
    return EpisodeRecord(
        task_id=str(sample.id),
        run_id=header.run_id,
        rollout_index=sample.epoch - 1,
        attempt=len(sample.error_retries or ()),
        expected_group_size=parse_count(as_object(header.eval.get("config")).get("epochs")) or None,
        environment=as_text(header.eval.get("task")),
        policy=as_text(header.eval.get("model")),
        sampling=header.sampling or None,
        tools=list(transcript.tools.values()) or None,
        **_read_end(sample, chat.steps),
        error=as_text((sample.error or {}).get("message")),
        env_return=_parse_finite_number(_parse_grade(grades[0])) if has_one_score else None,
        scores=score_list.records,
        ground_truth=sample.target or None,
        started_at=_parse_utc(sample.started_at) or first,
        ended_at=_parse_utc(sample.completed_at) or last,
        **sum_usage(chat.steps),  # of the agent, without graders
        source_version=version,
        **chat.fields,
        spans=transcript.spans,
        extra=resolve(drop_empty(extra)) | header.extra or None,
    )


def _parse_sample(sample: _EvalSample, transcript: _Transcript, resolve: _Resolve) -> tuple[list[Any], ChatDecisions]:
    """Return the raw messages, and their decisions; without any, the output is one, where solvers leave the answer."""
    raw_messages = sample.messages
    decisions = _find_decisions(raw_messages, transcript.list_answer_ids())
    answer = _get_answer(sample.output)
    if not any(decisions) and (answer.get("content") or answer.get("tool_calls")):
        raw_messages, decisions = [*raw_messages, answer], [*decisions, True]
    messages = [_convert_message(raw, f"messages[{index}]", resolve) for index, raw in enumerate(raw_messages)]
    decision_ids = {id(message) for message, is_decision in zip(messages, decisions, strict=True) if is_decision}
    chat = parse_chat(messages, is_decision=lambda message: id(message) in decision_ids)
    for step in chat.steps:
        extra = step.extra or {}
        step.model = as_text(extra.pop("model", None))
        step.extra = extra or None
        if any("parse_error" in call for call in step.tool_calls or ()):
            step.is_action_valid = False
    return raw_messages, chat


def _fill_last_step(
    output: dict[str, Any], decisions: Sequence[Any], steps: Sequence[StepRecord], resolve: _Resolve
) -> dict[str, Any]:
    """Return the fields of the sample's output that neither the last decision nor its call has.

    If the output is the last decision, it completes the step, because logs of version 1 have no events.
    """
    if not (answer := _get_answer(output)):
        return drop_empty(output, "model", "completion")
    if not decisions or _make_message_key(decisions[-1], resolve) != _make_message_key(answer, resolve):
        return drop_empty(output, "completion")
    _fill_step(steps[-1], output, resolve)
    return drop_empty({"choices": output["choices"][1:]})


def _find_input(raw_input: Any, messages: Sequence[Message], resolve: _Resolve) -> Any:
    """Return the input that the conversation does not begin with: solvers rewrite it."""
    if isinstance(raw_input, str):
        contents = [message.get("content") for message in messages if message["role"] == "user"]
        return None if resolve(raw_input) in contents else resolve(raw_input)
    if not isinstance(raw_input, list):
        return raw_input
    inputs = [_convert_message(raw, f"input[{index}]", resolve) for index, raw in enumerate(raw_input)]
    initial = [omit_fields(message, "source") for message in messages]
    return [message for message in inputs if omit_fields(message, "source") not in initial]


def _read_end(sample: _EvalSample, steps: Sequence[StepRecord]) -> dict[str, Any]:
    if sample.error is not None:
        return {"status": "failed"}
    reason = steps[-1].finish_reason if steps else None
    if sample.limit is not None and (reason := as_text(sample.limit.get("type"))) == "operator":
        return {"status": "aborted", "stop_reason": reason}
    is_cut = sample.limit is not None or reason in _CUT_REASONS
    return {"status": "truncated" if is_cut else "completed", "terminated": not is_cut, "stop_reason": reason}


def _add_score(scores: ScoreList, name: str, score: dict[str, Any], step_index: int | None) -> None:
    """Add a score, and each key of a score that is an object."""
    grade = score.get("value")
    metrics = drop_empty(score, "value", "explanation")
    if isinstance(grade, bool | str | dict | list):
        metrics["value"] = grade
    reason = score.get("explanation")
    scores.add(name, _parse_grade(grade), step_index=step_index, reason=reason, metrics=metrics)
    for key, key_grade in grade.items() if isinstance(grade, dict) else ():
        metrics = {"value": key_grade} if isinstance(key_grade, bool | str) else {}
        scores.add(f"{name}.{key}", _parse_grade(key_grade), step_index=step_index, metrics=metrics)


def _parse_grade(grade: Any) -> float | None:
    return _GRADES.get(grade) if isinstance(grade, str) else parse_number(grade)


def is_sample(name: str) -> bool:
    """Return whether an entry is a sample, or the head of a sample in chunks."""
    return bool(_SAMPLE_ENTRY.fullmatch(name) or _CHUNKED_ENTRY.fullmatch(name))


class _EvalArchive:
    def __init__(self, file: Input, source: BinaryIO) -> None:
        entries, self._fault = list_entries(file.path)
        self._file, self._source = file, source
        self._entries = {entry.name: entry for entry in entries}
        self._chunks: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for name in self._entries:
            if chunk := _CHUNK.fullmatch(name):
                self._chunks.setdefault((chunk[1], chunk[2]), []).append((int(chunk[3]), name))

    def read_header(self) -> dict[str, Any]:
        """Return the header; a growing or damaged log has only its beginning. Raises ShapeError: neither is there."""
        problems = []
        for name in filter(self._entries.__contains__, HEADERS):
            header = self._read_entry(name, 0)
            if isinstance(header, Element) and isinstance(header.value, dict):
                return header.value
            problems.append(f"{name}: {header.message if isinstance(header, Reject) else 'it is not an object'}")
        raise ShapeError("; ".join(problems) or f"the archive has neither {HEADERS[0]} nor {HEADERS[1]}")

    def read_samples(self) -> Iterator[tuple[str, Element | Reject]]:
        """Yield each sample with the name of its entry, in order; last, if the archive is cut, a reject."""
        names = list(filter(is_sample, self._entries))
        for position, name in enumerate(names):
            sample = self._read_entry(name, position)
            if isinstance(sample, Element) and isinstance(sample.value, dict) and _CHUNKED_ENTRY.fullmatch(name):
                sample = self._join_chunks(sample, name.removesuffix("/sample.json"))
            yield name, sample
        if self._fault is not None:
            reject = Reject(position=len(names), reason="truncated", message=self._fault, raw="")
            yield self._file.path.name, reject

    def _read_entry(self, name: str, position: int) -> Element | Reject:
        """Return the JSON value of an entry; the tool writes NaN for an unscored sample."""
        entry = self._entries[name]
        try:
            data = entry.read(self._source)
        except EntryError as error:
            return Reject(position=position, reason="malformed", message=str(error), raw="")
        self._file.meter.done += entry.packed
        return parse_document(position, data, constants=True)

    def _join_chunks(self, head: Element, prefix: str) -> Element | Reject:
        sample = dict(head.value)
        try:
            pool, events, texts = (self._read_sequence(head, prefix, name) for name in _SEQUENCES)
            sample["messages"] = _resolve_ranges(sample.pop("message_refs", []), pool)
            if f"{prefix}/metadata.json" in self._entries:
                sample["metadata"] = self._read_part(head, f"{prefix}/metadata.json")
        except ShapeError as error:
            return Reject(position=head.index, reason="invalid", message=str(error), raw=head.raw)
        attachments = {str(index): text for index, text in enumerate(texts)}
        sample |= {"events": events, "events_data": {"messages": pool}, "attachments": attachments}
        return msgspec.structs.replace(head, value=sample)

    def _read_sequence(self, head: Element, prefix: str, sequence: str) -> list[Any]:
        """Return a list that is in chunks. Raises ShapeError: a chunk is damaged or missing."""
        elements: list[Any] = []
        for start, name in sorted(self._chunks.get((prefix, sequence), ())):
            chunk = self._read_part(head, name)
            if start != len(elements) or not isinstance(chunk, list):
                problem = "a chunk before it is missing" if isinstance(chunk, list) else "it is not a list"
                raise ShapeError(f"{name}: {problem}; {len(elements)} items come before it")
            elements += chunk
        return elements

    def _read_part(self, head: Element, name: str) -> Any:
        entry = self._read_entry(name, head.index)
        if problem := entry.message if isinstance(entry, Reject) else entry.problem:
            raise ShapeError(f"{name}: {problem}")
        assert isinstance(entry, Element)
        head.is_plain &= entry.is_plain
        return entry.value


def _resolve_ranges(ranges: Any, pool: list[Any]) -> list[Any]:
    messages: list[Any] = []
    for span in ranges if isinstance(ranges, list) else [ranges]:
        match span:
            case [int(start), int(end)] if 0 <= start <= end <= len(pool) and len(messages) < _MAX_MESSAGES:
                messages += pool[start:end]
            case _:
                raise ShapeError(f"`message_refs` holds {span!r}; valid: ranges of the {len(pool)} messages")
    return messages


def _describes_eval(value: dict[str, Any]) -> bool:
    """Return whether `eval` describes an eval; a document that is damaged early shows all keys at one level."""
    fields = value if value["eval"] is None else as_object(value["eval"])
    return "task" in fields and bool({"run_id", "created", "model", "dataset"} & fields.keys())


def _read_document(file: Input) -> Iterator[Item]:
    fields: dict[str, Any] = {}
    header: _EvalHeader | None = None
    for item in read_object_members(file, "samples"):
        if isinstance(item, ObjectMember):
            fields[item.key] = item.value
            if item.key == "samples" and item.value is not None:
                kind = type(item.value).__name__
                yield Reject(position=0, reason="invalid", message=f"`samples` is {kind}; valid: a list", raw=kind)
            continue
        if isinstance(item, Reject):
            yield item
            continue
        try:
            header = header or _parse_header(fields)
        except (UnsupportedError, ShapeError) as error:
            yield _build_reject(error, fields)
            return
        yield from _convert_sample(item, header)


def _convert_sample(sample: Element | Reject, header: _EvalHeader) -> Iterator[Item]:
    return convert_value(sample, NAME, lambda value: [_build_record(value, header)])


def _parse_header(fields: dict[str, Any]) -> _EvalHeader:
    version = fields.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ShapeError(f"`version` is {version!r}; valid: 1 to {_NEWEST_VERSION}, before the samples")
    if version > _NEWEST_VERSION:
        raise UnsupportedError(f"the log is of version {version}; known: 1 to {_NEWEST_VERSION}")
    if not isinstance(fields.get("eval"), dict):
        kind = type(fields.get("eval")).__name__
        raise ShapeError(f"`eval` is {kind}; valid: an object that describes the eval, before the samples")
    scorer = as_object(as_object(fields.get("results")).get("scorer")).get("name")
    header = _EvalHeader(version, fields["eval"], as_object(fields.get("plan")), as_text(scorer))
    is_plain, _ = Rewriter().compare(b"", header)
    if not is_plain:
        raise ShapeError("`eval` or `plan` cannot be stored as UTF-8 JSON: half a surrogate pair, or too deep nesting")
    return header


def _build_reject(error: ValueError, fields: dict[str, Any]) -> Reject:
    reason = "unsupported" if isinstance(error, UnsupportedError) else "invalid"
    raw = {key: fields[key] for key in ("version", "status", "eval") if key in fields}
    return Reject(position=0, reason=reason, message=str(error), raw=format_record(raw))


FORMAT = Format(NAME, "Inspect logs (.eval, .json)", recognise, read, no_trajectory)
