"""Codex CLI rollouts: `~/.codex/sessions/YYYY/MM/DD/rollout-TIME-ID.jsonl`, one session each.

.. code-block:: text

    {timestamp, type, payload}, type:
    session_meta        id, timestamp, cwd, cli_version, source, base_instructions, forked_from_id, git, ...
    turn_context        model, effort, policies of the calls that follow; repeated
    response_item       message (role, content), reasoning (summary, content, encrypted_content), function_call,
                        custom_tool_call, local_shell_call, web_search_call, ... and their outputs
    event_msg           what the screen shows: user_message, agent_message, agent_reasoning, token_count, task_complete,
                        turn_aborted, thread_rolled_back, exec_command_end, item_completed, ...
    compacted           message, replacement_history: from here on they are the context
    token_usage_record  usage and id of one response (0.16x); world_state, inter_agent_communication (0.14x)

Versions 0.x (`cli_version`). Until 0.34 the lines were bare: first {id, timestamp, instructions, git}, then response
items and `{"record_type": "state"}`; before that a file was one object {session, items}. Some lines have the envelope's
fields and the payload's at one level. All of these are read, and what `codex exec --json` prints
(`lake.formats.codex.stream`).

A decision is a run of model items (assistant messages, reasoning, calls) between two inputs (other messages, outputs, a
compaction, the end of a response that a token_usage_record shows). Bare files write the output of each of several
parallel calls before the next call, so there each call is a decision. run_id is the project (the last part of `cwd`,
in bare files of the environment context), task_id the session, environment `codex`.

* A turn that was taken back (thread_rolled_back) is an episode `fork`; its `parent_step_index` is the last step before
  it, whose history is not repeated.
* History that a fork copied from its parent's file is kept, its steps `is_copied_context` and not trained on. It ends
  where the ids of turns are newer than the session's, where the session says its own id again, or, in files without
  ids of turns, with the first pause of half a second. The episode is a `fork` (`forked_from_id`) or a `subagent`
  (`source`) of its parent's; the step is in the parent's file and not known here.
* Events that mirror response items are left out, their numbers in `extra.left_out`; where a file has no items, they are
  the talk. The others are spans. Usage is that of the token_count beside a decision (until 0.4x before it, later after
  it), each total once. Limits of the account are kept as the last one says them.
* Compaction: the summary is an observation, `replacement_history` with it.
* Items' ids, encrypted reasoning and metadata are in `extra.items` of the step; what a turn_context says anew in
  `extra.turn_context`.

A step's `started_at` is the time of its first item, which was complete then: calls are not timed. Bare files time
nothing but the session.
Source: rollouts of 0.25.0, 0.36.0, 0.89.0, 0.125.0 and 0.169.0, written by the tool (tests/golden/formats).
"""

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from lake import ids
from lake.formats.base.fields import moment
from lake.formats.base.format import Format, its_folder
from lake.formats.base.json_array import Member
from lake.formats.base.look import Look, look
from lake.formats.base.rows import Item, episode_text_id, members, rest
from lake.formats.base.source import Input
from lake.formats.chat.messages import Message, conversation, text_of
from lake.formats.chat.sessions import (
    Line,
    Spans,
    complete,
    count,
    elements,
    is_waiting,
    project,
    read_objects,
    session_items,
)
from lake.formats.codex.parts import Decision, Event, Meta, Part
from lake.formats.codex.rollout import ENVELOPES, Rollout
from lake.formats.codex.stream import is_streamed, unrolled
from lake.records import EpisodeRecord, Reject, StepRecord

NAME = "codex"
_CWD = re.compile(r"<cwd>([^<\n]+)</cwd>|Current working directory: ([^\n]+)")


def recognise(look: Look) -> bool:
    """Whether lines are those of a rollout, with envelopes or bare, or a document is an old one."""
    is_json = look.kind in ("lines", "object")
    return is_json and (any(map(_is_rollout, look.objects)) or _is_bare(look) or _is_document(look))


