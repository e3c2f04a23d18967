"""MassGen coordination logs of 2025, `mass_coordination_*.json`: streamed text by agent, without boundaries of calls.

.. code-block:: text

    {metadata{start_time, end_time, status, logger_version, duration_seconds},
     session{question, agent_ids, final_answer}, agent_outputs{agent: [{timestamp, type, content}]},
     orchestrator_events[{timestamp, event}],
     aggregated_responses{agent: {thinking, tool_calls, presentation, other_content, ...}}, workflow_analysis}

Each agent of a session is an episode; the task is the question, which its agents and other sessions share; the sibling
number is made of the session's start. The log does not say where a call of the model ends, and its text is what the
screen showed, so all that an agent put out is one decision, which is not trained on; `extra.chunks` says when each
piece came and how long it is. The orchestrator's events are spans. `aggregated_responses` repeats the text and is kept
where it says something else.

Source: massgen/realtime_logger.py of the MassGen repository, logger_version 1.0.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import as_object, as_text, moment, sibling_number
from lake.formats.base.format import Format, its_folder
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, UnsupportedError, items_of, rest, values
from lake.formats.base.source import Input
from lake.records import EpisodeRecord, SpanRecord, StepRecord

NAME = "massgen_coordination"
_VERSIONS = ("1.0",)
_STATUSES = {"completed": "completed", "failed": "failed", "in_progress": "aborted"}


class _Chunk(msgspec.Struct):
    """A piece of what an agent put out."""

    content: str
    timestamp: str | None = None
    type: str | None = None


class _Session(msgspec.Struct):
    """What was asked, and whom."""

    question: str = ""
    agent_ids: list[str] = []


class _Log(msgspec.Struct):
    """What has to be of its type in a log."""

    session: _Session
    agent_outputs: dict[str, list[_Chunk]]
    metadata: dict[str, Any] = {}
    orchestrator_events: list[dict[str, Any]] = []


def recognise(look: Look) -> bool:
    """Whether a file is a log of this kind."""
    return look.kind in ("object", "lines") and look.has("session", "agent_outputs") and look.has("metadata")


def read(file: Input) -> Iterator[Item]:
    """The agents of a session, or why there are none."""
    for item in values(file):
        yield from items_of(item, NAME, to_records)


def to_records(value: Any) -> list[EpisodeRecord]:
    """The agents of a session that put out something.

    Raises:
        UnsupportedError: a log of a version that is not known.
        ShapeError: no agent put out anything.
        msgspec.ValidationError: wrong keys or types.
    """
    version = as_object(as_object(value).get("metadata")).get("logger_version")
    if version is not None and version not in _VERSIONS:
        known = ", ".join(_VERSIONS)
        raise UnsupportedError(f"`metadata.logger_version` is {version!r}; known: {known}. A newer tool wrote it")
    log = msgspec.convert(value, _Log)
    if not any(log.agent_outputs.values()):
        raise ShapeError(
            f"`agent_outputs`: none of the {len(log.agent_outputs)} agents of the session put out anything"
        )
    about = log.metadata
    start, status = as_text(about.get("start_time")) or "", as_text(about.get("status"))
    events = [
        SpanRecord(
            trace_id=start or "session",
            span_id=str(index),
            kind="coordination",
            name="orchestrator_event",
            started_at=moment(event.get("timestamp")),
            attributes=event,
        )
        for index, event in enumerate(log.orchestrator_events)
    ]
    left = rest(value, "agent_outputs", "orchestrator_events", "aggregated_responses") or {}
    return [
        EpisodeRecord(
            task_id=as_text(log.session.question) or f"session {start}",
            agent_id=agent or None,
            rollout_index=sibling_number(start),
            status=_STATUSES.get(status or "", "completed"),
            terminated=True if status == "completed" else None,
            stop_reason=status,
            started_at=moment(start),
            ended_at=moment(about.get("end_time")),
            source_version=version if isinstance(version, str) else None,
            initial_messages=[{"role": "user", "content": log.session.question}],
            steps=[_step(log.session.question, chunks)],
            spans=events,
            extra=left | _aggregated(value, agent, "".join(chunk.content for chunk in chunks)),
        )
        for agent, chunks in log.agent_outputs.items()
        if chunks
    ]


def _step(question: str, chunks: list[_Chunk]) -> StepRecord:
    """All that an agent put out."""
    pieces = [{"timestamp": chunk.timestamp, "type": chunk.type, "characters": len(chunk.content)} for chunk in chunks]
    return StepRecord(
        state=question,
        state_role="user",
        state_is_error=False,
        action="".join(chunk.content for chunk in chunks),
        trainable=False,
        started_at=moment(chunks[0].timestamp),
        extra={"chunks": pieces},
    )


def _aggregated(value: Any, agent: str, text: str) -> dict[str, Any]:
    """What the summaries say beside the agent's own text."""
    given = as_object(value.get("aggregated_responses"))
    own = as_object(given.get(agent))
    repeated = ("", text.strip())
    parts = {key: item for key, item in own.items() if not (isinstance(item, str) and item.strip() in repeated)}
    found = {agent: parts} | {name: said for name, said in given.items() if name not in value["agent_outputs"]}
    return {"aggregated_responses": found}


FORMAT = Format(NAME, "MassGen coordination logs of 2025", recognise, read, is_whole=True, run_folder=its_folder)
