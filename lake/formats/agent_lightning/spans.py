"""agent-lightning 0.x spans: what its store keeps of rollouts, as lines, an array, or a page of its REST API.

.. code-block:: text

    span    {rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, attributes {flat names: values},
             status {status_code, description}, start_time, end_time (seconds), events, links, resource, ...}
    page    {items: [span], ...}

An episode is an attempt of a rollout: task_id is the rollout's id, because spans do not say what its input was, and
attempts are numbered as they appear. Spans of an attempt are ordered by `sequence_id`, as their clocks may differ; a
trace of the agent's client and one of the proxy may both have recorded a call: spans with the same response id are one,
and so are those in which one call contains another. Sub-agents are told from the agent as in any other trace
(`lake.formats.tracing.episodes`). Calls inside a reward span are a judge's, and no decisions.

`env_return` is the last reward, each reward a score; one that links to a response is a score of that step. All spans
are kept; what became messages or tokens is taken out of them. Which attributes say what: `agent_lightning_calls`.

Source: agent-lightning (Microsoft, MIT) 0.1 to 0.3: types/tracer.py, semconv.py, emitter/reward.py, adapter/triplet.py.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from lake.formats.agent_lightning import calls as told
from lake.formats.agent_lightning.calls import Recorded
from lake.formats.base.fields import moment, number
from lake.formats.base.format import Format, its_folder
from lake.formats.base.json_array import Element
from lake.formats.base.look import Look, look
from lake.formats.base.rows import WRONG, Item, episode_text_id, explained, items_of, members, rest, values
from lake.formats.base.source import Input
from lake.formats.chat.messages import tool_call
from lake.formats.chat.tokens import Lineage
from lake.formats.tracing.episodes import episodes
from lake.formats.tracing.tree import Call, Score, Span, Trace, traces
from lake.records import EpisodeRecord, Reject, sampling_of

NAME = "agent_lightning_spans"
_OWN = frozenset(("rollout_id", "attempt_id", "trace_id", "span_id", "parent_id", "name", "attributes", "status"))
_OWN |= {"start_time", "end_time", "resource", "context", "parent"}


class _Span(msgspec.Struct):
    rollout_id: str
    span_id: str
    name: str
    attributes: dict[str, Any]
    attempt_id: str | None = None
    trace_id: str = ""
    parent_id: str | None = None
    sequence_id: int = 0
    status: dict[str, Any] | None = None
    start_time: Any = None
    end_time: Any = None


def recognise(look: Look) -> bool:
    """Whether values are spans that belong to attempts of rollouts, or a page of them."""
    own = ("rollout_id", "attempt_id", "span_id", "attributes")
    pages = [item for value in look.objects for item in _listed(value.get("items"))[:1]]
    return look.has(*own) or any(isinstance(item, dict) and all(key in item for key in own) for item in pages)


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file; a record's position is that of its rollout's first span."""
    lost: dict[str, int] = {}
    for item in traces(_by_rollout(_spans(file), lost)):
        if isinstance(item, Reject):
            yield item
        else:
            key, found = item
            yield from items_of(found, NAME, partial(to_records, file=file, lost=lost.get(key, 0)))


def _spans(file: Input) -> Iterator[Element | Reject]:
    if look(file.path).has("items"):
        yield from (item for item in members(file, "items") if isinstance(item, Element | Reject))
    else:
        yield from values(file, by_line=True)


