"""The tree of a Claude Code session: which lines are one call of the model, and how calls follow one another.

Each line names the line before it (`parentUuid`; across a compaction `logicalParentUuid`). Most branches of this tree
do not belong to the conversation. One response is several lines, and each parallel result hangs on the line of its
call. Progress, hooks and attachments hang where they happened. So lines first become nodes:

* a call: the consecutive assistant lines that share a `message.id`, and the results of its tools;
* any other line alone; lines of type `progress` belong to the line that they report on.

A node with several children that lead to calls is a fork. The main line continues to the newest call; each further
child begins a branch. Children without calls (a skill's text, a hook's note, a summary) are part of the line they hang
on. If a person typed one of them, the model never answered it, and it is a loose end. A line between a call and its
result was answered with the result.

`/clear` begins a new conversation, which is a separate branch without the lines before it.

Lines of sub-agents (`isSidechain`) are separate chains. A line follows the last line of its chain if its parent is not
in the file.
"""

from collections import deque
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from lake.formats.base.fields import as_object, parse_time
from lake.formats.base.rows import ShapeError
from lake.formats.chat.sessions import Line, check_version, is_content
from lake.ids import bytes_hash

NEWEST_VERSION = 2
"""The newest known major version of the tool."""
SYNTHETIC = "<synthetic>"
"""The model of assistant messages that the tool wrote without a model."""
MAIN = ""
"""The chain of the person's conversation."""
_MESSAGE_TYPES = frozenset(("user", "assistant"))
_TREE_TYPES = frozenset((*_MESSAGE_TYPES, "system", "attachment", "progress"))
_AGENT_TOOLS = frozenset(("Task", "Agent"))
_MAX_DISTANCE = 1000
"""Most lines between two lines of one response, or between a call and its result."""
_CLEAR = "<command-name>/clear</command-name>"


