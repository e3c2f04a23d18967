"""The lines of a Codex rollout, in order, as what was said, decided and shown."""

import re
from collections import Counter
from datetime import datetime
from typing import Any

import msgspec

from lake.formats.base.fields import moment
from lake.formats.base.rows import ShapeError, UnsupportedError, rest
from lake.formats.chat.messages import Message, text_of, tool_call
from lake.formats.chat.sessions import Line, Told, count, is_content, known_version, line_reject
from lake.formats.codex.parts import Decision, Event, Meta, Part, Place
from lake.records import Reject

NEWEST = 0
"""Major version."""
ENVELOPES = frozenset(("session_meta", "turn_context", "response_item", "event_msg", "compacted"))
_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "web_search_call": "action",
    "tool_search_call": "arguments",
    "image_generation_call": "revised_prompt",
}
"""Calls, and where their arguments stand. One without a name is called like its type."""
_ANSWERED = frozenset(("web_search_call", "image_generation_call"))
"""The API runs them inside the response: no output follows."""
_MIRRORS = frozenset(("user_message", "agent_message", "agent_reasoning", "agent_reasoning_raw_content"))
_MIRRORED_ITEMS = frozenset(("UserMessage", "AgentMessage", "Reasoning"))
_INJECTED = re.compile(
    r"\s*(?:# AGENTS\.md|<(?:environment_context|user_instructions|turn_aborted|subagent_notification|skill|"
    r"user_shell_command)\b)"
)
"""How messages begin that the tool writes in the person's name."""
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
"""Ids that begin with the time at which they were made."""
_PAUSE = 0.5
"""Seconds between what is copied at once and what comes after it."""


class _Item(msgspec.Struct):
    """What has to be of its type in a response item."""

    type: str
    role: str | None = None
    summary: list[dict[str, Any]] | None = None
    name: str | None = None
    call_id: str | None = None
    id: str | None = None


