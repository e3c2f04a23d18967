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
envelope's fields and the payload's at one level. The output of `codex exec --json` is read too
(`lake.formats.codex_stream`).

Episode: a session. run_id is the project (the last part of `cwd`, in bare files of the environment context), task_id
the session, environment `codex`.

* A turn that was rolled back (thread_rolled_back) is an episode `fork`; its `parent_step_index` is the last step before
  it, whose history is not repeated.
* History that a fork copied from its parent's file stays, with `is_copied_context` on its steps, which are not trained
  on. It begins with the parent's metadata, or at once in a file of 0.14x that names a parent and has ids of turns. It
  ends at the first turn whose id is newer than the session's, or at the session's repeated id. In files without turn
  ids it ends with the first pause of half a second; without the parent's metadata too, it is the decisions with which
  the parent's file in the same folder begins. The episode is a `fork` (`forked_from_id`) or a `subagent` (`source`) of
  its parent's; the parent's step is in another file and unknown.

Step: a run of model items (assistant messages, reasoning, calls) between two inputs (other messages, outputs, a
compaction, the end of a response that a token_usage_record shows). Bare files write the output of each of several
parallel calls before the next call, so there each call is a step. A step's `started_at` is the time of its first item,
which was complete then: calls are not timed. Bare files give only the time of the session.

* Events that mirror response items are skipped, with their numbers in `extra.left_out`; in a file without items they
  are the conversation. Other events are spans. Usage comes from the token_count next to a decision (until 0.4x before
  it, later after it), each total once. The last limits of the account are in `extra.rate_limits`.
* Compaction: the summary is an observation, `replacement_history` with it. The next step opens a context.
* Ids of items, encrypted reasoning and metadata are in `extra.items` of the step; new fields of a turn_context in
  `extra.turn_context`.

Reward: none. Refused: lines of a wrong shape, newer major versions, histories, indices and early `exec` output.

Source: rollouts of 0.25.0, 0.36.0, 0.89.0, 0.125.0 and 0.169.0, written by the tool (tests/golden/formats).
"""

import re
from collections import Counter
from collections.abc import Iterator
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
from lake.formats.codex_stream import convert_stream, is_stream_line
from lake.records import EpisodeRecord, Reject

NAME = "codex"
NEWEST_VERSION = 0
"""The newest known major version of the tool."""
ENVELOPES = frozenset(("session_meta", "turn_context", "response_item", "event_msg", "compacted"))
_CALL_ARGUMENT_KEYS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "web_search_call": "action",
    "tool_search_call": "arguments",
    "image_generation_call": "revised_prompt",
}
"""The key of the arguments by the type of a call. A call without a name is named like its type."""
_SERVER_CALLS = frozenset(("web_search_call", "image_generation_call"))
"""Calls that the API runs inside the response: no output follows."""
_MIRROR_EVENTS = frozenset(("user_message", "agent_message", "agent_reasoning", "agent_reasoning_raw_content"))
_MIRRORED_ITEMS = frozenset(("UserMessage", "AgentMessage", "Reasoning"))
_TOOL_TEXT = re.compile(
    r"\s*(?:# AGENTS\.md|<(?:environment_context|user_instructions|turn_aborted|subagent_notification|skill|"
    r"user_shell_command)\b)"
)
"""The beginnings of messages that the tool writes in the person's name."""
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
"""Ids that begin with their creation time."""
_TIME = len("01a2064c-a34f")
"""Characters of this time in milliseconds."""
_SESSION_NAME = re.compile(r"[\w-]{1,100}")
_PASSED_FIELDS = "internal_chat_message_metadata_passthrough"
"""Key of a response item for fields of the tool."""
_PAUSE = 0.5
"""Seconds between the copied lines and the lines after them."""
_CWD = re.compile(r"<cwd>([^<\n]+)</cwd>|Current working directory: ([^\n]+)")
_ENDINGS = frozenset(
    ("task_started", "turn_started", "task_complete", "turn_complete", "turn_aborted", "error", "thread_rolled_back")
)
"""Events that show whether a turn has ended."""


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
    objects = _read_document(file) if _is_document(read_head(file.path)) else convert_stream(read_objects(file))
    return build_session(objects, NAME, lambda lines, lost: _CodexSession(lines, file, lost).build_items())


class SessionMeta(msgspec.Struct):
    """The fields of a session's metadata whose types are checked."""

    id: str
    cwd: str | None = None
    cli_version: str | None = None
    forked_from_id: str | None = None
    parent_thread_id: str | None = None
    source: Any = None

    def read_spawn(self) -> dict[str, Any] | None:
        """Return what started a sub-agent; None for another session."""
        agent = self.source.get("subagent") if isinstance(self.source, dict) else None
        return None if agent is None else as_object(as_object(agent).get("thread_spawn"))

    def find_parent(self) -> str | None:
        """Return the id of the session that it came from."""
        spawn = self.read_spawn() or {}
        parent = spawn.get("parent_thread_id") or self.parent_thread_id or self.forked_from_id
        return parent if isinstance(parent, str) and parent != self.id else None