class ContentPart(msgspec.Struct, gc=False):
    """A part of a message's content."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: Any = None

    @property
    def is_tool_use(self) -> bool:
        """Return whether it calls a tool: one of the client's, or one of the API's."""
        return self.type.endswith("tool_use")


class ApiMessage(msgspec.Struct, gc=False):
    """A message to or from the API."""

    content: str | list[ContentPart] | None = None
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None
    usage: dict[str, Any] | None = None


class LineFields(msgspec.Struct, gc=False):
    """The fields of a line whose types are checked."""

    type: str
    uuid: str | None = None
    parentUuid: str | None = None
    logicalParentUuid: str | None = None
    isSidechain: bool | None = None
    agentId: str | None = None
    parent_tool_use_id: str | None = None
    sessionId: str | None = None
    session_id: str | None = None
    requestId: str | None = None
    cwd: str | None = None
    version: str | None = None
    claude_code_version: str | None = None
    subtype: str | None = None
    message: ApiMessage | None = None
    isMeta: bool | None = None
    isCompactSummary: bool | None = None
    isApiErrorMessage: bool | None = None
    forkedFrom: dict[str, Any] | None = None


class SessionEvent(msgspec.Struct, gc=False):
    """A line and its position in the tree."""

    number: int
    value: dict[str, Any]
    fields: LineFields
    at: datetime | None
    chain: str = MAIN
    parent: int = -1
    """Index of the line before."""
    node: int = -1
    """Index of its node; -1 if it has none."""

    @property
    def session(self) -> str | None:
        """The session that wrote the line first."""
        return self.fields.sessionId or self.fields.session_id

    @property
    def version(self) -> str | None:
        """The version of the tool."""
        return self.fields.version or self.fields.claude_code_version

    @property
    def content_parts(self) -> list[ContentPart]:
        """The parts of its message; none if the content is text."""
        content = self.fields.message.content if self.fields.message is not None else None
        return content if isinstance(content, list) else []

    @property
    def report(self) -> Any:
        """What the tool reports about a result beyond its text."""
        return self.value.get("toolUseResult", self.value.get("tool_use_result"))

    def pair_parts(self) -> Iterable[tuple[ContentPart, dict[str, Any]]]:
        """Return the parts of its message, each with the object that it was read from."""
        parts = self.content_parts
        return zip(parts, self.value["message"]["content"], strict=True) if parts else ()

    @property
    def is_call(self) -> bool:
        """Return whether a model wrote it."""
        message = self.fields.message
        is_model = self.fields.type == "assistant" and message is not None and message.model != SYNTHETIC
        return is_model and not self.fields.isApiErrorMessage

    @property
    def is_typed(self) -> bool:
        """Return whether a person wrote it."""
        if self.fields.type != "user" or self.fields.isMeta or self.fields.isCompactSummary:
            return False
        return not self.content_parts or any(part.type != "tool_result" for part in self.content_parts)

    @property
    def is_clear(self) -> bool:
        """Return whether a person cleared the history with it."""
        if self.chain != MAIN or self.fields.type not in ("user", "system"):
            return False
        content = self.value.get("content") if self.fields.message is None else self.fields.message.content
        texts = [content] if isinstance(content, str) else [part.text or "" for part in self.content_parts]
        return any(text.lstrip().startswith(_CLEAR) for text in texts)


def parse_event(line: Line) -> SessionEvent | None:
    """Return a line of the tree; None for a line about the session.

    Raises:
        msgspec.ValidationError, ShapeError: a line of the wrong shape.
        UnsupportedError: a line of a newer version of the tool.
    """
    number, value = line
    kind = value.get("type")
    if not (isinstance(kind, str) and kind in _TREE_TYPES) and not ("uuid" in value and "parentUuid" in value):
        return None
    fields = msgspec.convert(value, LineFields)
    event = SessionEvent(number, value, fields, parse_time(value.get("timestamp")))
    check_version(event.version, NEWEST_VERSION, "Claude Code")
    if fields.type in _MESSAGE_TYPES and fields.message is None:
        raise ShapeError("Object missing required field `message`")
    for index, part in enumerate(event.content_parts):
        if part.is_tool_use and part.name is None:
            raise ShapeError(f"Object missing required field `name` - at `$.message.content[{index}]`")
        if part.type == "tool_result" and not is_content(part.content):
            kind = type(part.content).__name__
            raise ShapeError(f"`message.content[{index}].content` is {kind}; valid: text, a list of parts, or null")
    return event


class SessionNode(msgspec.Struct):
    """A call with its results, or any other line."""

    events: list[SessionEvent]
    parent: int
    is_call: bool
    results: list[SessionEvent] = []
    children: list[int] = []
    is_answered: bool = False
    """Whether it lies between a call and its result, so that the next call saw it."""
    newest: tuple[int, int] = (-1, -1)
    """Line numbers of the newest call and of the newest line that a person typed, at or below it; -1 without one."""

    @property
    def messages(self) -> list[ApiMessage]:
        """The messages of its lines."""
        return [event.fields.message for event in self.events if event.fields.message is not None]

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of a response; its last line has all of it."""
        messages = (event.fields.message for event in reversed(self.events))
        return next((message.usage for message in messages if message is not None and message.usage), {})

    def hash_response(self) -> int:
        """Hash the id and the content of a response, which stay the same in a copy."""
        parts = [(event.value["message"].get("id"), event.value["message"].get("content")) for event in self.events]
        return bytes_hash(msgspec.json.encode(parts))


class SessionBranch(msgspec.Struct):
    """One line of the tree from its beginning to its end."""

    chain: str
    nodes: list[SessionNode] = []
    number: int = 0
    """0 for the main line of a chain; other branches are numbered in the order in which they begin."""
    is_conversation: bool = False
    """Whether it begins with a cleared history."""
    parent: "SessionBranch | None" = None
    parent_step: int | None = None
    lead: list[SessionEvent] = []
    """The messages between a fork and the last step before it; the fork's first call has seen them too."""
    spawned_by: SessionEvent | None = None
    """The first line of a sub-agent."""
    loose_ends: list[SessionEvent] = []


