"""One branch of a Claude Code session as an episode: its messages, its steps, and its events that are neither."""

from typing import Any

import msgspec

from lake.formats.base.fields import number
from lake.formats.chat.messages import Message, conversation, text_of, tool_call
from lake.formats.chat.sessions import Spans, Told, complete, count, is_content, is_waiting
from lake.formats.claude_code.lines import SYNTHETIC, Event
from lake.formats.claude_code.tree import Branch, Node
from lake.records import EpisodeRecord, StepRecord

_FLAGS = ("isMeta", "isCompactSummary", "isVisibleInTranscriptOnly")
_STARTS = ("cwd", "gitBranch", "userType", "entrypoint", "slug", "version")
"""What is said of an episode once, and again where it changes."""
_PLACED = frozenset(("type", "message", "uuid", "parentUuid", "logicalParentUuid", "isSidechain", "timestamp", *_FLAGS))
_PLACED |= {"sessionId", "session_id", "agentId", "parent_tool_use_id", "toolUseResult", "tool_use_result", "subtype"}
_PLACED |= {"attachment", "rendered", "renderedRole"}
"""Keys of a line that have a place of their own."""
_PLACED_OF_A_CALL = _PLACED | {"costUSD", "durationMs"}
_OF_A_MESSAGE = frozenset(("role", "content", "id", "model", "type", "stop_reason", "usage"))
_OF_A_CALL = frozenset(("type", "id", "name", "input"))
_OF_A_RESULT = frozenset(("type", "tool_use_id", "content", "is_error"))
_PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_INTERRUPTED = "[Request interrupted by user"
_ENDED = frozenset(("end_turn", "stop_sequence"))


class Facts(msgspec.Struct):
    """What is known of the session of a branch."""

    name: str
    tools: dict[str, str]
    """Tool call -> name of the tool."""
    requests: dict[str, Any]
    """Request -> its parameters, the model left out."""
    schemas: list[Any] | None = None


def source(event: Event, session: str) -> str | None:
    """The other session that a line was copied from; None if it was not."""
    if (fork := event.said.forkedFrom) is not None and isinstance(fork.get("sessionId"), str):
        return str(fork["sessionId"])
    return event.session if event.session != session else None


def episode(branch: Branch, facts: Facts) -> EpisodeRecord:
    """A branch as a record; what it came out of is not said yet."""
    return _Chat(branch, facts).record()


