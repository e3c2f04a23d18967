"""The tree of a Claude Code session: which lines are one call of the model, and which calls follow one another.

Each line names the line before it (`parentUuid`; across a compaction `logicalParentUuid`). Most branches of this tree
are none of the conversation: one response is several lines, parallel results each hang on the line of their own call,
and progress, hooks and attachments hang where they happened. So lines first become nodes:

* a call: the assistant lines that share a `message.id` and follow one another, and with them the results of its tools;
* any other line by itself; lines of type `progress` belong to what they report on.

What then has several children with calls below them is a fork. The main line goes on to the newest call; each other
child begins a branch. Children without calls (a skill's text, a hook's note, a summary) are part of the line they hang
on, unless a person typed one of them: then nobody answered it, and it is a loose end.

Lines of sub-agents (`isSidechain`) are chains of their own. A line whose parent is not in the file, or is lost, follows
the last line of its chain.
"""

from collections import deque

import msgspec

from lake.formats.claude_code.lines import MAIN, Event, Message

_AGENT_TOOLS = frozenset(("Task", "Agent"))
_MOST_BETWEEN = 1000
"""Lines between two of the same response."""


class Node(msgspec.Struct):
    """A call with its results, or any other line."""

    events: list[Event]
    parent: int
    is_call: bool
    results: list[Event] = []
    children: list[int] = []
    newest: tuple[int, int] = (-1, -1)
    """Lines of the newest call at or below it, and of the newest that a person typed; -1 if there is none."""

    @property
    def messages(self) -> list[Message]:
        """What its lines say; of a call, one of each."""
        return [event.said.message for event in self.events if event.said.message is not None]

    @property
    def leads_to_a_call(self) -> bool:
        """Whether there is a call at or below it."""
        return self.newest[0] >= 0


class Branch(msgspec.Struct):
    """One line of the tree from where it begins to its end."""

    chain: str
    nodes: list[Node] = []
    number: int = 0
    """0 is the main line of a chain; forks are counted in the order in which they begin."""
    parent: "Branch | None" = None
    parent_step: int | None = None
    lead: list[Event] = []
    """Of a fork: what came after the last step before it, which its first call has seen as well."""
    spawned_by: Event | None = None
    """First line of a sub-agent."""
    loose_ends: list[Event] = []


