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

Files: versions 0.x (`cli_version`). Until 0.34 the lines were bare: first {id, timestamp, instructions, git}, then
response items and `{"record_type": "state"}`. Before that a file was one object {session, items}. Some lines have the
envelope's fields and the payload's at one level. The output of `codex exec --json` is converted to such lines first:
thread.started, turn.started, turn.completed, turn.failed, error, and item.{started,updated,completed} {item {id, type,
...}}. The prompt is not there. A call begins where its item begins, so that the calls of one response stay together,
and its output is what its completed item adds. Usage covers a turn and stays with the turn's end.

Episode: a session. run_id is the project (the last part of `cwd`, in bare files of the environment context), task_id
the session, environment `codex`.

* A turn that was rolled back (thread_rolled_back) is an episode `fork`; its `parent_step_index` is the last step before
  it, whose history is not repeated.
* History that a fork copied from its parent's file stays, with `is_copied_context` on its steps. It begins with the
  parent's metadata, or at once in a file of 0.14x that names a parent and has ids of turns. It ends at the first turn
  whose id is newer than the session's, or at the session's repeated id. In files without turn ids it ends with the
  first pause of half a second; without the parent's metadata too, it is the decisions with which the parent's file in
  the same folder begins. The episode is a `fork` (`forked_from_id`) or a `subagent` (`source`) of its parent's.

Step: a run of model items (assistant messages, reasoning, calls) between two inputs (other messages, outputs, a
compaction, the end of a response that a token_usage_record shows). Bare files write the output of each of several
parallel calls before the next call, so there each call is a step. `started_at` is the time of the first item, which was
complete then. Bare files give only the time of the session.

* Events that mirror response items are skipped, with their numbers in `extra.left_out`; in a file without items they
  are the conversation. Other events are spans. Usage comes from the token_count next to a decision (until 0.4x before
  it, later after it), each total once.
* Compaction: the summary is an observation, `replacement_history` with it. The next step opens a context.

Reward: none. Refused: lines of a wrong shape, newer major versions, histories, indices and early `exec` output.

Source: rollouts of 0.25.0, 0.36.0, 0.89.0, 0.125.0 and 0.169.0, written by the tool (tests/golden/formats).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lake import ids
from lake.formats.base.fields import as_object, parse_time
from lake.formats.base.format import FileHead, Format, Item, get_parent_folder, read_head
from lake.formats.base.json_array import ObjectMember
from lake.formats.base.rows import ShapeError, UnsupportedError, make_episode_text_id, omit_fields, read_object_members
from lake.formats.base.source import Input
from lake.formats.chat.messages import Message, join_text, make_tool_call, parse_chat
from lake.formats.chat.sessions import (
    FieldChanges,
    Line,
    SpanList,
    build_line_reject,
    build_session,
    check_version,
    get_project_name,
    is_content,
    is_waiting,
    open_contexts,
    order_results,
    parse_token_count,
    read_objects,
    select_objects,
    set_chat_fields,
)
from lake.records import EpisodeRecord, Reject

NAME = "codex"
NEWEST_VERSION = 0
"""The newest known major version of the tool."""
ENVELOPES = frozenset(("session_meta", "turn_context", "response_item", "event_msg", "compacted"))
_CALL_ARGUMENT_KEYS = {"custom_tool_call": "input", "image_generation_call": "revised_prompt"}
_CALL_ARGUMENT_KEYS |= {"local_shell_call": "action", "web_search_call": "action"}
"""The key of a call's arguments by its type, else `arguments`. A call without a name is named like its type."""
_SERVER_CALLS = frozenset(("web_search_call", "image_generation_call"))
"""Calls that the API runs inside the response: no output follows."""
_MIRROR_EVENTS = frozenset(("user_message", "agent_message", "agent_reasoning", "agent_reasoning_raw_content"))
_MIRRORED_ITEMS = frozenset(("UserMessage", "AgentMessage", "Reasoning"))
CLIENT_TEXT = re.compile(
    r"\s*(?:# AGENTS\.md|<(?:environment_context|user_instructions|turn_aborted|subagent_notification|skill|"
    r"user_shell_command)\b)"
)
"""Beginnings of messages that the tool writes in the person's name."""
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME = len("01a2064c-a34f")
"""Characters of the time of creation, with which a UUID7 begins."""
_SESSION_NAME = re.compile(r"[\w-]{1,100}")
_PASSED_FIELDS = "internal_chat_message_metadata_passthrough"
_PAUSE = 0.5
"""Seconds between the copied lines and the lines after them."""
_CWD = re.compile(r"<cwd>([^<\n]+)</cwd>|Current working directory: ([^\n]+)")
_COMPLETED = ("task_complete", "turn_complete")
_ENDINGS = ("task_started", "turn_started", *_COMPLETED, "turn_aborted", "error", "thread_rolled_back")
"""Events that show whether a turn has ended."""
_TURN_EVENTS = {"turn.started": "task_started", "turn.completed": "task_complete"}
_STREAM_EVENTS = frozenset((*_TURN_EVENTS, "thread.started", "turn.failed", "error"))
_STREAM_ITEMS = frozenset(("item.started", "item.updated", "item.completed"))
_ARGUMENT_KEYS = frozenset(("command", "arguments", "server", "tool", "changes", "query", "items", "prompt"))
"""Keys of a call's arguments; the other keys of its item are its output."""