class SessionTree:
    """The tree of a session's lines, which must be in file order."""

    def __init__(self, events: list[SessionEvent]) -> None:
        self.nodes: list[SessionNode] = []
        self.branches: list[SessionBranch] = []
        """Parents first."""
        self.agents: dict[str, str] = {}
        """The tool call that started each sub-agent."""
        self.tools: dict[str, str] = {}
        """The tool's name of each tool call."""
        self._uuids: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        """The node of each tool call."""
        self._positions: dict[int, tuple[SessionBranch, int]] = {}
        """The branch of each call's node, and its number there."""
        self._prompts: dict[str, deque[int]] = {}
        """The nodes of the calls that started a sub-agent with a prompt."""
        self._sidechains = 0
        self._last_sidechain = MAIN
        self._events = self._link(events)
        self._group()
        roots: dict[str, list[int]] = {MAIN: []}
        for index, node in enumerate(self.nodes):
            if node.parent < 0:
                roots.setdefault(node.events[0].chain, []).append(index)
        for chain, starts in roots.items():
            if starts:
                self._split_chain(chain, starts)

    def locate_calls(self) -> dict[str, tuple[SessionBranch, int]]:
        """Return the branch and the step in which each tool call was made."""
        return {call: self._positions[node] for call, node in self._owners.items() if node in self._positions}

    def list_responses(self) -> frozenset[int]:
        """Return the hashes of the responses on the main line and its forks."""
        calls = (node for node in self.nodes if node.is_call and node.events[0].chain == MAIN)
        return frozenset(node.hash_response() for node in calls)

    def find_spawner(self, branch: SessionBranch) -> tuple[SessionBranch, int] | None:
        """Return the branch and the step that started the sub-agent of a branch; None if no call in the file did."""
        first = branch.spawned_by
        if first is None:
            return None
        node = self._owners.get(self.agents.get(branch.chain, branch.chain), -1)
        if node < 0 and (above := self._uuids.get(first.fields.parentUuid or "", -1)) >= 0:
            node = self._events[above].node
        if node < 0 and first.fields.message is not None:
            content = first.fields.message.content
            text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
            waiting = self._prompts.get(text)
            node = waiting.popleft() if waiting else -1
        return self._positions.get(node)

    def _link(self, events: list[SessionEvent]) -> list[SessionEvent]:
        """Set the chains and parents of lines, and drop copies."""
        last: dict[str, int] = {}
        unique: list[SessionEvent] = []
        is_cleared = False
        for event in events:
            fields = event.fields
            if fields.uuid is not None and fields.uuid in self._uuids:
                continue  # a resumed session repeats lines
            link = fields.parentUuid or fields.logicalParentUuid
            parent = self._uuids.get(link, -1) if link is not None else -1
            event.chain = self._choose_chain(event, unique, parent, is_linked=link is not None)
            if parent < 0 or unique[parent].chain != event.chain:
                # Without the key the file has no links at all, and a resumed sub-agent begins a new chain.
                is_new = link is None and "parentUuid" in event.value and event.chain != fields.agentId
                is_new = is_new and fields.subtype != "compact_boundary" and not fields.isCompactSummary
                parent = -1 if is_new and not is_cleared else last.get(event.chain, -1)
            event.parent = parent
            # What follows a cleared history hangs on the command, with or without a link.
            is_cleared = event.is_clear or (is_cleared and not event.is_call)
            last[event.chain] = len(unique)
            if fields.uuid is not None:
                self._uuids[fields.uuid] = len(unique)
            unique.append(event)
        return unique

    def _choose_chain(self, event: SessionEvent, before: list[SessionEvent], parent: int, *, is_linked: bool) -> str:
        fields = event.fields
        if fields.parent_tool_use_id is not None:
            return fields.parent_tool_use_id
        if not fields.isSidechain:
            return MAIN
        if fields.agentId is not None:
            return fields.agentId
        fallback = self._last_sidechain if is_linked else MAIN
        chain = before[parent].chain if parent >= 0 else fallback
        if chain == MAIN:
            self._sidechains += 1
            chain = f"sidechain-{self._sidechains}"
        self._last_sidechain = chain
        return chain

    def _group(self) -> None:
        """Make nodes of lines, and find the newest call below each."""
        calls: dict[tuple[str, str], int] = {}
        answered: set[str] = set()
        for event in self._events:
            above = self._events[event.parent].node if event.parent >= 0 else -1
            if event.fields.type == "progress":
                event.node = above
            elif event.is_call:
                event.node = self._add_call(event, above, calls, answered)
            else:
                if isinstance(agent := as_object(event.report).get("agentId"), str):
                    for part in event.content_parts:
                        if part.tool_use_id is not None:
                            self.agents.setdefault(agent, part.tool_use_id)
                event.node = self._find_answered_call(event, answered)
                if event.node >= 0:
                    self.nodes[event.node].results.append(event)
                    self._note_answered(event)
                else:
                    event.node = self._add_node(event, above, is_call=False)
        for node in reversed(self.nodes):
            first = node.events[0]
            call, typed = node.newest
            call = max(call, first.number if node.is_call else -1)
            node.newest = call, max(typed, first.number if first.is_typed else -1)
            if node.parent >= 0:
                parent = self.nodes[node.parent]
                parent.newest = max(parent.newest[0], node.newest[0]), max(parent.newest[1], node.newest[1])

    def _add_call(self, event: SessionEvent, above: int, calls: dict[tuple[str, str], int], answered: set[str]) -> int:
        """Add a line of a response, and return the node of its call."""
        name = event.fields.message.id if event.fields.message is not None else None
        name = name or event.fields.requestId or event.fields.uuid or f"line {event.number}"
        node = calls.get((event.chain, name), -1)
        if node >= 0 and self._continues(above, node):
            self.nodes[node].events.append(event)
        else:
            node = calls[event.chain, name] = self._add_node(event, above, is_call=True)
        for part, raw in event.pair_parts():
            if part.id is None or part.name is None or not part.is_tool_use or self._owners.get(part.id) == node:
                continue
            self._owners[part.id] = node
            self.tools[part.id] = part.name
            answered.discard(part.id)
            prompt = as_object(raw.get("input")).get("prompt")
            if part.name in _AGENT_TOOLS and isinstance(prompt, str):
                self._prompts.setdefault(prompt, deque()).append(node)
        return node

    def _continues(self, above: int, call: int) -> bool:
        """Return whether a line below a node may continue a call, without a person or another call between."""
        for _ in range(_MAX_DISTANCE):
            if above < 0 or above == call:
                return True
            node = self.nodes[above]
            if node.is_call or node.events[0].is_typed:
                return False
            above = node.parent
        return False

    def _find_answered_call(self, event: SessionEvent, answered: set[str]) -> int:
        """Return the node of the call whose results a line brings; -1 without results, or for repeated ones."""
        parts = event.content_parts if event.fields.type == "user" else ()
        ids = [part.tool_use_id for part in parts if part.tool_use_id is not None]
        owner = self._owners.get(ids[0], -1) if ids else -1
        if owner < 0 or self.nodes[owner].events[0].chain != event.chain or any(call in answered for call in ids):
            return -1
        answered.update(ids)
        return owner

    def _note_answered(self, result: SessionEvent) -> None:
        """Note the lines between a call and its result."""
        index = result.parent
        for _ in range(_MAX_DISTANCE):
            node = self._events[index].node if index >= 0 else -1
            if node < 0 or node == result.node or self.nodes[node].is_call:
                return
            self.nodes[node].is_answered = True
            index = self._events[index].parent

    def _add_node(self, event: SessionEvent, above: int, *, is_call: bool) -> int:
        index = len(self.nodes)
        self.nodes.append(SessionNode([event], above, is_call))
        if above >= 0:
            self.nodes[above].children.append(index)
        return index

    def _split_chain(self, chain: str, roots: list[int]) -> None:
        """Add the branches of a chain."""
        first = SessionBranch(chain, spawned_by=None if chain == MAIN else self.nodes[roots[0]].events[0])
        waiting = deque([(first, roots)])
        branches = []
        while waiting:
            branch, starts = waiting.popleft()
            branches.append(branch)
            waiting += self._grow(branch, starts)
        for number, branch in enumerate(sorted(branches[1:], key=lambda fork: fork.nodes[0].events[0].number), 1):
            branch.number = number
        self.branches += branches

    def _grow(self, branch: SessionBranch, starts: list[int]) -> list[tuple[SessionBranch, list[int]]]:
        """Follow a branch to its end, and return the branches that begin on the way with the node of each beginning."""
        forks: list[tuple[SessionBranch, list[int]]] = []
        lead = list(branch.lead)
        steps = 0
        while starts:
            nodes = [(index, self.nodes[index]) for index in starts] if branch.nodes else []
            if cleared := [index for index, node in nodes if node.newest[0] >= 0 and node.events[0].is_clear]:
                forks.append((SessionBranch(branch.chain, parent=branch, is_conversation=True), cleared))
                starts = [index for index in starts if index not in cleared]
                continue
            newest = max(starts, key=lambda index: (*self.nodes[index].newest, index))
            for start in starts:
                if start == newest:
                    continue
                if self.nodes[start].newest[0] >= 0:
                    is_above = not steps and branch.parent is not None and not branch.is_conversation
                    parent = branch.parent if is_above else branch
                    step = steps - 1 if steps else branch.parent_step
                    fork = SessionBranch(branch.chain, parent=parent, parent_step=step, lead=list(lead))
                    forks.append((fork, [start]))
                    continue
                subtree, waiting = [], [start]
                while waiting:
                    subtree.append(self.nodes[waiting.pop()])
                    waiting += reversed(subtree[-1].children)
                if self.nodes[start].newest[1] >= 0 and not any(node.is_answered for node in subtree):
                    branch.loose_ends += [node.events[0] for node in subtree]
                else:
                    branch.nodes += subtree
                    lead += [node.events[0] for node in subtree]
            node = self.nodes[newest]
            branch.nodes.append(node)
            if node.is_call:
                self._positions[newest] = branch, steps
                steps += 1
                lead = list(node.results)
            else:
                lead.append(node.events[0])
            starts = node.children
        return forks
