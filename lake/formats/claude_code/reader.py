"""Claude Code sessions: `~/.claude/projects/PROJECT/SESSION.jsonl`, and what its sub-agents write beside them.

.. code-block:: text

    type        user, assistant (message as the Messages API has it), system (subtype), attachment, progress, and lines
                about the session: summary, file-history-snapshot, queue-operation, cost-state, api-request, ...
    uuid, parentUuid, logicalParentUuid     the tree; see `lake.formats.claude_code.tree`
    sessionId, cwd, version, gitBranch      the session that wrote the line, where, with which version of the tool
    isSidechain, agentId                    a line of a sub-agent: in the session's file up to 2.0, later in
                                            `agent-ID.jsonl` beside it or below SESSION/subagents, described by
                                            `agent-ID.meta.json`
    isMeta, isCompactSummary, isApiErrorMessage, forkedFrom, toolUseResult

Versions 0.2 to 2.x (`version`). Also the output of `claude -p --output-format stream-json`, which has no tree:
`session_id`, `parent_tool_use_id`, a first line `system/init` and a last line `result`; with `--output-format json
--verbose` the same in one array.

A decision is one response of the model: the assistant lines that share a `message.id` (usage is repeated, the last line
has all of it). No decisions: API errors (spans; an episode that ends with one has failed) and `<synthetic>` messages.
run_id is the project (the last part of `cwd`), task_id the session, environment `claude_code`.

* The main line is rollout 0. A branch that was left (a rewind, a fork) is an episode `fork` with its own number. It
  begins after step `parent_step_index` of its parent: the steps before are its parent's and are not repeated, so that a
  session of many rewinds does not grow with their square, and no step counts twice. What came since that step is its
  `initial_messages`.
* A sub-agent is an episode `subagent` with its `agentId` (else `sidechain-N`) as agent_id. Its step is found by its
  agentId, its tool call or its prompt; for a file of its own in the session's file beside or above it, which also says
  the run, and without which the step stays unknown.
* Lines that were copied from another session (`forkedFrom`, another `sessionId`) are kept, their steps
  `is_copied_context` and not trained on: the episode is a `fork` or a `continuation` of that session's. Sessions that
  1.0 took up again, and forks of 2.0, are written anew under the new id and cannot be told.
* Compaction: the summary is an observation with `isCompactSummary`; what the policy saw before it is cut.
* Attachments are messages with the text that the model was shown (`rendered`), else with a text of theirs, else without
  content. What the tool reported beyond a result's text is kept with the message as `toolUseResult`.
* System lines are spans. Lines about the session are in `extra.session` of the main line; messages nobody answered in
  `extra.loose_ends`. Left out are lines of progress, snapshots of files and copies of requests, which repeat what other
  lines say; their numbers are in `extra.left_out`. System prompt, tools and sampling come from `prompt_snapshot`,
  `api-request-shape` and `api-request` where a version has them.

A step's `started_at` is the time of its first line, when its first part was complete: calls are not timed.
Source: files of versions 1.0.21, 2.0.13, 2.0.14 and 2.1.330, written by the tool (tests/golden/formats).
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from lake.formats.base.fields import number
from lake.formats.base.format import Format, its_folder
from lake.formats.base.look import HEAD_BYTES, Look
from lake.formats.base.rows import Item, ShapeError, UnsupportedError, episode_text_id, rest
from lake.formats.base.source import Input
from lake.formats.chat.sessions import Line, line_reject, project, read_objects, session_items
from lake.formats.claude_code.chat import Facts, episode, source
from lake.formats.claude_code.lines import MAIN, Event, event_of, is_chained
from lake.formats.claude_code.tree import Branch, Tree
from lake.records import EpisodeRecord, Reject

NAME = "claude_code"
_SESSION_NAME = re.compile(r"[\w-]{1,100}")
_LEVELS = 5
"""Folders above a sub-agent's file that are looked through for its session's."""
_LEFT_OUT = frozenset(("progress", "file-history-snapshot", "file-history-delta", "stream_event"))
_REQUESTS = frozenset(("api-request", "api-request-shape", "api-request-blob"))
_STATES = frozenset(("cost-state", "last-prompt", "tools-used", "attribution-snapshot"))
"""Lines about the session of which the last one says everything."""
_ABOUT = frozenset(("queue-operation", "last-prompt", "mode", "ai-title", "custom-title"))
_LIMITS = frozenset(("error_max_turns", "error_max_budget_usd", "error_max_structured_output_retries"))
_Place = tuple[int, str | None, int | None]
"""Rollout, agent and step."""


def recognise(look: Look) -> bool:
    """Whether lines are those of a session, of one of its titles, or of a stream."""
    if look.kind not in ("lines", "object", "array"):
        return False
    return (
        look.has("sessionId", "parentUuid", "uuid")
        or any(_is_spoken(value) for value in look.objects)
        or look.has("type", "summary", "leafUuid")
        or look.has("messageId", "snapshot", "isSnapshotUpdate")
        or any("sessionId" in value and value.get("type") in _ABOUT for value in look.objects if _is_typed(value))
    )


def no_trajectory(look: Look) -> str | None:  # noqa: PLR0911 - a list of independent rules
    """What a file beside the sessions is."""
    ingest = "ingest the SESSION.jsonl files of the folder `projects`"
    if look.has("display", "project", "timestamp") and not look.has("sessionId", "uuid"):
        return f"it is the history of prompts that Claude Code was given; {ingest}"
    if look.has("entries", "originalPath"):
        return f"it is the index of a project's Claude Code sessions; {ingest}"
    if look.has("agentType", "toolUseId") and not look.has("uuid"):
        return "it describes a sub-agent of Claude Code; ingest the agent-ID.jsonl beside it"
    if look.has("type", "key", "agentId") and not look.has("uuid"):
        return "it is the journal of a workflow of Claude Code; ingest the agent-ID.jsonl files beside it"
    if look.first.get("type") == "result" and {"session_id", "num_turns"} <= look.first.keys():
        return f"it is what `claude -p --output-format json` says at the end, without messages; {ingest}"
    types = {value.get("type") for value in look.objects if _is_typed(value)}
    if types == {"summary"} and look.has("leafUuid"):
        is_all = len(look.text.encode()) < HEAD_BYTES and look.text.count("\n") <= len(look.values)
        return f"it only holds titles of Claude Code sessions; {ingest}" if is_all else None
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1; an episode's position is its first line's."""
    return session_items(read_objects(file), NAME, lambda lines, lost: _Session(lines, lost).items(file))