def no_trajectory(look: Look) -> str | None:
    """What a file beside the rollouts is."""
    ingest = "ingest the rollout-*.jsonl files of the folder `sessions`"
    if look.first.keys() == {"session_id", "ts", "text"}:
        return f"it is the history of prompts that Codex was given; {ingest}"
    if look.first.keys() == {"id", "thread_name", "updated_at"}:
        return f"it is the index of Codex sessions; {ingest}"
    if look.first.keys() == {"id", "msg"} or {"workdir", "sandbox", "reasoning effort"} <= look.first.keys():
        return f"it is what early versions of `codex exec --json` print; {ingest}"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1; of a document, with indices of its items from 0."""
    objects = _document(file) if _is_document(look(file.path)) else unrolled(read_objects(file))
    return session_items(objects, NAME, lambda lines, lost: _Session(Rollout(lines), file, lost).items())


def _is_rollout(value: dict[str, Any]) -> bool:
    """Whether a line is one of a rollout."""
    kind, payload = value.get("type"), value.get("payload")
    if is_streamed(value):
        return True
    if isinstance(kind, str) and isinstance(payload, dict) and "timestamp" in value:
        return kind in ENVELOPES
    if kind == "session_meta":
        return "cli_version" in value
    return value == {"record_type": "state"} or (value.keys() - {"git"} == {"id", "timestamp", "instructions"})


def _is_bare(look: Look) -> bool:
    """Whether lines are those of an old rollout with more or less in its head: then come response items."""
    is_head = {"id", "timestamp"} <= look.first.keys() and not {"type", "payload", "role"} & look.first.keys()
    items = (value for value in look.objects[1:] if "payload" not in value)
    return is_head and any(value.get("type") in ("message", "reasoning", "function_call") for value in items)


def _is_document(look: Look) -> bool:
    session = look.first.get("session")
    if look.kind != "object" or not isinstance(session, dict):
        return False
    return {"id", "timestamp", "instructions"} <= session.keys()


def _document(file: Input) -> Iterator[Line | Reject]:
    """An old file, which is one object, as lines."""
    for item in members(file, "items"):
        if isinstance(item, Member):
            if item.key == "session" and isinstance(item.value, dict):
                yield 0, item.value
        else:
            yield from elements([item])


class _Session:
    """A rollout as episodes."""

    def __init__(self, rollout: Rollout, file: Input, lost: int) -> None:
        self._rollout = rollout
        self._file = file
        self._lost = lost + len(rollout.rejects)
        first = rollout.main.entries[0] if rollout.main.entries else None
        self._meta = rollout.meta or Meta(f"unnamed-{ids.to_text(ids.text_hash(repr(first)))}")

    def items(self) -> list[Item]:
        """Rejects, and the session and each part that was taken back as an episode, parents first."""
        parts = [self._rollout.main]
        for part in parts:
            parts += [other for other in self._rollout.taken_back if other.of is part]
        records: dict[int, EpisodeRecord] = {}
        for part in parts:
            record = records[part.number] = self._record(part)
            if part.of is None:
                self._relate(record)
                record.extra = self._about()
                continue
            main = records[0]
            record.relation, record.parent_step_index = "fork", part.step
            record.parent_episode_id = self._id(records[part.of.number])
            record.root_episode_id = main.root_episode_id if main.relation is not None else self._id(main)
        return [*self._rollout.rejects, *((part.position, records[part.number]) for part in parts)]

    def _id(self, record: EpisodeRecord) -> str:
        return episode_text_id(record, self._file)

    def _about(self) -> dict[str, Any] | None:
        """What is said of the whole session and has no column."""
        rollout = self._rollout
        extra = rest(rollout.about, "id", "base_instructions", "dynamic_tools", "timestamp") or {}
        extra |= {"loose_ends": rollout.loose_ends, "left_out": dict(rollout.left_out), "lines_lost": self._lost}
        extra["rate_limits"] = rollout.limits
        return {key: value for key, value in extra.items() if value} or None

    def _record(self, part: Part) -> EpisodeRecord:
        spans = Spans(self._meta.id)
        messages: list[Message] = []
        decisions: list[Decision] = []
        acted: set[int] = set()
        ending: Event | None = None
        for entry in [*part.lead, *part.entries]:
            if isinstance(entry, Decision):
                decisions.append(entry)
                messages.append(entry.message())
                acted.add(id(messages[-1]))
            elif isinstance(entry, Event):
                spans.add(
                    entry.kind,
                    entry.name,
                    f"line {entry.number}",
                    steps=len(decisions),
                    started_at=entry.started_at,
                    error=entry.error,
                    attributes=entry.attributes,
                )
                ending = entry if entry.name in _ENDINGS else ending
            else:
                messages.append(entry)
        chat = conversation(messages, is_decision=lambda message: id(message) in acted)
        for step, decision in zip(chat.steps, decisions, strict=True):
            _complete(step, decision)
        record = EpisodeRecord(
            task_id=self._meta.id,
            steps=[],
            run_id=project(self._meta.cwd or _cwd(messages)),
            rollout_index=part.number,
            environment=NAME,
            sampling=next((found for decision in decisions if (found := _sampling(decision))), None),
            source_format=NAME,
            source_version=self._meta.cli_version,
            spans=spans.records,
        )
        record.started_at, record.ended_at = self._times(part)
        if isinstance(tools := self._rollout.about.get("dynamic_tools"), list):
            record.tools = tools
        complete(record, chat)
        _end(record, ending, is_waiting=bool(decisions) and is_waiting(chat, decisions[-1].waiting))
        return record

    def _times(self, part: Part) -> tuple[datetime | None, datetime | None]:
        if part.of is None:
            return moment(self._rollout.about.get("timestamp")) or self._rollout.started, self._rollout.ended
        found = [entry.started_at for entry in part.entries if isinstance(entry, Decision | Event) and entry.started_at]
        return (found[0], found[-1]) if found else (None, None)

    def _relate(self, record: EpisodeRecord) -> None:
        """Say which session this one came out of."""
        source = self._rollout.about.get("source")
        agent = source.get("subagent") if isinstance(source, dict) else None
        spawn = agent.get("thread_spawn") if isinstance(agent, dict) else None
        spawn = spawn if isinstance(spawn, dict) else {}
        parent = spawn.get("parent_thread_id") or self._meta.parent_thread_id or self._meta.forked_from_id
        record.relation = "subagent" if agent is not None else "fork" if parent else None
        if isinstance(parent, str) and parent != record.task_id:
            above = self._rollout.parent
            run_id = project(above.cwd) if above is not None else None
            key = EpisodeRecord(task_id=parent, steps=[], run_id=run_id or record.run_id, source_format=NAME)
            record.parent_episode_id = self._id(key)
            record.root_episode_id = record.parent_episode_id if spawn.get("depth") == 1 else None


_ENDINGS = frozenset(
    ("task_started", "turn_started", "task_complete", "turn_complete", "turn_aborted", "error", "thread_rolled_back")
)
"""Events that say whether a turn has come to its end."""


def _end(record: EpisodeRecord, ending: Event | None, *, is_waiting: bool) -> None:
    """How it ended."""
    name = ending.name if ending is not None else None
    if ending is not None and name == "error":
        record.status, record.error = "failed", ending.error
    elif ending is not None and name == "turn_aborted":
        reason = ending.attributes.get("reason")
        record.status, record.stop_reason = "aborted", reason if isinstance(reason, str) else None
    elif name in ("task_complete", "turn_complete"):
        record.terminated = True
    elif is_waiting:
        record.status = "aborted"


def _complete(step: StepRecord, decision: Decision) -> None:
    """Set what a decision's items say of its step."""
    usage = decision.usage or {}
    step.model = decision.model
    step.started_at = decision.started_at
    step.prompt_tokens = count(usage.get("input_tokens"))
    step.completion_tokens = count(usage.get("output_tokens"))
    step.is_copied_context = decision.is_copied
    step.trainable = not decision.is_copied


def _sampling(decision: Decision) -> dict[str, Any] | None:
    context = decision.extra.get("turn_context", {})
    return {"effort": context["effort"]} if context.get("effort") is not None else None


def _cwd(messages: list[Message]) -> str | None:
    """The working directory that the tool told the model."""
    for message in messages:
        if message["role"] == "user" and (found := _CWD.search(text_of(message["content"], "\n"))):
            return (found[1] or found[2]).strip()
    return None


FORMAT = Format(
    NAME, "Codex CLI rollouts (rollout-*.jsonl)", recognise, read, no_trajectory, is_whole=True, run_folder=its_folder
)