class Rollout:
    """The lines of a file."""

    def __init__(self, lines: list[Line]) -> None:
        self.main = Part(lines[0][0])
        self.taken_back: list[Part] = []
        self.meta: Meta | None = None
        self.about: dict[str, Any] = {}
        """All that the session says of itself."""
        self.parent: Meta | None = None
        """The session whose history was copied."""
        self.started: datetime | None = None
        self.ended: datetime | None = None
        self.limits: Any = None
        """Of the account."""
        self.loose_ends: list[Message] = []
        self.left_out: Counter[str] = Counter()
        self.rejects: list[Reject] = []
        self._is_copying = False
        self._has_turns = False
        self._turns: list[tuple[int, int]] = []
        """Entries and lines with which turns begin."""
        self._open: Decision | None = None
        self._last: Decision | None = None
        self._tools: dict[str, str] = {}
        """Call -> tool."""
        self._total: Any = None
        """Of the usage so far."""
        self._waiting: dict[str, Any] | None = None
        """Usage of a decision that is to come."""
        self._is_after = False
        """Usage comes after its decision."""
        self._has_records = False
        self._context: dict[str, Any] = {}
        """What turn_contexts said since the last decision."""
        self._told = Told()
        self._has_items = any(_is_item(value) for _, value in lines)
        for line in lines:
            try:
                self._take(line)
            except UnsupportedError:
                raise
            except (msgspec.MsgspecError, ShapeError) as error:
                self.rejects.append(line_reject(line, str(error)))

    def _take(self, line: Line) -> None:
        value = line[1]
        kind, payload = value.get("type"), value.get("payload")
        place = Place(line[0], moment(value.get("timestamp")), value.get("timestamp"))
        self._end_copy(place.time)
        if value.get("record_type") == "state":
            self.left_out["state"] += 1
        elif kind is None and "id" in value and "timestamp" in value:
            self._introduce(value)
        elif not isinstance(kind, str):
            raise ShapeError(f"`type` is {kind!r}; valid: session_meta, response_item, event_msg, turn_context, ...")
        elif kind not in ENVELOPES and not isinstance(payload, dict):
            self._item(rest(value, "timestamp") or {}, place)
        else:
            given = payload if payload is not None else rest(value, "type", "timestamp")
            if not isinstance(given, dict):
                raise ShapeError(f"`payload` is {type(given).__name__}; valid: an object")
            self._open_envelope(kind, given, rest(value, "timestamp", "type", "payload", "ordinal") or {}, place)
        self.ended = place.time or self.ended
        self.started = self.started or place.time

    def _open_envelope(self, kind: str, payload: dict[str, Any], beside: dict[str, Any], place: Place) -> None:
        if kind == "response_item":
            self._item(payload | beside if beside else payload, place)
        elif kind == "event_msg":
            self._event(payload, place)
        elif kind == "turn_context":
            self._see_turn(payload)
            self._context |= self._told.new(payload, frozenset())
        elif kind == "session_meta":
            self._introduce(payload)
        elif kind == "compacted":
            self._compact(payload, place)
        elif kind == "token_usage_record":
            self._close(payload)
        else:
            self._note(kind, str(payload.get("type", kind)), payload, place)

    def _introduce(self, payload: dict[str, Any]) -> None:
        """What a session says of itself."""
        meta = msgspec.convert(payload, Meta)
        if self.meta is None:
            known_version(meta.cli_version, NEWEST, "Codex")
            self.meta, self.about = meta, payload
            base = payload.get("base_instructions")
            if isinstance(base, dict) and isinstance(text := base.get("text"), str):
                self.main.entries.append({"role": "system", "content": text})
        elif meta.id == self.meta.id:
            self._is_copying = False
        else:
            self._is_copying, self.parent = True, self.parent or meta

    def _see_turn(self, payload: dict[str, Any]) -> None:
        """A turn that is newer than the session is its own, no copy."""
        turn, session = payload.get("turn_id"), self.meta.id if self.meta is not None else ""
        if isinstance(turn, str) and _UUID7.fullmatch(turn) and _UUID7.fullmatch(session):
            self._has_turns = True
            self._is_copying = self._is_copying and turn < session

    def _end_copy(self, time: datetime | None) -> None:
        if self._is_copying and not self._has_turns and time is not None and self.ended is not None:
            began = moment(self.about.get("timestamp"))
            is_older = began is not None and time < began  # some copies keep their times
            self._is_copying = is_older or (time - self.ended).total_seconds() < _PAUSE

    def _item(self, payload: dict[str, Any], place: Place) -> None:
        """A response item."""
        item = msgspec.convert(payload, _Item)
        content = payload.get("content")
        if not is_content(content):
            raise ShapeError(f"`content` of a {item.type} is of the wrong type; valid: text, a list of parts, or null")
        if item.type == "message" and item.role == "assistant":
            self._decide(payload, place, "role", "content").content += _acted(content)
        elif item.type == "reasoning":
            decision = self._decide(payload, place, "content", "summary")
            decision.thoughts += _texts(content)
            decision.summaries += _texts(item.summary)
        elif item.type.endswith("_call"):
            self._call(item, payload, place)
        elif item.type.endswith("_output"):
            self._observe(self._output(item, payload), payload, place, "type", "call_id", "output", "name")
        elif item.type == "message":
            role = item.role or "user"
            if role == "user" and _INJECTED.match(text_of(content, "\n")) is None:
                self._turns.append((len(self.main.entries), place.number))
            self._observe({"role": role, "content": _content(content)}, payload, place, "type")
        elif "compaction" in item.type or item.type == "agent_message":
            self._observe({"role": "user", "content": _content(content)}, payload, place)
        else:
            self._note("response_item", item.type, payload, place)

    def _decide(self, payload: dict[str, Any], place: Place, *known: str) -> Decision:
        """The decision that goes on, or a new one, with another item."""
        if self._open is None:
            model = self._told.last("model")
            self._open = Decision(place.time, model if isinstance(model, str) else None, self._is_copying)
            self._open.usage, self._waiting = self._waiting, None
            if self._context:
                self._open.extra["turn_context"], self._context = self._context, {}
            self._last = self._open
            self.main.entries.append(self._open)
        if kept := rest(payload, "type", *known):
            self._open.items.append({"type": payload["type"]} | kept)
        return self._open

    def _call(self, item: _Item, payload: dict[str, Any], place: Place) -> None:
        key = _CALLS.get(item.type, "arguments")
        name = item.name or item.type.removesuffix("_call")
        call_id = item.call_id or item.id
        decision = self._decide(payload, place, "name", "call_id", key)
        decision.calls.append(tool_call(name, payload.get(key), call_id))
        if call_id is not None:
            self._tools[call_id] = name
            decision.waiting += [] if item.type in _ANSWERED else [call_id]

    def _output(self, item: _Item, payload: dict[str, Any]) -> Message:
        """What a tool gave back."""
        output = payload.get("output")
        found: Message = {"role": "tool", "tool_call_id": item.call_id}
        if (name := self._tools.get(item.call_id or "")) is not None:
            found["name"] = name
        if isinstance(output, dict):
            if isinstance(success := output.get("success"), bool):
                found["is_error"] = not success
            output = output.get("content")
        if not is_content(output):
            raise ShapeError("`output` is of the wrong type; valid: text, a list of parts, or an object with `content`")
        return found | {"content": output}

    def _observe(self, message: Message, payload: dict[str, Any], place: Place, *known: str) -> None:
        """A message that the model did not write."""
        self._open = None
        when = {"timestamp": place.timestamp} if place.time is not None else {}
        self.main.entries.append((rest(payload, *known) or {}) | message | when)

    def _close(self, payload: dict[str, Any]) -> None:
        """A response has come to its end."""
        self._has_records, self._open = True, None
        if self._last is not None and isinstance(usage := payload.get("usage"), dict):
            self._last.usage = usage
            self._last.extra["response_id"] = payload.get("response_id")

    def _compact(self, payload: dict[str, Any], place: Place) -> None:
        """The context is cut, and begins with a summary."""
        self._waiting = None  # the usage of the call that wrote it
        summary, history = payload.get("message"), payload.get("replacement_history")
        if not (isinstance(summary, str) and summary) and isinstance(history, list):
            texts = [text_of(item.get("content"), "\n") for item in history if _is_user(item)]
            summary = texts[-1] if texts else None
        content = summary if isinstance(summary, str) else None
        self._observe({"role": "user", "content": content, "compacted": True}, payload, place, "message")

    def _event(self, payload: dict[str, Any], place: Place) -> None:
        """What the screen shows."""
        kind, item = payload.get("type"), payload.get("item")
        if not isinstance(kind, str):
            raise ShapeError(f"`payload.type` is {kind!r}; valid: the name of an event")
        name = str(item.get("type", kind)) if isinstance(item, dict) else kind
        if kind in _MIRRORS and not self._has_items:
            self._item(_mirrored(kind, payload), place)
            return
        if kind in _MIRRORS or kind == "token_count" or (kind == "item_completed" and name in _MIRRORED_ITEMS):
            self.left_out[kind if name == kind else f"{kind} {name}"] += 1
            if kind == "token_count":
                self._count(payload)
            return
        if kind in ("task_started", "turn_started"):
            self._see_turn(payload)
        self._note("event_msg" if name == kind else kind, name, payload, place)
        if kind == "thread_rolled_back":
            self._take_back(count(payload.get("num_turns")) or 0)

    def _note(self, kind: str, name: str, payload: dict[str, Any], place: Place) -> None:
        """An event that is no message."""
        message = payload.get("message")
        error = message if name in ("error", "stream_error") and isinstance(message, str) else None
        attributes = {key: value for key, value in payload.items() if key != "type"}
        self.main.entries.append(Event(kind, name, place.number, place.time, error, attributes))

    def _count(self, payload: dict[str, Any]) -> None:
        """The usage of one response: of the decision before it, or of the one to come."""
        self.limits = payload.get("rate_limits") or self.limits
        info = payload.get("info")
        usage = info.get("last_token_usage") if isinstance(info, dict) else None
        if self._has_records or not isinstance(info, dict) or not isinstance(usage, dict):
            return
        total = info.get("total_token_usage")
        if total == self._total:
            return
        self._total = total
        if self._last is not None and self._last.usage is None:
            self._last.usage, self._is_after = usage, True
        elif not self._is_after:
            self._waiting = usage

    def _take_back(self, turns: int) -> None:
        """Take back the last turns: what they hold becomes a part of its own."""
        turns = min(turns, len(self._turns))
        if turns == 0:
            return
        cut, number = self._turns[-turns]
        del self._turns[-turns:]
        *taken, note = self.main.entries[cut:]
        self.main.entries[cut:] = [note]
        self._open = self._last = None
        self._told, self._context = Told(), {}
        if not any(isinstance(entry, Decision) for entry in taken):
            self.loose_ends += [entry for entry in taken if isinstance(entry, dict)]
            return
        part = Part(number, taken, self.main, cut, len(self.taken_back) + 1)
        for other in self.taken_back:
            if other.of is self.main and other.at > cut:
                other.of, other.at = part, other.at - cut
        self.taken_back.append(part)