def _is_typed(value: dict[str, Any]) -> bool:
    return isinstance(value.get("type"), str)


def _is_spoken(value: dict[str, Any]) -> bool:
    """Whether it is a message of a session or of a stream."""
    is_of_session = "sessionId" in value or "session_id" in value
    return is_of_session and value.get("type") in ("user", "assistant") and isinstance(value.get("message"), dict)


class _Session:
    """The lines of a file."""

    def __init__(self, lines: list[Line], lost: int) -> None:
        self.rejects: list[Reject] = []
        self.left_out: Counter[str] = Counter()
        self._about: dict[str, list[dict[str, Any]]] = {}
        self._requests: dict[str, Any] = {}
        self._tools: list[Any] | None = None
        events: list[Event] = []
        for line in lines:
            try:
                if is_chained(line[1]):
                    events.append(event_of(line))
                else:
                    self._hear(line[1])
            except UnsupportedError:
                raise
            except (msgspec.MsgspecError, ShapeError) as error:
                self.rejects.append(line_reject(line, str(error)))
        self.lost = lost + len(self.rejects)
        self.left_out.update(event.said.type for event in events if event.said.type in _LEFT_OUT)
        self.tree = Tree(events)
        self.name = next((event.session for event in reversed(events) if event.session), None)
        self.run_id = project(next((event.said.cwd for event in events if event.said.cwd), None))
        self.version = next((event.version for event in reversed(events) if event.version), None)

    def _hear(self, value: dict[str, Any]) -> None:
        """A line about the session."""
        kind = value["type"] if _is_typed(value) else "unknown"
        if kind in _LEFT_OUT or kind in _REQUESTS:
            self.left_out[kind] += 1
            if isinstance(shape := value.get("shape"), dict) and isinstance(tools := shape.get("tools"), list):
                self._tools = self._tools or tools
            if isinstance(request := value.get("id"), str) and isinstance(params := value.get("params"), dict):
                self._requests[request] = rest(params, "model")
            return
        fields = rest(value, "type", "sessionId", "session_id") or {}
        before = self._about.setdefault(kind, [])
        if kind in _STATES:
            before.clear()
        if fields and before[-1:] != [fields]:
            before.append(fields)

    def items(self, file: Input) -> list[Item]:
        """Rejects, and each branch as an episode."""
        found: list[Item] = list(self.rejects)
        branches = self.tree.branches
        if not branches:
            return found or [self._empty()]
        if self.name is None:
            raise ShapeError("no line has a `sessionId`; valid: the id of the session, in each line of a conversation")
        above = _above(file.path, self.name, branches[0])
        self.run_id = above.run_id or self.run_id
        facts = Facts(self.name, self.tree.tools, self._requests, self._tools)
        records: dict[int, EpisodeRecord] = {}
        for branch in branches:
            record = records[id(branch)] = episode(branch, facts)
            record.run_id, record.environment = self.run_id, NAME
            record.source_format, record.source_version = NAME, self.version
            self._relate(record, branch, records, above, file)
            found.append((branch.nodes[0].events[0].number, record))
        self._tell(records[id(branches[0])], above)
        return found

    def _empty(self) -> Reject:
        kinds = ", ".join(sorted({*self._about, *self.left_out}))
        message = f"it holds no message of a conversation, only lines about one: {kinds}"
        return Reject(position=1, reason="invalid", message=message, raw="")

    def _tell(self, record: EpisodeRecord, above: "_Above") -> None:
        """Say of a file's first episode what its lines say of the whole session."""
        about = {kind: values[0] if len(values) == 1 else values for kind, values in self._about.items() if values}
        result = about.pop("result", None)
        extra = {"session": about, "left_out": dict(self.left_out), "lines_lost": self.lost, "agent": above.meta}
        record.extra = (record.extra or {}) | {key: value for key, value in extra.items() if value} or None
        if isinstance(result, dict):
            record.extra = (record.extra or {}) | {"result": result}
            kind = result.get("subtype")
            record.cost = number(result.get("total_cost_usd", result.get("cost_usd")))
            if isinstance(kind, str):
                record.stop_reason = kind
                record.status = "completed" if kind == "success" else "truncated" if kind in _LIMITS else "failed"
                record.terminated = {"completed": True, "truncated": False}.get(record.status)
            if result.get("is_error") is True and record.status == "completed":
                record.status, record.terminated = "failed", None
                record.error = str(result.get("result"))

    def _relate(
        self,
        record: EpisodeRecord,
        branch: Branch,
        records: dict[int, EpisodeRecord],
        above: "_Above",
        file: Input,
    ) -> None:
        """Say what an episode came out of."""
        first = self.tree.branches[0]
        root, step = records[id(first)] if first.chain == MAIN else self._key((0, None, None)), None
        if branch.parent is not None:
            relation, parent, step = "fork", records[id(branch.parent)], branch.parent_step
        elif branch is first and branch.chain != MAIN:
            relation, parent, step = "subagent", self._key(above.place), above.place[2]
        elif branch is not first:
            relation, parent = "subagent", root
            if (place := self.tree.spawner(branch)) is not None and id(place[0]) in records:
                parent, step = records[id(place[0])], place[1]
        else:
            copied = [event for node in branch.nodes for event in node.events if source(event, record.task_id)]
            if not copied:
                return
            relation = "fork" if copied[-1].said.forkedFrom is not None else "continuation"
            parent = root = self._key((0, None, None), source(copied[-1], record.task_id))
        record.relation, record.parent_step_index = relation, step
        record.parent_episode_id = episode_text_id(parent, file)
        record.root_episode_id = root.root_episode_id or episode_text_id(root, file)

    def _key(self, place: _Place, session: str | None = None) -> EpisodeRecord:
        """A record with the key of an episode that need not be in the file."""
        return EpisodeRecord(
            task_id=session or self.name or "",
            steps=[],
            run_id=self.run_id,
            rollout_index=place[0],
            agent_id=place[1],
            source_format=NAME,
        )


