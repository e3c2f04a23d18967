"""A trace as episodes: the calls of one agent in order are its decisions, those of a sub-agent an episode of its own.

Every call of a trace repeats the conversation: what is new to it is its context (`chat.calls`). What else is
true of a step is in its `extra`:

.. code-block:: text

    span_id        the span of the call
    follows        the step whose conversation it goes on with, where that is not the step before (agents in turns)
    history        `rewritten`: it goes on with no earlier call, and its whole prompt is its context
    not_recorded   prompt, answer: what the source did not record. Such a step is not trained on
    choices        further answers to the same prompt
    sampling       its settings, where they are not those of the episode

Results of tools are in the prompts of the calls after them. Those that no prompt repeats, because the prompt was not
recorded or no call came after, are messages made of the tools' spans.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from lake.formats.base.fields import Scores
from lake.formats.base.rows import ShapeError, episode_text_id
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.chat.calls import Calls
from lake.formats.chat.messages import Message, decision, tool_call
from lake.formats.tracing.tree import Call, Score, Span, Tool, Trace, Tree, Unit
from lake.records import EpisodeRecord, SpanRecord, StepRecord

NO_CALL = "has no call of a model"
"""Of a trace that is no agent's."""
_NEVER = 1 << 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOTHING_RECORDED = (
    "it has {n} calls of a model, and none says what was said. Record messages (for OpenTelemetry: "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true) and export again"
)
_FINISH = ("finish_reason", "stop_reason")


def episodes(trace: Trace, file: Input, name: str) -> list[EpisodeRecord]:
    """The episodes of a trace, parents before their sub-agents; `name` is the format's.

    Raises:
        ShapeError: it has no call of a model, or none that says what was said or succeeded, and no score.
    """
    tree = Tree(trace.spans)
    _check(trace, tree)
    found: dict[int, tuple[EpisodeRecord, _Episode]] = {}
    names: dict[str, int] = {}
    for unit in tree.units():
        episode = _Episode(unit, tree)
        record = episode.record(trace)
        record.source_format = name
        if unit.span is not None and unit.parent is not None:
            parent, of_parent = found[id(unit.parent)]
            agent = unit.span.agent or (unit.span.tool.name if unit.span.tool else "") or unit.span.name or "agent"
            names[agent] = names.get(agent, 0) + 1
            record.agent_id = agent if names[agent] == 1 else f"{agent} {names[agent]}"
            record.relation = "subagent"
            record.parent_episode_id = episode_text_id(parent, file)
            record.root_episode_id = parent.root_episode_id or record.parent_episode_id
            record.parent_step_index = of_parent.step_around(unit.span)
        found[id(unit)] = record, episode
    return [record for record, _ in found.values()]


def _check(trace: Trace, tree: Tree) -> None:
    """Raise what makes a trace no episode."""
    has_scores = bool(trace.scores or any(span.scores for span in tree.spans))
    if has_scores or any(span.call and span.call.is_recorded for span in tree.decisions):
        return
    if not tree.decisions and not tree.failed:
        kinds = ", ".join(sorted({span.kind for span in tree.spans})[:8])
        raise ShapeError(f"trace {trace.id!r} {NO_CALL}: its {len(tree.spans)} spans are of kind {kinds}")
    if not tree.decisions:
        message = tree.failed[-1].error
        raise ShapeError(f"all {len(tree.failed)} calls of a model in trace {trace.id!r} failed; the last: {message}")
    if not any(span.tool for span in tree.spans):
        raise ShapeError(f"trace {trace.id!r}: {_NOTHING_RECORDED.format(n=len(tree.decisions))}")