def recognise(look: FileHead) -> bool:
    """Return whether lines belong to a rollout, with envelopes or bare, or a document is an old rollout."""
    if look.kind not in ("lines", "object"):
        return False
    if any(map(_is_rollout_line, look.objects)) or _is_document(look):
        return True
    # An old rollout is a head, perhaps with other fields, and then response items.
    is_head = {"id", "timestamp"} <= look.first.keys() and not {"type", "payload", "role"} & look.first.keys()
    items = (value for value in look.objects[1:] if "payload" not in value)
    return is_head and any(value.get("type") in ("message", "reasoning", "function_call") for value in items)


def no_trajectory(look: FileHead) -> str | None:
    """Name the tool's files that hold no conversation."""
    ingest = "ingest the rollout-*.jsonl files of the folder `sessions`"
    if look.first.keys() == {"session_id", "ts", "text"}:
        return f"it is the history of prompts that Codex was given; {ingest}"
    if look.first.keys() == {"id", "thread_name", "updated_at"}:
        return f"it is the index of Codex sessions; {ingest}"
    if look.first.keys() == {"id", "msg"} or {"workdir", "sandbox", "reasoning effort"} <= look.first.keys():
        return f"it is the output of `codex exec --json` of an early version; {ingest}"
    return None


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file: lines from 1, or items of a document from 0."""
    objects = _read_document(file) if _is_document(read_head(file.path)) else _convert_stream(read_objects(file))
    return build_session(objects, NAME, lambda lines, lost: _CodexSession(lines, file, lost).build_items())


class _SessionMeta(msgspec.Struct):
    id: str
    cwd: str | None = None
    cli_version: str | None = None
    forked_from_id: str | None = None
    parent_thread_id: str | None = None
    source: Any = None

    def read_spawn(self) -> dict[str, Any] | None:
        """Return what started a sub-agent; None for another session."""
        agent = as_object(self.source).get("subagent")
        return None if agent is None else as_object(as_object(agent).get("thread_spawn"))

    def find_parent(self) -> str | None:
        """Return the id of the session that it came from."""
        spawn = self.read_spawn() or {}
        parent = spawn.get("parent_thread_id") or self.parent_thread_id or self.forked_from_id
        return parent if isinstance(parent, str) and parent != self.id else None


class _LineOrigin(NamedTuple):
    number: int
    time: datetime | None
    timestamp: Any
    """As the line spells it."""


class CodexDecision(msgspec.Struct):
    """A run of model items."""

    started_at: datetime | None
    model: str | None
    is_copied: bool
    content: list[Any] = []
    thoughts: list[str] = []
    summaries: list[str] = []
    calls: list[dict[str, Any]] = []
    waiting: list[str] = []
    """Calls whose output is still missing."""
    items: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    usage: dict[str, Any] | None = None

    def build_message(self) -> Message:
        """Return the decision as a message."""
        extra = self.extra | {"items": self.items or None, "usage": self.usage}
        if self.thoughts and self.summaries:
            extra["reasoning_summary"] = "\n\n".join(self.summaries)
        return extra | {
            "role": "assistant",
            "content": self.content,
            "tool_calls": self.calls or None,
            "reasoning_content": "\n\n".join(self.thoughts or self.summaries) or None,
        }


class CodexEvent(msgspec.Struct):
    """An event that is not a message, and the number of its line."""

    kind: str
    name: str
    number: int
    started_at: datetime | None
    error: str | None
    attributes: dict[str, Any]


Entry = dict[str, Any] | CodexDecision | CodexEvent


class RolloutSegment(msgspec.Struct):
    """The session, or turns that were rolled back."""

    position: int
    entries: list[Entry] = []
    parent: "RolloutSegment | None" = None
    """The segment that it was cut from."""
    cut: int = 0
    """How many entries of the parent come before it."""
    number: int = 0

    @property
    def before(self) -> list[Entry]:
        """The entries of the parent before it."""
        return self.parent.entries[: self.cut] if self.parent is not None else []

    @property
    def lead(self) -> list[Entry]:
        """The messages since the last step before it."""
        messages: list[Entry] = []
        for entry in reversed(self.before):
            if isinstance(entry, CodexDecision):
                return messages[::-1]
            if isinstance(entry, dict):
                messages.append(entry)
        return (self.parent.lead if self.parent is not None else []) + messages[::-1]


class _ResponseItem(msgspec.Struct):
    type: str
    role: str | None = None
    summary: list[dict[str, Any]] | None = None
    name: str | None = None
    call_id: str | None = None
    id: str | None = None


class CodexRollout:
    """The lines of a file as entries: messages, decisions and events."""

    def __init__(self, lines: list[Line]) -> None:
        self.main = RolloutSegment(lines[0][0])
        self.rollbacks: list[RolloutSegment] = []
        self.meta: _SessionMeta | None = None
        self.meta_fields: dict[str, Any] = {}
        self.parent_meta: _SessionMeta | None = None
        """Metadata of the session whose history was copied."""
        self.started_at: datetime | None = None
        self.ended_at: datetime | None = None
        self.rate_limits: Any = None
        self.loose_ends: list[Message] = []
        self.skipped_counts: Counter[str] = Counter()
        self.rejects: list[Reject] = []
        self._is_copying = False
        self.has_turns = any(_UUID7.fullmatch(turn) for _, value in lines if (turn := _get_turn(value)) is not None)
        self._turns: list[tuple[int, int]] = []
        """The entry and the line with which each turn begins."""
        self._current: CodexDecision | None = None
        self._last_decision: CodexDecision | None = None
        self._tools: dict[str, str] = {}
        """The tool's name of each call."""
        self._total_usage: Any = None
        self._waiting: dict[str, Any] | None = None
        """Usage that arrived before its decision."""
        self._is_after = False
        """Whether usage comes after its decision."""
        self._has_records = False
        self._context: dict[str, Any] = {}
        """New fields of turn_contexts since the last decision."""
        self._field_changes = FieldChanges()
        # In a bare file an item has no envelope.
        self._has_items = any(
            value.get("type") == "response_item" or "role" in value or "call_id" in value for _, value in lines
        )
        for line in lines:
            try:
                self._read_line(line)
            except UnsupportedError:
                raise
            except (msgspec.MsgspecError, ShapeError) as error:
                self.rejects.append(build_line_reject(line, str(error)))

    def mark_copies(self, parent: list[int]) -> None:
        """Mark the decisions as copied with which a parent's chat begins too."""
        for (key, entry), original in zip(_hash_chat(self.main.entries), parent, strict=False):
            if key != original:
                return
            if isinstance(entry, CodexDecision):
                entry.is_copied = True

    def _read_line(self, line: Line) -> None:
        value = line[1]
        kind, payload = value.get("type"), value.get("payload")
        raw = payload if payload is not None else omit_fields(value, "type", "timestamp")
        is_bare_meta = kind is None and "id" in value and "timestamp" in value
        kind, raw = ("session_meta", value) if is_bare_meta else (kind, raw)
        origin = _LineOrigin(line[0], parse_time(value.get("timestamp")), value.get("timestamp"))
        self._end_copy(origin.time, _get_turn(value))
        if value.get("record_type") == "state":
            self.skipped_counts["state"] += 1
        elif not isinstance(kind, str):
            raise ShapeError(f"`type` is {kind!r}; valid: session_meta, response_item, event_msg, turn_context, ...")
        elif kind not in ENVELOPES and not isinstance(payload, dict):
            self._read_item(omit_fields(value, "timestamp") or {}, origin)
        elif not isinstance(raw, dict):
            raise ShapeError(f"`payload` is {type(raw).__name__}; valid: an object")
        elif kind == "response_item":
            envelope = omit_fields(value, "timestamp", "type", "payload", "ordinal")
            self._read_item(raw | envelope if envelope else raw, origin)
        elif kind == "event_msg":
            self._read_event(raw, origin)
        elif kind == "turn_context":
            self._context |= self._field_changes.select_new(raw, frozenset())
        elif kind == "session_meta":
            self._read_meta(raw)
        elif kind == "compacted":
            self._add_summary(raw, origin)
        elif kind == "token_usage_record":
            self._has_records, self._current = True, None
            if self._last_decision is not None and isinstance(usage := raw.get("usage"), dict):
                self._last_decision.usage = usage
                self._last_decision.extra["response_id"] = raw.get("response_id")
        else:
            self._add_event(kind, str(raw.get("type", kind)), raw, origin)
        self.ended_at = origin.time or self.ended_at
        self.started_at = self.started_at or origin.time

    def _read_meta(self, payload: dict[str, Any]) -> None:
        """Read a session's metadata, of this session or of one whose history was copied."""
        meta = msgspec.convert(payload, _SessionMeta)
        if self.meta is None:
            check_version(meta.cli_version, NEWEST_VERSION, "Codex")
            self.meta, self.meta_fields = meta, payload
            is_uuid = _UUID7.fullmatch(meta.id) is not None
            self._is_copying = self.has_turns and is_uuid and meta.find_parent() is not None
            if isinstance(text := as_object(payload.get("base_instructions")).get("text"), str):
                self.main.entries.append({"role": "system", "content": text})
        elif meta.id == self.meta.id:
            self._is_copying = False
        else:
            self._is_copying, self.parent_meta = True, self.parent_meta or meta

    def _end_copy(self, time: datetime | None, turn: str | None) -> None:
        """End the copied history at a turn that is newer than the session, or without ids of turns at a pause."""
        session = self.meta.id if self.meta is not None else ""
        if self.has_turns and _UUID7.fullmatch(session):
            is_new = turn is not None and _UUID7.fullmatch(turn) is not None and turn[:_TIME] >= session[:_TIME]
            self._is_copying = self._is_copying and not is_new
        elif self._is_copying and time is not None and self.ended_at is not None:
            start = parse_time(self.meta_fields.get("timestamp"))
            is_older = start is not None and time < start  # some copies keep their times
            self._is_copying = is_older or (time - self.ended_at).total_seconds() < _PAUSE

    def _read_item(self, payload: dict[str, Any], origin: _LineOrigin) -> None:
        """Read a response item."""
        item = msgspec.convert(payload, _ResponseItem)
        content = payload.get("content")
        if not is_content(content):
            raise ShapeError(f"`content` of a {item.type} is of the wrong type; valid: text, a list of parts, or null")
        if item.type == "message" and item.role == "assistant":
            self._extend_decision(payload, origin, "role", "content").content += _convert_parts(content)
        elif item.type == "reasoning":
            decision = self._extend_decision(payload, origin, "content", "summary")
            decision.thoughts += _list_texts(content)
            decision.summaries += _list_texts(item.summary)
        elif item.type.endswith("_call"):
            self._add_call(item, payload, origin)
        elif item.type.endswith("_output"):
            output = payload.get("output")
            message: Message = {"role": "tool", "tool_call_id": item.call_id}
            message |= {"name": name} if (name := self._tools.get(item.call_id or "")) is not None else {}
            if isinstance(output, dict):
                message |= {"is_error": not success} if isinstance(success := output.get("success"), bool) else {}
                output = output.get("content")
            if not is_content(output):
                raise ShapeError(
                    "`output` is of the wrong type; valid: text, a list of parts, or an object with `content`"
                )
            message |= {"content": output}
            self._add_observation(message, payload, origin, "type", "call_id", "output", "name")
        elif item.type == "message":
            role = item.role or "user"
            if role == "user" and CLIENT_TEXT.match(join_text(content, "\n")) is None:
                self._turns.append((len(self.main.entries), origin.number))
            self._add_observation({"role": role, "content": _simplify_content(content)}, payload, origin, "type")
        elif "compaction" in item.type or item.type == "agent_message":
            self._add_observation({"role": "user", "content": _simplify_content(content)}, payload, origin)
        else:
            self._add_event("response_item", item.type, payload, origin)

    def _extend_decision(self, payload: dict[str, Any], origin: _LineOrigin, *mapped_keys: str) -> CodexDecision:
        """Add an item to the current decision, or to a new one, and return it."""
        if self._current is None:
            model = self._field_changes.last.get("model")
            self._current = CodexDecision(origin.time, model if isinstance(model, str) else None, self._is_copying)
            self._current.usage, self._waiting = self._waiting, None
            if self._context:
                self._current.extra["turn_context"], self._context = self._context, {}
            self._last_decision = self._current
            self.main.entries.append(self._current)
        if fields := omit_fields(payload, "type", *mapped_keys):
            self._current.items.append({"type": payload["type"]} | fields)
        return self._current

    def _add_call(self, item: _ResponseItem, payload: dict[str, Any], origin: _LineOrigin) -> None:
        key = _CALL_ARGUMENT_KEYS.get(item.type, "arguments")
        name = item.name or item.type.removesuffix("_call")
        call_id = item.call_id or item.id
        decision = self._extend_decision(payload, origin, "name", "call_id", key)
        decision.calls.append(make_tool_call(name, payload.get(key), call_id))
        if call_id is not None:
            self._tools[call_id] = name
            decision.waiting += [] if item.type in _SERVER_CALLS else [call_id]

    def _add_observation(self, message: Message, payload: dict[str, Any], origin: _LineOrigin, *keys: str) -> None:
        """Add a message that the model did not write."""
        self._current = None
        timestamp = {"timestamp": origin.timestamp} if origin.time is not None else {}
        self.main.entries.append((omit_fields(payload, *keys) or {}) | message | timestamp)

    def _add_summary(self, payload: dict[str, Any], origin: _LineOrigin) -> None:
        """Add the summary that replaces the context."""
        self._waiting = None  # the usage of the call that wrote the summary
        summary, history = payload.get("message"), payload.get("replacement_history")
        if not (isinstance(summary, str) and summary) and isinstance(history, list):
            users = [item for item in history if as_object(item).get("role") == "user"]
            texts = [join_text(item.get("content"), "\n") for item in users if is_content(item.get("content"))]
            summary = texts[-1] if texts else None
        content = summary if isinstance(summary, str) else None
        self._add_observation({"role": "user", "content": content, "compacted": True}, payload, origin, "message")

    def _read_event(self, payload: dict[str, Any], origin: _LineOrigin) -> None:
        """Read an event of the screen."""
        kind, item = payload.get("type"), payload.get("item")
        if not isinstance(kind, str):
            raise ShapeError(f"`payload.type` is {kind!r}; valid: the name of an event")
        name = str(item.get("type", kind)) if isinstance(item, dict) else kind
        if kind in _MIRROR_EVENTS and not self._has_items:
            text = payload.get("message", payload.get("text"))
            message = {"type": "message", "role": "user" if kind == "user_message" else "assistant", "content": text}
            reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
            self._read_item(reasoning if kind.startswith("agent_reasoning") else message, origin)
            return
        if kind in _MIRROR_EVENTS or kind == "token_count" or (kind == "item_completed" and name in _MIRRORED_ITEMS):
            self.skipped_counts[kind if name == kind else f"{kind} {name}"] += 1
            if kind == "token_count":
                self._read_usage(payload)
            return
        self._add_event("event_msg" if name == kind else kind, name, payload, origin)
        if kind == "thread_rolled_back":
            self._roll_back(parse_token_count(payload.get("num_turns")) or 0)

    def _add_event(self, kind: str, name: str, payload: dict[str, Any], origin: _LineOrigin) -> None:
        """Add an event that is not a message."""
        message = payload.get("message")
        error = message if name in ("error", "stream_error") and isinstance(message, str) else None
        attributes = {key: value for key, value in payload.items() if key != "type"}
        self.main.entries.append(CodexEvent(kind, name, origin.number, origin.time, error, attributes))

    def _read_usage(self, payload: dict[str, Any]) -> None:
        """Read the usage of one response: of the decision before it, or of the next one."""
        self.rate_limits = payload.get("rate_limits") or self.rate_limits
        info = as_object(payload.get("info"))
        usage, total = info.get("last_token_usage"), info.get("total_token_usage")
        if self._has_records or not isinstance(usage, dict) or total == self._total_usage:
            return
        self._total_usage = total
        if self._last_decision is not None and self._last_decision.usage is None:
            self._last_decision.usage, self._is_after = usage, True
        elif not self._is_after:
            self._waiting = usage

    def _roll_back(self, turns: int) -> None:
        """Move the last turns into a separate segment."""
        turns = min(turns, len(self._turns))
        if turns == 0:
            return
        cut, number = self._turns[-turns]
        del self._turns[-turns:]
        *entries, note = self.main.entries[cut:]
        self.main.entries[cut:] = [note]
        self._current = self._last_decision = None
        self._field_changes, self._context = FieldChanges(), {}
        if not any(isinstance(entry, CodexDecision) for entry in entries):
            self.loose_ends += [entry for entry in entries if isinstance(entry, dict)]
            return
        segment = RolloutSegment(number, entries, self.main, cut, len(self.rollbacks) + 1)
        for earlier in self.rollbacks:
            if earlier.parent is self.main and earlier.cut > cut:
                earlier.parent, earlier.cut = segment, earlier.cut - cut
        self.rollbacks.append(segment)