class _Above(msgspec.Struct):
    """What is known of the session that a sub-agent's file belongs to."""

    run_id: str | None = None
    place: _Place = (0, None, None)
    """Where the sub-agent was started."""
    meta: dict[str, Any] | None = None


def _above(path: Path, session: str, branch: Branch) -> _Above:
    """What started the sub-agent of a file; nothing is known of that for any other file."""
    if branch.chain == MAIN or _SESSION_NAME.fullmatch(session) is None:
        return _Above()
    own = path.absolute()
    meta = _meta(own)
    for folder in list(own.parents)[:_LEVELS]:
        for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
            file = folder / f"{session}{ending}"
            if file == own or not file.is_file():
                continue
            stat = file.stat()
            run_id, agents, places = _places(file, stat.st_size, stat.st_mtime_ns)
            call = meta.get("toolUseId", agents.get(branch.chain))
            return _Above(run_id, places.get(call, (0, None, None)) if isinstance(call, str) else (0, None, None), meta)
    return _Above(meta=meta)


def _meta(path: Path) -> dict[str, Any]:
    """What is written about a sub-agent beside its file; nothing if that is missing or damaged."""
    try:
        found = msgspec.json.decode(path.with_name(path.name.split(".")[0] + ".meta.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1)
def _places(path: Path, size: int, changed: int) -> tuple[str | None, dict[str, str], dict[str, _Place]]:
    """Of a session's file of some size and age: its run, the tool call of each sub-agent, the place of each tool call.

    The files of a session's sub-agents come one after the other, and ask the same of it.
    """
    try:
        lines = [item for item in read_objects(Input(path, "")) if not isinstance(item, Reject)]
        session = _Session(lines, 0)
    except (OSError, ValueError, RecursionError):
        return None, {}, {}
    places: dict[str, _Place] = {
        call: (at.number, at.chain or None, step) for call, (at, step) in session.tree.calls().items()
    }
    return session.run_id, session.tree.agents, places


FORMAT = Format(
    NAME, "Claude Code sessions (.jsonl)", recognise, read, no_trajectory, is_whole=True, run_folder=its_folder
)