class LineOrigin(NamedTuple):
    """The number and time of a line."""

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
    """An event that is not a message."""

    kind: str
    name: str
    number: int
    """The number of its line."""
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
    def parent_step(self) -> int | None:
        """The last step before it."""
        before = self.parent.entries[: self.cut] if self.parent is not None else []
        steps = sum(isinstance(entry, CodexDecision) for entry in before)
        return steps - 1 if steps else None

    @property
    def lead(self) -> list[Entry]:
        """The messages since the last step before it."""
        messages: list[Entry] = []
        for entry in reversed(self.parent.entries[: self.cut] if self.parent is not None else []):
            if isinstance(entry, CodexDecision):
                return messages[::-1]
            if isinstance(entry, dict):
                messages.append(entry)
        return (self.parent.lead if self.parent is not None else []) + messages[::-1]


class _ResponseItem(msgspec.Struct):
    """The fields of a response item whose types are checked."""

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
        self.meta: SessionMeta | None = None
        self.meta_fields: dict[str, Any] = {}
        """All fields of the session's metadata."""
        self.parent_meta: SessionMeta | None = None
        """Metadata of the session whose history was copied."""
        self.started_at: datetime | None = None
        self.ended_at: datetime | None = None
        self.rate_limits: Any = None
        """Rate limits of the account."""
        self.loose_ends: list[Message] = []
        self.skipped_counts: Counter[str] = Counter()
        self.rejects: list[Reject] = []
        self._is_copying = False
        self._has_turns = any(_UUID7.fullmatch(turn) for _, value in lines if (turn := _get_turn(value)) is not None)
        self._turns: list[tuple[int, int]] = []
        """The entry and the line with which each turn begins."""
        self._current: CodexDecision | None = None
        self._last_decision: CodexDecision | None = None
        self._tools: dict[str, str] = {}
        """The tool's name of each call."""
        self._total_usage: Any = None
        """The sum of usage so far."""
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

    @property
    def shows_copies(self) -> bool:
        """Return whether the file itself shows which lines were copied from its parent's file."""
        return self._has_turns or self.parent_meta is not None

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
        origin = LineOrigin(line[0], parse_time(value.get("timestamp")), value.get("timestamp"))
        self._end_copy(origin.time, _get_turn(value))
        if value.get("record_type") == "state":
            self.skipped_counts["state"] += 1
        elif kind is None and "id" in value and "timestamp" in value:
            self._read_meta(value)
        elif not isinstance(kind, str):
            raise ShapeError(f"`type` is {kind!r}; valid: session_meta, response_item, event_msg, turn_context, ...")
        elif kind not in ENVELOPES and not isinstance(payload, dict):
            self._read_item(omit_fields(value, "timestamp") or {}, origin)
        else:
            raw = payload if payload is not None else omit_fields(value, "type", "timestamp")
            if not isinstance(raw, dict):
                raise ShapeError(f"`payload` is {type(raw).__name__}; valid: an object")
            envelope = omit_fields(value, "timestamp", "type", "payload", "ordinal") or {}
            self._read_envelope(kind, raw, envelope, origin)
        self.ended_at = origin.time or self.ended_at
        self.started_at = self.started_at or origin.time

    def _read_envelope(self, kind: str, payload: dict[str, Any], envelope: dict[str, Any], origin: LineOrigin) -> None:
        if kind == "response_item":
            self._read_item(payload | envelope if envelope else payload, origin)
        elif kind == "event_msg":
            self._read_event(payload, origin)
        elif kind == "turn_context":
            self._context |= self._field_changes.select_new(payload, frozenset())
        elif kind == "session_meta":
            self._read_meta(payload)
        elif kind == "compacted":
            self._add_summary(payload, origin)
        elif kind == "token_usage_record":
            self._has_records, self._current = True, None
            if self._last_decision is not None and isinstance(usage := payload.get("usage"), dict):
                self._last_decision.usage = usage
                self._last_decision.extra["response_id"] = payload.get("response_id")
        else:
            self._add_event(kind, str(payload.get("type", kind)), payload, origin)

    def _read_meta(self, payload: dict[str, Any]) -> None:
        """Read a session's metadata, of this session or of one whose history was copied."""
        meta = msgspec.convert(payload, SessionMeta)
        if self.meta is None:
            check_version(meta.cli_version, NEWEST_VERSION, "Codex")
            self.meta, self.meta_fields = meta, payload
            is_uuid = _UUID7.fullmatch(meta.id) is not None
            self._is_copying = self._has_turns and is_uuid and meta.find_parent() is not None
            base = payload.get("base_instructions")
            if isinstance(base, dict) and isinstance(text := base.get("text"), str):
                self.main.entries.append({"role": "system", "content": text})
        elif meta.id == self.meta.id:
            self._is_copying = False
        else:
            self._is_copying, self.parent_meta = True, self.parent_meta or meta

    def _end_copy(self, time: datetime | None, turn: str | None) -> None:
        """End the copied history at a turn that is newer than the session, or without ids of turns at a pause."""
        session = self.meta.id if self.meta is not None else ""
        if self._has_turns and _UUID7.fullmatch(session):
            is_new = turn is not None and _UUID7.fullmatch(turn) is not None and turn[:_TIME] >= session[:_TIME]
            self._is_copying = self._is_copying and not is_new
        elif self._is_copying and time is not None and self.ended_at is not None:
            start = parse_time(self.meta_fields.get("timestamp"))
            is_older = start is not None and time < start  # some copies keep their times
            self._is_copying = is_older or (time - self.ended_at).total_seconds() < _PAUSE

    def _read_item(self, payload: dict[str, Any], origin: LineOrigin) -> None:
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
            self._add_observation(
                self._build_output(item, payload), payload, origin, "type", "call_id", "output", "name"
            )
        elif item.type == "message":
            role = item.role or "user"
            if role == "user" and _TOOL_TEXT.match(join_text(content, "\n")) is None:
                self._turns.append((len(self.main.entries), origin.number))
            self._add_observation({"role": role, "content": _simplify_content(content)}, payload, origin, "type")
        elif "compaction" in item.type or item.type == "agent_message":
            self._add_observation({"role": "user", "content": _simplify_content(content)}, payload, origin)
        else:
            self._add_event("response_item", item.type, payload, origin)

    def _extend_decision(self, payload: dict[str, Any], origin: LineOrigin, *mapped_keys: str) -> CodexDecision:
        """Add an item to the current decision, or to a new one, and return it."""
        if self._current is None:
            model = self._field_changes.get_last("model")
            self._current = CodexDecision(origin.time, model if isinstance(model, str) else None, self._is_copying)
            self._current.usage, self._waiting = self._waiting, None
            if self._context:
                self._current.extra["turn_context"], self._context = self._context, {}
            self._last_decision = self._current
            self.main.entries.append(self._current)
        if fields := omit_fields(payload, "type", *mapped_keys):
            self._current.items.append({"type": payload["type"]} | fields)
        return self._current

    def _add_call(self, item: _ResponseItem, payload: dict[str, Any], origin: LineOrigin) -> None:
        key = _CALL_ARGUMENT_KEYS.get(item.type, "arguments")
        name = item.name or item.type.removesuffix("_call")
        call_id = item.call_id or item.id
        decision = self._extend_decision(payload, origin, "name", "call_id", key)
        decision.calls.append(make_tool_call(name, payload.get(key), call_id))
        if call_id is not None:
            self._tools[call_id] = name
            decision.waiting += [] if item.type in _SERVER_CALLS else [call_id]

    def _build_output(self, item: _ResponseItem, payload: dict[str, Any]) -> Message:
        """Return the message of a tool's output."""
        output = payload.get("output")
        message: Message = {"role": "tool", "tool_call_id": item.call_id}
        if (name := self._tools.get(item.call_id or "")) is not None:
            message["name"] = name
        if isinstance(output, dict):
            if isinstance(success := output.get("success"), bool):
                message["is_error"] = not success
            output = output.get("content")
        if not is_content(output):
            raise ShapeError("`output` is of the wrong type; valid: text, a list of parts, or an object with `content`")
        return message | {"content": output}

    def _add_observation(
        self, message: Message, payload: dict[str, Any], origin: LineOrigin, *mapped_keys: str
    ) -> None:
        """Add a message that the model did not write."""
        self._current = None
        timestamp = {"timestamp": origin.timestamp} if origin.time is not None else {}
        self.main.entries.append((omit_fields(payload, *mapped_keys) or {}) | message | timestamp)

    def _add_summary(self, payload: dict[str, Any], origin: LineOrigin) -> None:
        """Add the summary that replaces the context."""
        self._waiting = None  # the usage of the call that wrote the summary
        summary, history = payload.get("message"), payload.get("replacement_history")
        if not (isinstance(summary, str) and summary) and isinstance(history, list):
            users = [item for item in history if isinstance(item, dict) and item.get("role") == "user"]
            texts = [join_text(item.get("content"), "\n") for item in users if is_content(item.get("content"))]
            summary = texts[-1] if texts else None
        content = summary if isinstance(summary, str) else None
        self._add_observation({"role": "user", "content": content, "compacted": True}, payload, origin, "message")

    def _read_event(self, payload: dict[str, Any], origin: LineOrigin) -> None:
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

    def _add_event(self, kind: str, name: str, payload: dict[str, Any], origin: LineOrigin) -> None:
        """Add an event that is not a message."""
        message = payload.get("message")
        error = message if name in ("error", "stream_error") and isinstance(message, str) else None
        attributes = {key: value for key, value in payload.items() if key != "type"}
        self.main.entries.append(CodexEvent(kind, name, origin.number, origin.time, error, attributes))

    def _read_usage(self, payload: dict[str, Any]) -> None:
        """Read the usage of one response: of the decision before it, or of the next one."""
        self.rate_limits = payload.get("rate_limits") or self.rate_limits
        info = payload.get("info")
        usage = info.get("last_token_usage") if isinstance(info, dict) else None
        if self._has_records or not isinstance(info, dict) or not isinstance(usage, dict):
            return
        total = info.get("total_token_usage")
        if total == self._total_usage:
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
        lines = [line for line in convert_stream(read_objects(Input(path, ""))) if not isinstance(line, Reject)]
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
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        if part.keys() == {"type", "text"} and isinstance(part["text"], str):
            return part["text"]
    return content


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
    if is_stream_line(value):
        return True
    if isinstance(kind, str) and isinstance(payload, dict) and "timestamp" in value:
        return kind in ENVELOPES
    if kind == "session_meta":
        return "cli_version" in value
    return value == {"record_type": "state"} or (value.keys() - {"git"} == {"id", "timestamp", "instructions"})