class _Episode:
    """One unit of a trace on its way to a record."""

    def __init__(self, unit: Unit, tree: Tree) -> None:
        self._unit = unit
        self._tree = tree
        self._starts = [span.start or 0 for span in unit.decisions]
        tools = [(span.start, span.tool) for span in unit.spans if span.tool and span.start is not None]
        self._tools = sorted(tools, key=lambda tool: tool[0])
        self._failed = {tool.call_id for _, tool in self._tools if tool.is_error and tool.call_id is not None}
        self._index = {span.id: index for index, span in enumerate(unit.decisions)}
        self._callers: dict[str, int] = {}
        """The step of each tool call, by the call's id."""
        self._results: set[str] = set()
        """Ids of the tool calls whose results stand in prompts."""
        self._calls = Calls()
        for index, span in enumerate(unit.decisions):
            self._add(index, span)

    def step_around(self, span: Span) -> int | None:
        """The step that led to a span: that of the tool call around it, or the last one before it."""
        at: Span | None = span
        while at is not None and at is not self._unit.span:
            if at.tool is not None and at.tool.call_id in self._callers:
                return self._callers[at.tool.call_id]
            at = self._tree.owner[at.id]
        if span.start is None:
            return None
        return max(bisect_right(self._starts, span.start) - 1, 0) if self._starts else None

    def record(self, trace: Trace) -> EpisodeRecord:
        """The record; whose sub-agent it is is not yet in it."""
        unit, steps = self._unit, self._calls.steps
        calls = [span.call for span in unit.decisions if span.call]
        error = next((span.error for span in self._tops() if span.error), None)
        times = [span.start for span in unit.spans if span.start is not None]
        ends = [span.end for span in unit.spans if span.end is not None]
        sampling = calls[0].sampling if calls else {}
        for step, call in zip(steps, calls, strict=True):
            if call.sampling != sampling:
                step.extra = (step.extra or {}) | {"sampling": call.sampling}
        extra = {"trace_id": trace.id} | (trace.extra if unit.span is None else {"span_id": unit.span.id})
        mine = {span.id for span in unit.spans}
        failed = sum(span.id in mine for span in self._tree.failed)
        more = {"failed_calls": failed, "missing_parents": self._tree.missing_parents if unit.span is None else 0}
        return EpisodeRecord(
            task_id=trace.task_id,
            rollout_index=trace.rollout_index,
            attempt=trace.attempt,
            run_id=trace.run_id,
            agent_id=trace.agent_id if unit.span is None else None,
            collection_round=trace.collection_round,
            environment=trace.environment,
            split=trace.split,
            ground_truth=trace.ground_truth if unit.span is None else None,
            source_version=trace.source_version,
            policy=calls[0].model if calls else None,
            status="failed" if error is not None else "completed",
            error=error,
            started_at=time(min(times)) if times else None,
            ended_at=time(max(ends)) if ends else None,
            prompt_tokens=_sum([call.prompt_tokens for call in calls]),
            completion_tokens=_sum([call.completion_tokens for call in calls]),
            cost=_sum([call.cost for call in calls]),
            tools=_distinct(tool for call in calls for tool in call.tools) or None,
            sampling=sampling or None,
            initial_messages=self._calls.initial_messages or None,
            steps=steps,
            final_observation=list(self._left()) or None,
            spans=[span_record(span, trace.id, self._step_of(span)) for span in unit.spans],
            scores=self._scores(trace),
            extra=extra | {key: value for key, value in more.items() if value},
        )

    def _tops(self) -> list[Span]:
        """The spans whose failure is that of the episode: the sub-agent's; or those of the trace and its last agent."""
        if self._unit.span is not None:
            return [self._unit.span]
        roots = [span for span in self._unit.spans if self._tree.parent[span.id] is None]
        agents = [s for s in self._unit.spans if s.kind == "agent" and self._tree.owner[s.id] is None]
        return [*roots, *sorted(agents, key=lambda span: span.start or 0)[-1:]]

    def _add(self, index: int, span: Span) -> None:
        """One call as a step."""
        call = span.call or Call()
        answer: Message = dict(call.answers[0]) if call.answers else {"role": "assistant", "content": None}
        finish = next((answer.pop(key) for key in _FINISH if isinstance(answer.get(key), str)), None)
        ran = self._between(index)
        if not call.answers and ran:
            answer["tool_calls"] = [tool_call(t.name, t.arguments, t.call_id) for t in ran]
        for made in answer.get("tool_calls", ()):
            if isinstance(made, dict) and isinstance(made.get("id"), str):
                self._callers.setdefault(made["id"], index)
        for message in call.prompt or ():
            if message["role"] == "tool" and message.get("tool_call_id") in self._failed:
                message.setdefault("is_error", True)
        if call.prompt is None:
            step = self._unseen(index, answer)
        else:
            step = self._calls.add(call.prompt, answer, place="the prompt")
            seen = self._calls.initial_messages if index == 0 else step.context
            self._results |= {str(m["tool_call_id"]) for m in seen if m.get("tool_call_id") is not None}
        follows = self._calls.follows[index]
        notes: dict[str, Any] = {"span_id": span.id}
        if index and call.prompt is not None and follows != index - 1:
            notes |= {"history": "rewritten"} if follows is None else {"follows": follows}
        missing = [what for what, said in (("prompt", call.prompt), ("answer", call.answers)) if not said]
        if missing:
            step.trainable = bool(call.answers)
            notes["not_recorded"] = missing
        if call.answers[1:]:
            notes["choices"] = call.answers[1:]
        if span.error is not None:
            notes["error"] = span.error
        step.extra = (step.extra or {}) | call.extra | notes
        step.model = call.model
        step.finish_reason = call.finish_reason or finish
        step.prompt_tokens, step.completion_tokens, step.cost = call.prompt_tokens, call.completion_tokens, call.cost
        step.agent_id = self._agent(span)
        step.started_at = time(span.start)
        if span.start is not None and span.end is not None and span.end >= span.start:
            step.latency = (span.end - span.start) / 1e9

    def _unseen(self, index: int, answer: Message) -> StepRecord:
        """The step of a call whose prompt is not known: of what it saw, only results of tools may be."""
        since = [_message(tool) for tool in self._between(index - 1)] if index else []
        step = decision(answer, since, is_first=index == 0)
        if not since:
            step.state = None
        self._calls.steps.append(step)
        self._calls.follows.append(None)
        return step

    def _between(self, index: int) -> list[Tool]:
        """The tools that ran after a call and before the next."""
        starts = [span.start for span in self._unit.decisions[index : index + 2]]
        if None in starts:
            return []
        begin, end = (bisect_left(self._tools, at, key=lambda tool: tool[0]) for at in (*starts, _NEVER)[:2])
        return [tool for _, tool in self._tools[begin:end]]

    def _left(self) -> Iterator[Message]:
        """Results of the tools that the last call asked for, which no call saw."""
        if not self._calls.steps:
            return
        made = [call for call in self._calls.steps[-1].tool_calls or () if isinstance(call, dict)]
        by_name: dict[str, list[str | None]] = {}
        for call in made:
            by_name.setdefault(call["function"]["name"], []).append(call.get("id"))
        ids = {call.get("id") for call in made}
        for tool in self._between(len(self._calls.steps) - 1):
            named = by_name.get(tool.name, [])
            is_asked = tool.call_id in ids if tool.call_id is not None and ids != {None} else bool(named)
            if is_asked and tool.call_id not in self._results:
                # A span that does not say which call it answers answers the only one of its name.
                only = named[0] if len(named) == 1 else None
                yield _message(tool) | ({"tool_call_id": only} if tool.call_id is None and only is not None else {})

    def _agent(self, span: Span) -> str | None:
        at: Span | None = span
        while at is not None and at.agent is None:
            at = self._tree.owner[at.id]
        return None if at is None else at.agent

    def _step_of(self, span: Span) -> int | None:
        """The step that a span belongs to."""
        inner = span.id
        while inner in self._tree.wrapped and inner not in self._index:
            inner = self._tree.wrapped[inner]
        if inner in self._index:
            return self._index[inner]
        return self.step_around(span) if span.tool is not None and self._unit.span is not span else None

    def _scores(self, trace: Trace) -> list[Any]:
        found = Scores()
        if self._unit.span is None:
            for score in trace.scores:
                _judge(found, score, None)
        for span in self._unit.spans:
            for score in span.scores:
                _judge(found, score, self._step_of(span))
        return found.records