class _Chat:
    """The messages of a branch."""

    def __init__(self, branch: Branch, facts: Facts) -> None:
        self._branch = branch
        self._facts = facts
        self._told = Told()
        self._spans = Spans(facts.name)
        self._messages: list[Message] = []
        self._calls: list[Node] = []
        self._acted: set[int] = set()
        self._prompt: Any = None
        self._failure: str | None = None
        self._tools: dict[str, str] = {}
        """Tool call -> name of the tool, as far as the branch has come."""
        self._waiting: list[str] = []
        """Tool calls of the last decision."""
        events = [event for node in branch.nodes for event in (*node.events, *node.results)]
        times = [event.at for event in events if event.at is not None]
        self._times = (min(times), max(times)) if times else (None, None)
        first = events[0].value
        self._extra = self._told.new({key: first.get(key) for key in _STARTS}, frozenset())
        for event in branch.lead:
            self._observe(event)
        for node in branch.nodes:
            if node.is_call:
                self._decide(node)
            for event in node.results if node.is_call else node.events:
                self._observe(event)

    def record(self) -> EpisodeRecord:
        """The episode."""
        chat = conversation(self._messages, is_decision=lambda message: id(message) in self._acted)
        for step, node in zip(chat.steps, self._calls, strict=True):
            self._complete(step, node)
        ends = [message for event in self._branch.loose_ends for message in self._messages_of(event)]
        record = EpisodeRecord(
            task_id=self._facts.name,
            steps=[],
            rollout_index=self._branch.number,
            agent_id=self._branch.chain or None,
            started_at=self._times[0],
            ended_at=self._times[1],
            tools=self._facts.schemas,
            spans=self._spans.records,
            extra=self._extra | ({"loose_ends": ends} if ends else {}) or None,
        )
        complete(record, chat)
        requests = [self._request(node) for node in self._calls]
        record.sampling = next((request for request in requests if request), None)
        for step, request in zip(chat.steps, requests, strict=True):
            if request and request != record.sampling:
                step.extra = (step.extra or {}) | {"request": request}
        last = chat.steps[-1].finish_reason if chat.steps else None
        said = [text_of(message.get("content")) for message in chat.final_observation]
        record.stop_reason = last
        record.terminated = True if last in _ENDED else None
        if self._failure is not None:
            record.status, record.error, record.terminated = "failed", self._failure, None
        elif any(text.startswith(_INTERRUPTED) for text in said[-2:]):
            record.status, record.stop_reason, record.terminated = "aborted", "interrupted", None
        elif last == "max_tokens":
            record.status, record.terminated = "truncated", False
        elif is_waiting(chat, self._waiting):
            record.status = "aborted"
        return record

    def _decide(self, node: Node) -> None:
        """A call as a message."""
        content: list[Any] = []
        thoughts: list[str] = []
        signatures: list[str] = []
        calls: dict[str, dict[str, Any]] = {}
        extra: dict[str, Any] = {}
        for event in node.events:
            given = event.value["message"]
            if isinstance(given.get("content"), str):
                content.append({"type": "text", "text": given["content"]})
            for part, raw in zip(event.parts, given["content"] if event.parts else (), strict=True):
                if part.is_tool_use:
                    call = tool_call(part.name or "", raw.get("input"), part.id)
                    kept = {key: item for key, item in raw.items() if key not in _OF_A_CALL}
                    kept |= {} if part.type == "tool_use" else {"source_type": part.type}
                    calls.setdefault(part.id or f"{event.number}.{len(calls)}", call | kept)
                elif part.type == "thinking":
                    thoughts.append(part.thinking or "")
                    signatures += [part.signature] if part.signature else []
                else:
                    content.append(raw)
            extra |= self._told.new(event.value, _PLACED_OF_A_CALL)
            kept = {key: item for key, item in given.items() if key not in _OF_A_MESSAGE and item is not None}
            extra |= {"message": kept} if kept else {}
        usage = [message.usage for message in node.messages if message.usage]
        message = extra | {
            "message_id": node.messages[0].id,
            "uuids": [event.said.uuid for event in node.events if event.said.uuid] or None,
            "usage": usage[-1] if usage else None,
            "signatures": signatures or None,
            "role": "assistant",
            "content": content,
            "tool_calls": list(calls.values()) or None,
            "reasoning_content": "\n\n".join(thoughts) or None,
        }
        self._failure = None
        # What the API runs itself is answered in the same response.
        self._waiting = [call for call, made in calls.items() if "source_type" not in made]
        self._tools |= {call: made["function"]["name"] for call, made in calls.items()}
        self._acted.add(id(message))
        self._messages.append(message)
        self._calls.append(node)

    def _complete(self, step: StepRecord, node: Node) -> None:
        """Set what the lines of a call say of its step."""
        messages = node.messages
        step.model = messages[0].model
        step.finish_reason = next((message.stop_reason for message in reversed(messages) if message.stop_reason), None)
        step.started_at = node.events[0].at
        usage = next((message.usage for message in reversed(messages) if message.usage), {})
        counts = [found for name in _PROMPT if (found := count(usage.get(name))) is not None]
        step.prompt_tokens = sum(counts) if counts else None
        step.completion_tokens = count(usage.get("output_tokens"))
        costs = [cost for event in node.events if (cost := number(event.value.get("costUSD"))) is not None]
        step.cost = sum(costs) if costs else None
        took = [took for event in node.events if (took := number(event.value.get("durationMs"))) is not None]
        step.latency = max(took) / 1000 if took else None
        step.is_copied_context = source(node.events[0], self._facts.name) is not None
        step.trainable = not step.is_copied_context

    def _request(self, node: Node) -> dict[str, Any] | None:
        reference = node.events[0].value.get("requestRef")
        return self._facts.requests.get(reference) if isinstance(reference, str) else None

    def _observe(self, event: Event) -> None:
        """A line that no model wrote."""
        said = event.said
        if said.type in ("user", "attachment") or (said.type == "assistant" and not said.isApiErrorMessage):
            self._messages += self._messages_of(event)
            return
        error = None
        if said.type == "assistant":
            content = event.value["message"].get("content")
            error = self._failure = text_of(content)
        self._spans.add(
            "error" if error is not None else said.type,
            "api_error" if error is not None else said.subtype or said.type,
            said.uuid or f"line {event.number}",
            steps=len(self._calls),
            started_at=event.at,
            error=error,
            attributes=self._told.new(event.value, _PLACED),
        )

    def _messages_of(self, event: Event) -> list[Message]:
        """A line as messages: the results of tools, and what else it says."""
        if event.said.type == "attachment":
            found = self._attached(event)
        else:
            content = event.value["message"].get("content")
            role = "assistant" if event.said.type == "assistant" else "user"
            found, others = [], []
            for part, raw in zip(event.parts, content if event.parts else (), strict=True):
                if part.type == "tool_result":
                    found.append(self._result(raw))
                else:
                    others.append(raw)
            if others or not found:
                message = {"role": role, "content": others or content or ""}
                found.append(message | ({"model": SYNTHETIC} if role == "assistant" else {}))
        if not found:
            return found
        result = event.value.get("toolUseResult", event.value.get("tool_use_result"))
        is_repeated = isinstance(result, str) and text_of(found[0]["content"]) in (
            result,
            result.removeprefix("Error: "),
        )
        if result is not None and not is_repeated:
            found[0]["toolUseResult"] = result
        found[0] = self._told.new(event.value, _PLACED) | found[0]
        for key in ("uuid", "timestamp", *_FLAGS):
            if event.value.get(key):
                found[0][key] = event.value[key]
        return found

    def _result(self, raw: dict[str, Any]) -> Message:
        call = raw.get("tool_use_id")
        name = self._tools.get(call, self._facts.tools.get(call)) if isinstance(call, str) else None
        found = {"role": "tool", "tool_call_id": call, "name": name, "content": raw.get("content")}
        found["is_error"] = bool(raw.get("is_error"))  # absent where there is none
        kept = {key: item for key, item in raw.items() if key not in _OF_A_RESULT}
        return {key: value for key, value in (found | kept).items() if value is not None or key == "content"}

    def _attached(self, event: Event) -> list[Message]:
        """What the model was shown beside the conversation."""
        given = event.value.get("attachment")
        attachment = given if isinstance(given, dict) else {"value": given}
        if isinstance(prompt := attachment.get("systemPrompt"), list):
            if isinstance(tools := attachment.get("tools"), list) and self._facts.schemas is None:
                self._facts.schemas = tools
            if prompt == self._prompt or not all(isinstance(text, str) for text in prompt):
                return []
            self._prompt = prompt
            return [{"role": "system", "content": [{"type": "text", "text": text} for text in prompt]}]
        rendered = event.value.get("rendered")
        if isinstance(rendered, list) and rendered and all(isinstance(part, dict) for part in rendered):
            contents = [part.get("content") for part in rendered]
            if all(isinstance(content, str) for content in contents):
                role = "user" if event.value.get("renderedRole") == "user" else "system"
                return [{"role": role, "content": "\n".join(contents), "attachment": {"type": attachment.get("type")}}]
        key = "prompt" if attachment.get("type") == "queued_command" else "content"
        text = attachment.get(key)
        if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
            text = "\n".join(text)
        if not text or not is_content(text):
            return [{"role": "system", "content": None, "attachment": attachment}]
        # What a person typed while the agent was at work; the rest are notes of the tool.
        role = "user" if key == "prompt" else "system"
        return [{"role": role, "content": text, "attachment": {k: v for k, v in attachment.items() if k != key}}]
