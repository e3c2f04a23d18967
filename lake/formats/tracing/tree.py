"""Traces: spans of one run that contain one another, and which of them are the calls of which agent.

Readers of trace formats bring spans into this form; `episodes` makes episodes of them. What is said
here holds for all of them:

* A call that contains another call, with no tool and no agent between, is a wrapper that an instrumentation put around
  it (a framework around a client): the innermost of those counts that recorded what was said, and by whom.
* A call that failed and answered nothing is no decision: its client tried again, or gave up.
* A sub-agent is what runs inside a tool, or an agent inside another agent whose calls have other instructions. Agents
  side by side (a handoff, a workflow) are one episode.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from lake.formats.base.grouped import grouped
from lake.formats.base.json_array import Element, written
from lake.formats.chat.messages import INSTRUCTIONS, Message, text_of
from lake.records import Reject, excerpt

OWNERS = ("agent", "tool")
"""Kinds of spans to which the calls inside them belong."""
_UNSTORABLE = (UnicodeEncodeError, ValueError, TypeError, OverflowError, RecursionError)


class Call(msgspec.Struct, kw_only=True):
    """One call of a model."""

    prompt: list[Message] | None = None
    """None if it was not recorded."""
    answers: list[Message] = []
    """What it answered: one message, or one for each of several choices; none if it was not recorded."""
    tools: list[Any] = []
    sampling: dict[str, Any] = {}
    model: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    extra: dict[str, Any] = {}

    @property
    def is_recorded(self) -> bool:
        """Whether it is known what was said."""
        return bool(self.prompt or self.answers)

    @property
    def detail(self) -> int:
        """How much of what was said is known: nothing, the texts, or also whose they are."""
        return self.is_recorded + tells_roles(self.prompt)


class Tool(msgspec.Struct, kw_only=True):
    """One execution of a tool."""

    name: str
    call_id: str | None = None
    arguments: Any = None
    result: str | None = None
    is_error: bool | None = None


class Score(msgspec.Struct, kw_only=True):
    """A judgement; see `lake.formats.base.fields.Scores`."""

    scorer: str
    value: Any = None
    reason: Any = None
    error: Any = None
    metrics: dict[str, Any] = {}


class Span(msgspec.Struct, kw_only=True):
    """One span, or observation."""

    id: str
    parent: str | None = None
    name: str = ""
    kind: str = "span"
    """llm, tool, agent, or what its source calls it."""
    start: int | None = None
    """Nanoseconds since 1970."""
    end: int | None = None
    error: str | None = None
    attributes: dict[str, Any] = {}
    """What its source says and no message repeats."""
    call: Call | None = None
    tool: Tool | None = None
    agent: str | None = None
    """The agent that runs in it, or that it names."""
    scores: list[Score] = []


class Trace(msgspec.Struct, kw_only=True):
    """One trace."""

    id: str
    spans: list[Span]
    task_id: str
    rollout_index: int = 0
    attempt: int = 0
    run_id: str | None = None
    environment: str | None = None
    agent_id: str | None = None
    collection_round: int | None = None
    split: str | None = None
    ground_truth: Any = None
    source_version: str | None = None
    scores: list[Score] = []
    """Of the whole trace."""
    extra: dict[str, Any] = {}


class Unit(msgspec.Struct, kw_only=True):
    """What becomes one episode: the trace, or a sub-agent in it."""

    span: Span | None = None
    """The agent's or the tool's span of a sub-agent."""
    parent: "Unit | None" = None
    decisions: list[Span] = []
    """In order of their start."""
    spans: list[Span] = []


class Tree:
    """The spans of a trace by what contains them; of spans with one id the last counts."""

    def __init__(self, spans: Iterable[Span]) -> None:
        by_id = {span.id: span for span in spans}
        self.spans = _parents_first(by_id)
        self.parent: dict[str, Span | None] = {}
        """None of a root, of a span whose parent is not there, and of one in a circle."""
        self.owner: dict[str, Span | None] = {}
        """The innermost agent or tool around a span."""
        self.caller: dict[str, Span | None] = {}
        """The innermost call around a span with neither an agent nor a tool between."""
        for span in self.spans:
            found = by_id.get(span.parent) if span.parent is not None else None
            parent = self.parent[span.id] = found if found is not None and found.id in self.parent else None
            owner, caller = (None, None) if parent is None else (self.owner[parent.id], self.caller[parent.id])
            is_owned = parent is not None and parent.kind in OWNERS
            self.owner[span.id] = parent if is_owned else owner
            self.caller[span.id] = None if is_owned else parent if parent is not None and parent.call else caller
        self.missing_parents = sum(s.parent is not None and self.parent[s.id] is None for s in self.spans)
        calls = sorted((span for span in self.spans if span.call), key=_start)
        self.wrapped: dict[str, str] = {}
        """Wrappers, by their ids, and the first call in each."""
        for detail in (2, 1, 0):
            for span in calls:
                if span.call and span.call.detail == detail:
                    self._note_wrappers(span)
        kept: dict[str, Span | None] = {}
        """Of each span, the call around it that counts."""
        for span in self.spans:
            outer = self.caller[span.id]
            kept[span.id] = outer if outer is None or outer.id not in self.wrapped else kept[outer.id]
        innermost = [span for span in calls if span.id not in self.wrapped and kept[span.id] is None]
        self.failed = [span for span in innermost if _has_failed(span)]
        self.decisions = [span for span in innermost if not _has_failed(span)]

    def _note_wrappers(self, span: Span) -> None:
        """The calls around a call that count less: not those that alone recorded what was said, or alone succeeded."""
        outer = self.caller[span.id]
        while outer is not None and outer.call is not None and outer.id not in self.wrapped:
            says_less = span.call is not None and span.call.detail < outer.call.detail
            if says_less or (_has_failed(span) and not _has_failed(outer)):
                return
            self.wrapped[outer.id] = span.id
            outer = self.caller[outer.id]

    def units(self) -> list[Unit]:
        """The trace and its sub-agents, parents before children."""
        owned: dict[str | None, list[Span]] = {}
        for span in self.decisions:
            owner = self.owner[span.id]
            owned.setdefault(owner.id if owner else None, []).append(span)
        trace = Unit()
        units = [trace]
        inside: dict[str, Unit] = {}
        """Of each span, the unit of what runs in it."""
        above: dict[str, tuple[bool, list[Span] | None, str]] = {}
        """Of each agent and tool: whether a tool stands between it and the calls around it, those, and whose."""
        for span in self.spans:
            parent = self.parent[span.id]
            unit = trace if parent is None else inside[parent.id]
            if span.kind in OWNERS:
                above[span.id] = self._above(span, owned, above)
                if (own := owned.get(span.id)) and _is_other(span, own[0], *above[span.id]):
                    outer, unit = unit, Unit(span=span, parent=unit)
                    units.append(unit)
                    # A tool is executed for the agent outside, also if an agent runs in it.
                    (unit if span.kind == "agent" else outer).spans.append(span)
                    inside[span.id] = unit
                    continue
            inside[span.id] = unit
            unit.spans.append(span)
        for span in self.decisions:
            inside[span.id].decisions.append(span)
        return units

    def _above(
        self, span: Span, owned: dict[str | None, list[Span]], above: dict[str, tuple[bool, list[Span] | None, str]]
    ) -> tuple[bool, list[Span] | None, str]:
        outer = self.owner[span.id]
        is_tool = span.kind == "tool"
        if outer is None:
            return is_tool, owned.get(None), "trace"
        if outer.id in owned:
            return is_tool, owned[outer.id], outer.kind
        through, calls, whose = above[outer.id]
        return is_tool or through, calls, whose


def traces(items: Iterable[tuple[str, int, Any] | Reject]) -> Iterator[tuple[str, Element] | Reject]:
    """Pieces of traces (id, place in the file, value) by trace, in the order in which each appears first.

    The value of an element is the list of a trace's pieces. Rejects come at the place where they stand.
    """
    pieces = _decoded_pieces(items)
    for key, texts in grouped(pieces):
        if key.startswith("\0"):
            yield msgspec.json.decode(texts[0], type=Reject)
            continue
        found = [msgspec.json.decode(text) for text in texts]
        values = [value for _, value in found]
        yield key, Element(found[0][0], values, source=None)


def _decoded_pieces(items: Iterable[tuple[str, int, Any] | Reject]) -> Iterator[tuple[str, bytes]]:
    for number, item in enumerate(items):
        if isinstance(item, Reject):
            yield f"\0{number}", msgspec.json.encode(item)
            continue
        key, position, value = item
        try:
            yield key, msgspec.json.encode((position, value))
        except _UNSTORABLE as error:
            message = f"a span of trace {key!r} cannot be stored as UTF-8 JSON: {error}"
            found = Reject(position=position, reason="invalid", message=excerpt(message), raw=excerpt(written(value)))
            yield f"\0{number}", msgspec.json.encode(found)


def tells_roles(messages: list[Message] | None) -> bool:
    """Whether messages are not all the user's, as texts are whose roles were not recorded."""
    return any(message["role"] != "user" for message in messages or ())