class Tree:
    """The lines of a session, which have to be in the order of the file."""

    def __init__(self, events: list[Event]) -> None:
        self.nodes: list[Node] = []
        self.branches: list[Branch] = []
        """Parents first."""
        self.agents: dict[str, str] = {}
        """Sub-agent -> the tool call that started it."""
        self.tools: dict[str, str] = {}
        """Tool call -> name of the tool."""
        self._uuids: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        """Tool call -> node."""
        self._places: dict[int, tuple[Branch, int]] = {}
        """Node of a call -> its branch, and its number there."""
        self._prompts: dict[str, deque[int]] = {}
        """What sub-agents were asked -> the nodes of the calls that asked it."""
        self._sidechains = 0
        self._last_sidechain = MAIN
        self._events = self._linked(events)
        self._group()
        for chain, roots in self._roots().items():
            self._part(chain, roots)

    def calls(self) -> dict[str, tuple[Branch, int]]:
        """The branch and the step in which each tool call was made."""
        return {call: self._places[node] for call, node in self._owners.items() if node in self._places}

    def spawner(self, branch: Branch) -> tuple[Branch, int] | None:
        """The branch and the step that started the sub-agent of a branch; None if no call of the file says so."""
        first = branch.spawned_by
        if first is None:
            return None
        node = self._owners.get(self.agents.get(branch.chain, branch.chain), -1)
        if node < 0 and (above := self._uuids.get(first.said.parentUuid or "", -1)) >= 0:
            node = self._events[above].node
        if node < 0 and first.said.message is not None:
            content = first.said.message.content
            text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
            waiting = self._prompts.get(text)
            node = waiting.popleft() if waiting else -1
        return self._places.get(node)

    def _linked(self, events: list[Event]) -> list[Event]:
        """The lines with their chains and parents, without copies."""
        last: dict[str, int] = {}
        kept: list[Event] = []
        for event in events:
            said = event.said
            if said.uuid is not None and said.uuid in self._uuids:
                continue  # sessions that are taken up again write lines a second time
            link = said.parentUuid or said.logicalParentUuid
            parent = self._uuids.get(link, -1) if link is not None else -1
            event.chain = self._chain(event, kept, parent, is_linked=link is not None)
            if parent < 0 or kept[parent].chain != event.chain:
                # Without the key there are no links at all, and a sub-agent that goes on begins anew.
                is_new = link is None and "parentUuid" in event.value and event.chain != said.agentId
                is_new = is_new and said.subtype != "compact_boundary" and not said.isCompactSummary
                parent = -1 if is_new else last.get(event.chain, -1)
            event.parent = parent
            last[event.chain] = len(kept)
            if said.uuid is not None:
                self._uuids[said.uuid] = len(kept)
            kept.append(event)
        return kept

    def _chain(self, event: Event, before: list[Event], parent: int, *, is_linked: bool) -> str:
        said = event.said
        if said.parent_tool_use_id is not None:
            return said.parent_tool_use_id
        if not said.isSidechain:
            return MAIN
        if said.agentId is not None:
            return said.agentId
        lost = self._last_sidechain if is_linked else MAIN
        chain = before[parent].chain if parent >= 0 else lost
        if chain == MAIN:
            self._sidechains += 1
            chain = f"sidechain-{self._sidechains}"
        self._last_sidechain = chain
        return chain

    def _group(self) -> None:
        """Lines as nodes."""
        calls: dict[tuple[str, str], int] = {}
        answered: set[str] = set()
        for event in self._events:
            above = self._events[event.parent].node if event.parent >= 0 else -1
            if event.said.type == "progress":
                event.node = above
            elif event.is_call:
                event.node = self._call(event, above, calls, answered)
            else:
                self._note_agent(event)
                event.node = self._answered(event, answered)
                if event.node >= 0:
                    self.nodes[event.node].results.append(event)
                else:
                    event.node = self._new(event, above, is_call=False)
        for node in reversed(self.nodes):
            own = node.events[0]
            call, typed = node.newest
            node.newest = max(call, own.number if node.is_call else -1), max(typed, own.number if own.is_typed else -1)
            if node.parent >= 0:
                up = self.nodes[node.parent]
                up.newest = max(up.newest[0], node.newest[0]), max(up.newest[1], node.newest[1])

    def _call(self, event: Event, above: int, calls: dict[tuple[str, str], int], answered: set[str]) -> int:
        message = event.said.message or Message()
        name = message.id or event.said.requestId or event.said.uuid or f"line {event.number}"
        node = calls.get((event.chain, name), -1)
        if node >= 0 and self._follows(above, node):
            self.nodes[node].events.append(event)
        else:
            node = calls[event.chain, name] = self._new(event, above, is_call=True)
        for place, part in enumerate(message.parts):
            if part.id is None or part.name is None or not part.is_tool_use or self._owners.get(part.id) == node:
                continue
            self._owners[part.id] = node
            self.tools[part.id] = part.name
            answered.discard(part.id)
            given = event.value["message"]["content"][place].get("input")
            if part.name in _AGENT_TOOLS and isinstance(given, dict) and isinstance(given.get("prompt"), str):
                self._prompts.setdefault(given["prompt"], deque()).append(node)
        return node

    def _follows(self, above: int, call: int) -> bool:
        """Whether a line that hangs on a node may go on with a call: no person and no other call came between."""
        for _ in range(_MOST_BETWEEN):
            if above < 0 or above == call:
                return True
            node = self.nodes[above]
            if node.is_call or node.events[0].is_typed:
                return False
            above = node.parent
        return False

    def _answered(self, event: Event, answered: set[str]) -> int:
        """The node of the call whose results a line brings; -1 if it brings none, or some that are there already."""
        ids = [part.tool_use_id for part in event.parts if part.tool_use_id is not None]
        owner = self._owners.get(ids[0], -1) if ids and event.said.type == "user" else -1
        if owner < 0 or self.nodes[owner].events[0].chain != event.chain or any(call in answered for call in ids):
            return -1
        answered.update(ids)
        return owner

    def _note_agent(self, event: Event) -> None:
        result = event.value.get("toolUseResult", event.value.get("tool_use_result"))
        if isinstance(result, dict) and isinstance(agent := result.get("agentId"), str):
            for part in event.parts:
                if part.tool_use_id is not None:
                    self.agents.setdefault(agent, part.tool_use_id)

    def _new(self, event: Event, above: int, *, is_call: bool) -> int:
        index = len(self.nodes)
        self.nodes.append(Node([event], above, is_call))
        if above >= 0:
            self.nodes[above].children.append(index)
        return index

    def _roots(self) -> dict[str, list[int]]:
        """The nodes that nothing comes before, by chain, the main one first."""
        roots: dict[str, list[int]] = {MAIN: []}
        for index, node in enumerate(self.nodes):
            if node.parent < 0:
                roots.setdefault(node.events[0].chain, []).append(index)
        return {chain: found for chain, found in roots.items() if found}

    def _part(self, chain: str, roots: list[int]) -> None:
        """The branches of a chain."""
        first = Branch(chain, spawned_by=None if chain == MAIN else self.nodes[roots[0]].events[0])
        waiting = deque([(first, roots)])
        found = []
        while waiting:
            branch, starts = waiting.popleft()
            found.append(branch)
            waiting += self._grow(branch, starts)
        for number, branch in enumerate(sorted(found[1:], key=lambda fork: fork.nodes[0].events[0].number), 1):
            branch.number = number
        self.branches += found

    def _grow(self, branch: Branch, starts: list[int]) -> list[tuple[Branch, list[int]]]:
        """Follow a branch to its end; the forks that begin on the way, and the node each begins with."""
        forks: list[tuple[Branch, list[int]]] = []
        lead = list(branch.lead)
        steps = 0
        while starts:
            chosen = max(starts, key=lambda index: (*self.nodes[index].newest, index))
            for start in starts:
                if start == chosen:
                    continue
                if self.nodes[start].leads_to_a_call:
                    parent = branch if steps or branch.parent is None else branch.parent
                    step = steps - 1 if steps else branch.parent_step
                    forks.append((Branch(branch.chain, parent=parent, parent_step=step, lead=list(lead)), [start]))
                elif self.nodes[start].newest[1] >= 0:
                    branch.loose_ends += [node.events[0] for node in self._below(start)]
                else:
                    below = self._below(start)
                    branch.nodes += below
                    lead += [node.events[0] for node in below]
            node = self.nodes[chosen]
            branch.nodes.append(node)
            if node.is_call:
                self._places[chosen] = branch, steps
                steps += 1
                lead = list(node.results)
            else:
                lead.append(node.events[0])
            starts = node.children
        return forks

    def _below(self, start: int) -> list[Node]:
        found, waiting = [], [start]
        while waiting:
            node = self.nodes[waiting.pop()]
            found.append(node)
            waiting += reversed(node.children)
        return found