def _by_rollout(items: Iterable[Element | Reject], lost: dict[str, int]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Spans by rollout; those that are none are rejected alone, and counted where they name their rollout."""
    for item in items:
        if isinstance(item, Reject):
            yield item
            continue
        problem = item.problem
        try:
            if problem is None:
                span = msgspec.convert(item.value, _Span)
                _Attempt([(span, item.value)])
                yield span.rollout_id, item.index, item.value
                continue
        except WRONG as error:
            problem = explained(error)
        rollout = item.value.get("rollout_id") if isinstance(item.value, dict) else None
        if isinstance(rollout, str):
            lost[rollout] = lost.get(rollout, 0) + 1
        yield Reject(position=item.index, reason="invalid", message=problem, raw=item.raw)


def to_records(value: list[dict[str, Any]], file: Input, lost: int = 0) -> list[EpisodeRecord]:
    """The spans of a rollout: the episodes of each attempt.

    Raises:
        ShapeError: an attempt has no call that says what was said, and no reward.
    """
    attempts: dict[str, list[tuple[_Span, dict[str, Any]]]] = {}
    for given in value:
        span = msgspec.convert(given, _Span)
        attempts.setdefault(span.attempt_id or "0", []).append((span, given))
    found: list[EpisodeRecord] = []
    before: EpisodeRecord | None = None
    for number_, (name, spans) in enumerate(attempts.items()):
        records = _Attempt(spans).records(name, number_, file)
        root = records[0]
        if before is not None:
            root.relation, root.parent_episode_id = "retry", episode_text_id(before, file)
        if lost:
            root.extra = (root.extra or {}) | {"lost_spans": lost}
        before = root
        found += records
    return found


class _Attempt:
    """The spans of an attempt in their order."""

    def __init__(self, spans: list[tuple[_Span, dict[str, Any]]]) -> None:
        pairs = sorted(spans, key=lambda pair: (pair[0].sequence_id, told.seconds(pair[0].start_time) or 0.0))
        self.spans = {span.span_id: span for span, _ in pairs}
        self.given = {span.span_id: given for span, given in pairs}
        self.calls: dict[str, Recorded] = {}
        """As each span recorded it."""
        self.stands_for: dict[str, str] = {}
        """Of each span that recorded a call, the one that becomes the step."""
        resources = (given["resource"] for given in self.given.values() if given.get("resource"))
        self.resource = next(resources, None)
        self.made = {at: self._span(span, place) for place, (at, span) in enumerate(self.spans.items())}
        self._find_calls()
        self.env_return = self._judge()

    def records(self, name: str, attempt: int, file: Input) -> list[EpisodeRecord]:
        """The episode of the attempt, then those of its sub-agents."""
        first = next(iter(self.spans.values()))
        trace = Trace(
            id=first.rollout_id,
            spans=list(self.made.values()),
            task_id=first.rollout_id,
            attempt=attempt,
            extra={key: item for key, item in {"attempt_id": name, "resource": self.resource}.items() if item},
        )
        records = episodes(trace, file, NAME)
        for record in records:
            self._complete(record)
        records[0].env_return = self.env_return
        return records

    def _span(self, span: _Span, place: int) -> Span:
        given, said = self.given[span.span_id], span.attributes
        description = (span.status or {}).get("description")
        has_failed = (span.status or {}).get("status_code") == "ERROR"
        more = {key: item for key, item in (rest(given, *_OWN) or {}).items() if item not in ([], {})}
        if given.get("resource") not in (None, self.resource):
            more["resource"] = given["resource"]
        made = Span(
            id=span.span_id,
            parent=span.parent_id,
            name=span.name,
            # Their order: clocks of several machines differ. The times are told again at the end.
            start=place,
            error=None if not has_failed else description if isinstance(description, str) and description else "ERROR",
            attributes=dict(said) | more,
        )
        if told.is_reward(span.name, said):
            made.kind = "reward"
        elif (tool := told.tool_of(span.name, said)) is not None:
            made.kind, made.tool = "tool", tool
        elif (agent := told.agent_of(span.name, said)) is not None:
            made.kind, made.agent = "agent", agent
        return made

    def _find_calls(self) -> None:
        """The calls. Of the spans that recorded one, the first that tells what was said stands for it."""
        for at, span in self.spans.items():
            if told.is_call(span.name) and not self._is_judged(span):
                self.made[at].kind = "llm"
                self.calls[at] = told.recorded(self.made[at].attributes)
        by_name: dict[str, list[str]] = {}
        for at, call in self.calls.items():
            outer = self.calls.get(self.spans[at].parent_id or "")
            response = call.response_id or (outer and outer.response_id)
            by_name.setdefault(f"span {at}" if response is None else f"response {response}", []).append(at)
        for places in by_name.values():
            # What the provider has first, then who knows both sides.
            others = sorted(places, key=lambda at: (not self.calls[at].is_exact, not self.calls[at].is_whole))
            calls = [self.calls[at] for at in others]
            self.stands_for |= dict.fromkeys(places, others[0])
            found = self.made[others[0]].call = calls[0].call
            for name in ("prompt", "answers", "tools", "sampling", "model"):
                known = [value for other in calls if (value := getattr(other.call, name))]
                setattr(found, name, known[0] if known else getattr(found, name))
            calls[0].tokens = next((other.tokens for other in calls if other.tokens), None)
            self._ask(found, places)

    def _ask(self, call: Call, places: list[str]) -> None:
        """The tools that a call asks for, where they only stand in spans inside its own."""
        inside = [made for made in self.made.values() if made.tool is not None and made.parent in places]
        for made in inside:
            made.kind = "tool_call"
        if call.answers and not call.answers[0].get("tool_calls") and inside:
            asked = [tool_call(made.tool.name, made.tool.arguments, made.tool.call_id) for made in inside if made.tool]
            call.answers[0] = {**call.answers[0], "tool_calls": asked}
        for made in inside:
            made.tool = None

    def _is_judged(self, span: _Span) -> bool:
        """Whether it runs inside a reward."""
        seen: set[str] = set()
        at = span.parent_id
        while at is not None and at in self.spans and at not in seen:
            seen.add(at)
            if self.made[at].kind == "reward":
                return True
            at = self.spans[at].parent_id
        return False

    def _judge(self) -> float | None:
        """Put the rewards where they belong; the last one that is known is the attempt's."""
        last = None
        for at, span in self.spans.items():
            given = told.rewards(span.name, span.attributes)
            links = dict(told.links(span.attributes))
            linked = self._linked(links) if links else None
            for name, value in given:
                more = {"span_id": at, "links": links} if links else {"span_id": at}
                self.made[linked or at].scores.append(Score(scorer=name, value=value, metrics=more))
            known = number(given[0][1]) if given else None
            last = last if known is None else known
        return last

    def _linked(self, links: dict[str, Any]) -> str | None:
        """The call whose attributes all are as the links say."""
        for at, call in self.calls.items():
            span = self.spans[at]
            own = {"span_id": at, "trace_id": span.trace_id, "gen_ai.response.id": call.response_id, **span.attributes}
            if all(own.get(key) == value for key, value in links.items()):
                return self.stands_for[at]
        return None

    def _complete(self, record: EpisodeRecord) -> None:
        """Times and tokens."""
        lineage = Lineage()
        for index, step in enumerate(record.steps):
            at = (step.extra or {}).get("span_id")
            if at not in self.spans:
                continue
            start, end = told.seconds(self.spans[at].start_time), told.seconds(self.spans[at].end_time)
            step.started_at = moment(start)
            step.latency = end - start if start and end and end >= start else None
            if (tokens := self.calls[at].tokens) is not None:
                step.tokens = lineage.add(
                    index,
                    tokens.prompt,
                    tokens.action,
                    tokens.logprobs,
                    **sampling_of(self.calls[at].call.sampling),
                )
                step.trainable = True
        times: list[datetime] = []
        for span in record.spans:
            own = self.spans[span.span_id]
            span.trace_id = own.trace_id or span.trace_id
            span.started_at, span.ended_at = moment(told.seconds(own.start_time)), moment(told.seconds(own.end_time))
            times += [time for time in (span.started_at, span.ended_at) if time is not None]
        record.started_at, record.ended_at = min(times, default=None), max(times, default=None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


FORMAT = Format(NAME, "agent-lightning 0.x spans", recognise, read, is_whole=True, run_folder=its_folder)