def _is_other(span: Span, first: Span, through_tool: bool, above: list[Span] | None, whose: str) -> bool:
    """Whether an agent's or a tool's calls are those of another agent than the calls around it, for certain."""
    if not above:
        return False
    prompt = (first.call and first.call.prompt) or []
    outer = (above[0].call and above[0].call.prompt) or []
    if through_tool:
        # The same conversation goes on: spans that are nested by mistake.
        return not (outer and len(prompt) > len(outer) and prompt[: len(outer)] == outer)
    return span.kind == whose == "agent" and bool(prompt and outer) and _instructions(prompt) != _instructions(outer)


def _instructions(messages: list[Message]) -> list[str]:
    return [text_of(message.get("content"), "\n") for message in messages if message["role"] in INSTRUCTIONS]


def _parents_first(by_id: dict[str, Span]) -> list[Span]:
    children: dict[str, list[Span]] = {}
    for span in by_id.values():
        if span.parent is not None and span.parent in by_id:
            children.setdefault(span.parent, []).append(span)
    roots = [span for span in by_id.values() if span.parent is None or span.parent not in by_id]
    found: dict[str, Span] = {}
    # What no root leads to contains itself: one of each circle is taken for a root.
    for root in (*roots, *by_id.values()):
        waiting = [root]
        while waiting:
            span = waiting.pop()
            if span.id not in found:
                found[span.id] = span
                waiting += reversed(children.get(span.id, ()))
    return list(found.values())


def _has_failed(span: Span) -> bool:
    return span.error is not None and span.call is not None and not span.call.answers


def _start(span: Span) -> tuple[bool, int]:
    return span.start is None, span.start or 0
