"""MassGen session logs, `.massgen/massgen_logs/log_*/`: what agents answered and how they voted.

`coordination_events.json` tells the session: {session_metadata{user_prompt, agent_ids, start_time, end_time,
final_winner}, events[{timestamp, event_type, agent_id, details, context}]}; at first it was the list of events alone.
Beside it lie, for each answer and vote, `{agent}/{time}/answer.txt`, `vote.json` and `context.txt`, and under `final/`
what the winner presented; `snapshot_mappings.json` says which is which, else the times of the folders do.

Each agent of a session is an episode: the task is the prompt, which the agents and further sessions share; the sibling
number is made of the session's start. The log does not have calls of a model. A decision is what an agent handed in:
an answer (`new_answer`; its text is the action), a vote (a call of the tool `vote`) or the final answer. Its state is
the context that the agent was given, if that was kept, else that it was given one, and of which answers. The score
`final_winner` says whether the others' votes chose the agent. Its events, and those of the session, are spans.

Source: coordination_tracker.py and the orchestrator's snapshots of the massgen package, 0.0.2x to 0.1.97.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lake.formats.base.documents import companion, gathered, is_array, with_parts
from lake.formats.base.fields import Scores, as_object, as_text, moment, sibling_number
from lake.formats.base.format import Format, above
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, items_of, rest, values
from lake.formats.base.source import Input
from lake.formats.chat.messages import Message, conversation, tool_call
from lake.records import EpisodeRecord, Reject, SpanRecord

NAME = "massgen_logs"
_KINDS = {"new_answer": "answer", "vote_cast": "vote", "final_answer": "final_answer"}
"""Events that are decisions, and what their snapshots are called."""
_FAILED: dict[str, tuple[str, bool | None]] = {
    "agent_error": ("failed", None),
    "agent_timeout": ("truncated", False),
    "agent_cancelled": ("aborted", None),
}
_LONGEST = 64 << 20
"""Characters of an answer that are read."""


class _Event(msgspec.Struct):
    """One event."""

    event_type: str
    timestamp: float | None = None
    agent_id: str | None = None
    details: str | None = None
    context: dict[str, Any] | None = None


class _Session(msgspec.Struct):
    """What the events belong to."""

    user_prompt: str | None = None
    agent_ids: list[str] = []
    start_time: float | None = None
    end_time: float | None = None
    final_winner: str | None = None


class _Log(msgspec.Struct):
    """What has to be of its type in the file."""

    events: list[_Event]
    session_metadata: _Session = msgspec.field(default_factory=_Session)


def recognise(look: Look) -> bool:
    """Whether a file tells the events of a session."""
    if look.kind == "array":
        return look.has("timestamp", "event_type", "agent_id", "details", "context")
    return look.kind in ("object", "lines") and look.has("session_metadata", "events")


def no_trajectory(look: Look) -> str | None:
    """What the other files of a session are."""
    where = "ingest the coordination_events.json of the session"
    if look.kind == "lines" and look.has("timestamp", "event_type", "round_number", "data"):
        return f"it is what a MassGen session showed on the screen; {where}"
    if look.kind not in ("object", "lines"):
        return None
    if look.has("voter_id", "voted_for", "reason"):
        return f"it is a single vote of a MassGen session; {where}"
    if any(as_object(value).keys() >= {"type", "label", "agent_id", "path"} for value in look.first.values()):
        return f"it says where the answers of a MassGen session lie; {where}"
    return None


def read(file: Input) -> Iterator[Item]:
    """The agents of a session, or why there are none; of a file that is cut, what it holds until then."""
    folder = _Folder(file.path.parent)
    if not is_array(file.path):
        for item, _ in with_parts(file, "events"):
            yield from items_of(item, NAME, partial(to_records, folder=folder))
        return
    events = []
    for item in values(file):
        if isinstance(item, Reject):
            yield item
        else:
            events.append(item.value)
    yield from items_of(gathered({"events": events}), NAME, partial(to_records, folder=folder))


def to_records(value: Any, folder: "_Folder") -> list[EpisodeRecord]:
    """The agents of a session that handed something in.

    Raises:
        ShapeError: none did.
        msgspec.ValidationError: wrong keys or types.
    """
    log = msgspec.convert(value, _Log)
    session = log.session_metadata
    start = session.start_time if session.start_time is not None else log.events[0].timestamp if log.events else None
    name = "session" if start is None else f"session {start}"
    has_ended = session.end_time is not None or any(event.event_type == "session_end" for event in log.events)
    winner = session.final_winner
    chosen = [(event.context or {}).get("voted_for") for event in log.events if event.event_type == "vote_cast"]
    records = []
    for agent in dict.fromkeys([*session.agent_ids, *(event.agent_id for event in log.events if event.agent_id)]):
        own = [(index, event) for index, event in enumerate(log.events) if event.agent_id in (agent, None)]
        talk = _Talk(session, agent, folder)
        for index, event in own:
            talk.add(index, event)
        if not talk.decisions and winner is None:
            continue
        chat = conversation(talk.messages)
        for step, (index, extra) in zip(chat.steps, talk.decisions, strict=True):
            step.started_at, step.extra = moment(log.events[index].timestamp), extra or None
        scores = Scores()
        if winner is not None:
            scores.add("final_winner", winner == agent, metrics={"votes": chosen.count(agent)})
        status, terminated, error = _ending([event for _, event in own if event.agent_id], has_ended=has_ended)
        places = {index: step for step, (index, _) in enumerate(talk.decisions)}
        records.append(
            EpisodeRecord(
                task_id=as_text(session.user_prompt) or name,
                agent_id=agent,
                rollout_index=sibling_number(name),
                status=status,
                terminated=terminated,
                error=error,
                scores=scores.records,
                started_at=moment(start),
                ended_at=moment(session.end_time),
                initial_messages=chat.initial_messages,
                final_observation=chat.final_observation,
                steps=chat.steps,
                spans=[_span(name, index, event, value["events"][index], places.get(index)) for index, event in own],
                extra={
                    "session": rest(as_object(value.get("session_metadata")), "user_prompt"),
                    "note": folder.problem,
                },
            )
        )
    if not records:
        raise ShapeError(f"`events`: none of the {len(log.events)} events is an answer or a vote of an agent")
    return records


class _Talk:
    """What an agent was given and what it handed in, as messages."""

    def __init__(self, session: _Session, agent: str, folder: "_Folder") -> None:
        prompt = session.user_prompt
        self.messages: list[Message] = [{"role": "user", "content": prompt}] if prompt else []
        self.decisions: list[tuple[int, dict[str, Any]]] = []
        """Place of each decision's event, and what there is to say of it."""
        self._folder = folder
        self._number = session.agent_ids.index(agent) + 1 if agent in session.agent_ids else 0
        self._counts: dict[str, int] = {}

    def add(self, index: int, event: _Event) -> None:
        """One event of the agent or of the session."""
        context = event.context or {}
        if event.event_type == "context_received":
            self.messages.append({"role": "user", "content": event.details or "", "context": context})
        if event.agent_id is None or event.event_type not in _KINDS:
            return
        count = self._counts.get(event.event_type, 0)
        self._counts[event.event_type] = count + 1
        place = self._folder.snapshot(event, self._number, count)
        if (given := self._folder.text(place, "context.txt")) is not None:
            last = self.messages[-1] if self.messages else {}
            if last.get("role") == "user" and "context" in last:
                last["content"] = given
            else:
                self.messages.append({"role": "user", "content": given})
        message: Message = {"role": "assistant", "content": None}
        extra = rest(context, "reason", "answers_for_context") or {}
        if event.event_type == "vote_cast":
            about = {"voted_for": context.get("voted_for"), "reason": context.get("reason")}
            message["tool_calls"] = [tool_call("vote", about)]
            if (vote := self._folder.json(place, "vote.json")) is not None:
                extra["vote"] = vote
        else:
            text = self._folder.text(place, "answer.txt")
            if text is None:
                text = as_text(as_object(context.get("answers_for_context")).get(str(context.get("label"))))
            message["content"] = text
            extra |= {} if text is not None else {"missing": "answer.txt"}
        self.messages.append(message)
        self.decisions.append((index, extra))