def span_record(span: Span, trace_id: str, step_index: int | None) -> SpanRecord:
    """A span as the row that is kept of it."""
    return SpanRecord(
        trace_id=trace_id,
        span_id=span.id,
        parent_span_id=span.parent,
        kind=span.kind,
        name=span.name,
        step_index=step_index,
        started_at=time(span.start),
        ended_at=time(span.end),
        error=span.error,
        attributes=without_secrets(span.attributes) or None,
    )


def time(nanoseconds: int | None) -> datetime | None:
    """Nanoseconds since 1970 as a time; None if no calendar has it."""
    try:
        return None if nanoseconds is None else _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return None


def nanoseconds(at: datetime | None) -> int | None:
    """A time as nanoseconds since 1970."""
    return None if at is None else (at - _EPOCH) // timedelta(microseconds=1) * 1000


def _judge(scores: Scores, score: Score, step_index: int | None) -> None:
    scores.add(
        score.scorer,
        score.value,
        step_index=step_index,
        reason=score.reason,
        error=score.error,
        metrics={key: value for key, value in score.metrics.items() if value is not None},
    )


def _message(tool: Tool) -> Message:
    """What a tool gave back, as a message."""
    said: Message = {"role": "tool", "content": tool.result, "name": tool.name}
    more = {"tool_call_id": tool.call_id, "is_error": tool.is_error}
    return said | {key: value for key, value in more.items() if value is not None}


def _sum(values: list[Any]) -> Any:
    """A sum, if all of it is known."""
    return sum(values) if values and None not in values else None


def _distinct(values: Iterator[Any]) -> list[Any]:
    return list({msgspec.json.encode(value, order="deterministic"): value for value in values}.values())