def _is_document(look: FileHead) -> bool:
    session = look.first.get("session")
    if look.kind != "object" or not isinstance(session, dict):
        return False
    return {"id", "timestamp", "instructions"} <= session.keys()


def _read_document(file: Input) -> Iterator[Line | Reject]:
    """Yield the lines of an old file, which is one object."""
    for item in read_object_members(file, "items"):
        if isinstance(item, ObjectMember):
            if item.key == "session" and isinstance(item.value, dict):
                yield 0, item.value
        else:
            yield from select_objects([item])


class _CodexSession:
    """A rollout as episodes."""

    def __init__(self, lines: list[Line], file: Input, lost: int) -> None:
        self._rollout = rollout = CodexRollout(lines)
        self._file = file
        self._lost = lost + len(rollout.rejects)
        first = rollout.main.entries[0] if rollout.main.entries else None
        # Stored lakes have the hash of the entry's text without this prefix of its class.
        name = ids.to_text(ids.text_hash(repr(first).removeprefix("Codex")))
        self._meta = rollout.meta or SessionMeta(f"unnamed-{name}")
        parent = self._meta.find_parent()
        if parent is not None and not rollout.shows_copies and _SESSION_NAME.fullmatch(parent):
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
            record.relation, record.parent_step_index = "fork", segment.parent_step
            record.parent_episode_id = self._make_id(records[segment.parent.number])
            record.root_episode_id = main.root_episode_id if main.relation is not None else self._make_id(main)
        return [*rollout.rejects, *((segment.position, records[segment.number]) for segment in segments)]

    def _make_id(self, record: EpisodeRecord) -> str:
        return make_episode_text_id(record, self._file)

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
        )
        if segment.parent is None:
            record.started_at = parse_time(self._rollout.meta_fields.get("timestamp")) or self._rollout.started_at
            record.ended_at = self._rollout.ended_at
        else:
            timed = (entry for entry in segment.entries if isinstance(entry, CodexDecision | CodexEvent))
            times = [entry.started_at for entry in timed if entry.started_at]
            record.started_at, record.ended_at = (times[0], times[-1]) if times else (None, None)
        if isinstance(tools := self._rollout.meta_fields.get("dynamic_tools"), list):
            record.tools = tools
        set_chat_fields(record, chat)
        _set_end(record, ending, is_waiting=bool(decisions) and is_waiting(chat, decisions[-1].waiting))
        return record

    def _set_parent(self, record: EpisodeRecord) -> None:
        """Write the relation and the parent session on a record."""
        spawn, parent = self._meta.read_spawn(), self._meta.find_parent()
        record.relation = "subagent" if spawn is not None else "fork" if parent else None
        if parent is not None:
            parent_meta = self._rollout.parent_meta
            run_id = get_project_name(parent_meta.cwd) if parent_meta is not None else None
            key = EpisodeRecord(task_id=parent, steps=[], run_id=run_id or record.run_id, source_format=NAME)
            record.parent_episode_id = self._make_id(key)
            record.root_episode_id = record.parent_episode_id if (spawn or {}).get("depth") == 1 else None


def _set_end(record: EpisodeRecord, ending: CodexEvent | None, *, is_waiting: bool) -> None:
    """Write the status and the stop reason on a record."""
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


FORMAT = Format(
    NAME,
    "Codex CLI rollouts (rollout-*.jsonl)",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    has_copies=True,
    run_folder=get_parent_folder,
)