class _Folder:
    """The folder of a session: the texts that its events only point to."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        mappings, self.problem = companion(path / "snapshot_mappings.json")
        self._mappings = as_object(mappings)

    def snapshot(self, event: _Event, number: int, count: int) -> Path | None:
        """Where what an agent handed in was kept: as the mappings say, else by its place among those of its kind."""
        kind, agent = _KINDS[event.event_type], event.agent_id or ""
        label = f"agent{number}.vote{count + 1}" if kind == "vote" else str((event.context or {}).get("label"))
        listed = as_text(as_object(self._mappings.get(label)).get("path"))
        try:
            if listed is not None and (place := (self._path / listed).resolve().parent).is_relative_to(self._path):
                return place
            if kind == "final_answer":
                return self._inside(self._path / "final" / agent)
            own = self._inside(self._path / agent)
            found = sorted(own.glob("*/vote.json" if kind == "vote" else "*/answer.txt")) if own is not None else []
        except (OSError, ValueError):
            return None
        return found[count].parent if count < len(found) else None

    def _inside(self, path: Path) -> Path | None:
        place = path.resolve()
        return place if place != self._path and place.is_relative_to(self._path) else None

    def text(self, place: Path | None, name: str) -> str | None:
        """A file of a snapshot as text; None if it is not there."""
        try:
            if place is None or not (place / name).is_file():
                return None
            with (place / name).open(encoding="utf-8", errors="backslashreplace") as file:
                return file.read(_LONGEST)
        except OSError:
            return None

    def json(self, place: Path | None, name: str) -> Any:
        """A file of a snapshot as JSON; None if it is not there, or is none."""
        return None if place is None else companion(place / name)[0]


def _span(name: str, index: int, event: _Event, given: Any, step: int | None) -> SpanRecord:
    return SpanRecord(
        trace_id=name,
        span_id=str(index),
        kind="coordination",
        name=event.event_type,
        step_index=step,
        started_at=moment(event.timestamp),
        attributes=given,
    )


def _ending(events: Sequence[_Event], *, has_ended: bool) -> tuple[str, bool | None, str | None]:
    """How it ended for an agent: its last failure counts, unless it handed something in afterwards."""
    last = next(
        (event for event in reversed(events) if event.event_type in _FAILED or event.event_type in _KINDS), None
    )
    if last is not None and last.event_type in _FAILED:
        status, terminated = _FAILED[last.event_type]
        return status, terminated, as_text(last.details)
    return ("completed", True, None) if has_ended else ("aborted", None, None)


FORMAT = Format(
    NAME,
    "MassGen session logs (coordination_events.json)",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    run_folder=above(r"(turn|attempt)_\d+|log_[\d_]+"),
)