def _is_item(value: dict[str, Any]) -> bool:
    """Whether a line is a response item, or in a bare file looks like one."""
    return value.get("type") == "response_item" or "role" in value or "call_id" in value


def _mirrored(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The item that an event mirrors, where a file has kept events alone."""
    said = payload.get("message", payload.get("text"))
    if kind in ("user_message", "agent_message"):
        return {"type": "message", "role": "user" if kind == "user_message" else "assistant", "content": said}
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": said}]}


def _is_user(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") == "user" and is_content(item.get("content"))


def _content(content: Any) -> Any:
    """The content of an observed message: a text where it is no more than that."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        only = content[0]
        if only.keys() == {"type", "text"} and isinstance(only["text"], str):
            return only["text"]
    return content


def _acted(content: Any) -> list[Any]:
    """The content of a message that the model wrote, as parts that chats have."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "text", "text": part["text"]} if _is_plain(part) else part for part in content or ()]


def _is_plain(part: Any) -> bool:
    """Whether a part is a text and nothing else."""
    if not isinstance(part, dict) or part.get("type") != "output_text" or not isinstance(part.get("text"), str):
        return False
    return not any(part[key] for key in part.keys() - {"type", "text"})


def _texts(parts: Any) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    return [part["text"] for part in parts or () if isinstance(part, dict) and isinstance(part.get("text"), str)]