def _is_stream_line(value: dict[str, Any]) -> bool:
    """Return whether a line belongs to the output of `codex exec --json`."""
    kind = value.get("type")
    if kind == "thread.started":
        return isinstance(value.get("thread_id"), str)
    return isinstance(kind, str) and kind in _STREAM_ITEMS and isinstance(as_object(value.get("item")).get("type"), str)


def _convert_stream(lines: Iterable[Line | Reject]) -> Iterator[Line | Reject]:
    """Yield lines, with those of a stream as a rollout has them."""
    calls: dict[str, dict[str, Any]] = {}
    for line in lines:
        kind = None if isinstance(line, Reject) else line[1].get("type")
        if isinstance(line, Reject) or not isinstance(kind, str) or "payload" in line[1]:
            yield line
        elif kind in _STREAM_ITEMS and isinstance(item := line[1].get("item"), dict):
            is_done = kind == "item.completed"
            yield from ((line[0], value) for value in _convert_item(item, calls, is_done=is_done))
        else:
            yield (line[0], _convert_event(kind, line[1])) if kind in _STREAM_EVENTS else line


def _convert_event(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    fields = omit_fields(value, "type") or {}
    if kind == "thread.started":
        return {
            "type": "session_meta",
            "payload": (omit_fields(fields, "thread_id") or {}) | {"id": value.get("thread_id")},
        }
    if kind in _TURN_EVENTS:
        return {"type": "event_msg", "payload": fields | {"type": _TURN_EVENTS[kind]}}
    error = value.get("error")
    message = (error if isinstance(error, dict) else value).get("message")
    return {"type": "event_msg", "payload": fields | {"type": "error", "message": message}}


def _convert_item(item: dict[str, Any], calls: dict[str, dict[str, Any]], *, is_done: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of an item; `calls` has the arguments of each open call."""
    kind, name = item.get("type"), str(item.get("id"))
    if kind in ("agent_message", "reasoning", "user_message"):
        fields: dict[str, Any] = {"summary": [{"type": "summary_text", "text": item.get("text")}]}
        if kind != "reasoning":
            role, content = "user" if kind == "user_message" else "assistant", item.get("content", item.get("text"))
            fields = {"type": "message", "role": role, "content": content}
        if is_done:
            yield _wrap_item((omit_fields(item, "text") or {}) | fields)
        return
    if kind == "error" or not isinstance(kind, str):
        yield {"type": "event_msg", "payload": (omit_fields(item, "type") or {}) | {"type": "item_error"}}
        return
    arguments = {key: value for key, value in item.items() if key in _ARGUMENT_KEYS}
    if name not in calls or (kind == "todo_list" and calls[name] != arguments):
        calls[name] = arguments
        yield _wrap_item({"type": "function_call", "name": kind, "call_id": name, "arguments": arguments})
    if is_done:
        arguments = calls.pop(name)
        fields = {key: field for key, field in item.items() if arguments.get(key) != field}
        text = fields.get("aggregated_output")
        if not isinstance(text, str):  # not a command: all fields as JSON text
            text = msgspec.json.encode(omit_fields(fields, "id", "type", "status") or {}).decode()
        is_success = fields.get("status") != "failed" and fields.get("exit_code") in (None, 0)
        output = {"call_id": str(fields.get("id")), "output": {"content": text, "success": is_success}}
        fields = omit_fields(fields, "id", "type", "aggregated_output") or {}
        yield _wrap_item(fields | {"type": "function_call_output"} | output)


def _wrap_item(payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response_item", "payload": payload}


def _hash_chat(entries: list[Entry]) -> Iterator[tuple[int, Entry]]:
    """Yield the decisions and what a person or a tool wrote, with hashes that stay the same in a copy."""
    for entry in entries:
        if isinstance(entry, CodexDecision):
            content: tuple[Any, ...] = (entry.content, entry.thoughts, entry.summaries, entry.calls)
        elif isinstance(entry, dict) and entry["role"] in ("user", "tool"):
            content = (entry["role"], entry["content"])
        else:
            continue
        yield ids.bytes_hash(msgspec.json.encode(content)), entry


@lru_cache(maxsize=1)
def _read_chat(path: Path, size: int, changed_at: int) -> list[int]:
    """Read the hashes of a rollout; `size` and `changed_at` key the cache, which its sub-agents share."""
    try:
        lines = [line for line in _convert_stream(read_objects(Input(path, ""))) if not isinstance(line, Reject)]
        return [key for key, _ in _hash_chat(CodexRollout(lines).main.entries)] if lines else []
    except (OSError, ValueError, RecursionError):
        return []


def _get_turn(value: dict[str, Any]) -> str | None:
    """Return the id of the turn to which a line belongs."""
    payload = as_object(value.get("payload"))
    turn = payload.get("turn_id") or as_object(payload.get(_PASSED_FIELDS)).get("turn_id")
    return turn if isinstance(turn, str) else None


def _simplify_content(content: Any) -> Any:
    """Return the content of an observed message, as text if it is one plain text part."""
    part = as_object(content[0]) if isinstance(content, list) and len(content) == 1 else {}
    is_text = part.keys() == {"type", "text"} and isinstance(part["text"], str)
    return part["text"] if is_text else content


def _convert_parts(content: Any) -> list[Any]:
    """Return the content of a message that the model wrote, as parts of chat APIs."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    text_parts = []
    for part in content or ():
        is_text = isinstance(part, dict) and part.get("type") == "output_text" and isinstance(part.get("text"), str)
        is_plain = is_text and not any(part[key] for key in part.keys() - {"type", "text"})
        text_parts.append({"type": "text", "text": part["text"]} if is_plain else part)
    return text_parts


def _list_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _is_rollout_line(value: dict[str, Any]) -> bool:
    """Return whether a line belongs to a rollout."""
    kind, payload = value.get("type"), value.get("payload")
    if _is_stream_line(value):
        return True
    if isinstance(kind, str) and isinstance(payload, dict) and "timestamp" in value:
        return kind in ENVELOPES
    if kind == "session_meta":
        return "cli_version" in value
    return value == {"record_type": "state"} or (value.keys() - {"git"} == {"id", "timestamp", "instructions"})


def _is_document(look: FileHead) -> bool:
    session = as_object(look.first.get("session"))
    return look.kind == "object" and {"id", "timestamp", "instructions"} <= session.keys()


def _read_document(file: Input) -> Iterator[Line | Reject]:
    """Yield the lines of an old file, which is one object."""
    for item in read_object_members(file, "items"):
        if not isinstance(item, ObjectMember):
            yield from select_objects([item])
        elif item.key == "session" and isinstance(item.value, dict):
            yield 0, item.value


class _CodexSession:
    """A rollout as episodes."""

    def __init__(self, lines: list[Line], file: Input, lost: int) -> None:
        self._rollout = rollout = CodexRollout(lines)
        self._file = file
        self._lost = lost + len(rollout.rejects)
        first = rollout.main.entries[0] if rollout.main.entries else None
        # Stored lakes have the hash of the entry's text without this prefix of its class.
        name = ids.to_text(ids.text_hash(repr(first).removeprefix("Codex")))
        self._meta = rollout.meta or _SessionMeta(f"unnamed-{name}")
        parent = self._meta.find_parent()
        is_marked = rollout.has_turns or rollout.parent_meta is not None
        if parent is not None and not is_marked and _SESSION_NAME.fullmatch(parent):
            parent_files = (path for path in file.path.parent.glob(f"*{parent}*.jsonl*") if path.name != file.path.name)
            for path in islice(parent_files, 1):
                stat = path.stat()
                rollout.mark_copies(_read_chat(path, stat.st_size, stat.st_mtime_ns))

    def build_items(self) -> list[Item]:
        """Return the rejects, then the session and each rolled back segment as an episode, parents first."""
        rollout = self._rollout
        segments = [rollout.main]
        for segment in segments:
            segments += [rollback for rollback in rollout.rollbacks if rollback.parent is segment]
        records: dict[int, EpisodeRecord] = {}
        for segment in segments:
            record = records[segment.number] = self._build_record(segment)
            if segment.parent is None:
                self._set_parent(record)
                extra = omit_fields(rollout.meta_fields, "id", "base_instructions", "dynamic_tools", "timestamp") or {}
                extra |= {"loose_ends": rollout.loose_ends, "left_out": dict(rollout.skipped_counts)}
                extra |= {"lines_lost": self._lost, "rate_limits": rollout.rate_limits}
                record.extra = {key: value for key, value in extra.items() if value} or None
                continue
            main = records[0]
            steps = sum(isinstance(entry, CodexDecision) for entry in segment.before)
            record.relation, record.parent_step_index = "fork", steps - 1 if steps else None
            record.parent_episode_id = make_episode_text_id(records[segment.parent.number], self._file)
            record.root_episode_id = (
                main.root_episode_id if main.relation is not None else make_episode_text_id(main, self._file)
            )
        return [*rollout.rejects, *((segment.position, records[segment.number]) for segment in segments)]

    def _build_record(self, segment: RolloutSegment) -> EpisodeRecord:
        spans = SpanList(self._meta.id)
        messages: list[Message] = []
        decisions: list[CodexDecision] = []
        decision_ids: set[int] = set()
        # `id` of each message that is a decision
        ending: CodexEvent | None = None
        for entry in [*segment.lead, *segment.entries]:
            if isinstance(entry, CodexDecision):
                decisions.append(entry)
                messages.append(entry.build_message())
                decision_ids.add(id(messages[-1]))
            elif isinstance(entry, CodexEvent):
                details: dict[str, Any] = {"error": entry.error, "attributes": entry.attributes}
                name, started_at = f"line {entry.number}", entry.started_at
                spans.add(entry.kind, entry.name, name, steps=len(decisions), started_at=started_at, **details)
                ending = entry if entry.name in _ENDINGS else ending
            else:
                messages.append(entry)
        chat = parse_chat(order_results(messages), is_decision=lambda message: id(message) in decision_ids)
        open_contexts(chat, lambda message: message.get("compacted") is True)
        for step, decision in zip(chat.steps, decisions, strict=True):
            usage = decision.usage or {}
            step.model, step.started_at = decision.model, decision.started_at
            step.prompt_tokens = parse_token_count(usage.get("input_tokens"))
            step.completion_tokens = parse_token_count(usage.get("output_tokens"))
            step.is_copied_context, step.trainable = decision.is_copied, not decision.is_copied
        contexts = [decision.extra.get("turn_context", {}) for decision in decisions]
        # Bare files have the working directory only in the tool's message to the model.
        texts = (join_text(message["content"], "\n") for message in messages if message["role"] == "user")
        cwd = next(((match[1] or match[2]).strip() for match in map(_CWD.search, texts) if match), None)
        effort = next((context["effort"] for context in contexts if context.get("effort") is not None), None)
        record = EpisodeRecord(
            task_id=self._meta.id,
            steps=[],
            run_id=get_project_name(self._meta.cwd or cwd),
            rollout_index=segment.number,
            environment=NAME,
            sampling={"effort": effort} if effort is not None else None,
            source_format=NAME,
            source_version=self._meta.cli_version,
            spans=spans.records,
            tools=tools if isinstance(tools := self._rollout.meta_fields.get("dynamic_tools"), list) else None,
        )
        timed = [entry for entry in segment.entries if isinstance(entry, CodexDecision | CodexEvent)]
        times = [entry.started_at for entry in timed if entry.started_at]
        if segment.parent is None:
            record.started_at = parse_time(self._rollout.meta_fields.get("timestamp")) or self._rollout.started_at
            record.ended_at = self._rollout.ended_at
        elif times:
            record.started_at, record.ended_at = times[0], times[-1]
        set_chat_fields(record, chat)
        if ending is not None and ending.name == "error":
            record.status, record.error = "failed", ending.error
        elif ending is not None and ending.name == "turn_aborted":
            reason = ending.attributes.get("reason")
            record.status, record.stop_reason = "aborted", reason if isinstance(reason, str) else None
        elif ending is not None and ending.name in _COMPLETED:
            record.terminated = True
        elif decisions and is_waiting(chat, decisions[-1].waiting):
            record.status = "aborted"
        return record

    def _set_parent(self, record: EpisodeRecord) -> None:
        """Write the relation and the parent session on a record."""
        spawn, parent = self._meta.read_spawn(), self._meta.find_parent()
        record.relation = "subagent" if spawn is not None else "fork" if parent else None
        if parent is not None:
            parent_meta = self._rollout.parent_meta
            run_id = get_project_name(parent_meta.cwd) if parent_meta is not None else None
            key = EpisodeRecord(task_id=parent, steps=[], run_id=run_id or record.run_id, source_format=NAME)
            record.parent_episode_id = make_episode_text_id(key, self._file)
            record.root_episode_id = record.parent_episode_id if (spawn or {}).get("depth") == 1 else None


FORMAT = Format(
    *(NAME, "Codex CLI rollouts (rollout-*.jsonl)", recognise, read, no_trajectory),
    is_whole=True,
    has_copies=True,
    run_folder=get_parent_folder,
)
