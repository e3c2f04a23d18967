"""Messages and message graphs of verifiers: a graph's branches as conversations, with the exact tokens along them.

See `lake.formats.verifiers_traces` for nodes, branches and tokens. `lake.formats.verifiers_results` has only messages.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import as_object
from lake.formats.base.rows import ShapeError, omit_fields
from lake.formats.chat.messages import ChatDecisions, Message, build_decision, make_tool_call
from lake.records import Index, TokensRecord

_MAX_BRANCH_MESSAGES = 1_000_000
"""Messages of all paths together; branches repeat their common part."""
_RELATIONS = {"subagent_call": "subagent", "continuation": "continuation", "compaction": "continuation"}
"""The relation to its parent of a branch that begins with a semantic link, by the link's type."""


def convert_chat(value: Any, path: str) -> list[Message]:
    """Return a prompt or a completion as messages; null is empty, and an engine without chat has plain text.

    Raises:
        ShapeError: any other value.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "assistant" if path == "completion" else "user", "content": value}] if value else []
    if not isinstance(value, list):
        raise ShapeError(f"`{path}` is {type(value).__name__}; valid: a list of messages, text, or null")
    return [convert_message(raw, f"{path}[{index}]") for index, raw in enumerate(value)]


def convert_message(raw: Any, path: str) -> Message:
    """Return a message in the form of chat APIs. Raises ShapeError: not an object, or wrong tool calls."""
    if not isinstance(raw, dict):
        raise ShapeError(f"`{path}` is {type(raw).__name__}; valid: an object with role and content")
    message = {key: field for key, field in raw.items() if field is not None}
    calls = message.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise ShapeError(f"`{path}.tool_calls` is {type(calls).__name__}; valid: a list")
    if calls:
        message["tool_calls"] = [_convert_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _convert_call(raw: Any, path: str) -> dict[str, Any]:
    """Return a tool call {id, name, arguments}, a nested one of chat APIs, or JSON text of either as a nested one."""
    if isinstance(raw, str):
        try:
            raw = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ShapeError(f"`{path}` is not JSON: {error}") from error
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ShapeError(f"`{path}` has no `name`; valid: an object with id, name and arguments, or JSON text of one")
    call_id, kind = raw.get("id"), raw.get("type")
    call = make_tool_call(function["name"], function.get("arguments"), None if call_id is None else str(call_id))
    call |= omit_fields(raw, "id", "type", "function", "name", "arguments") or {}
    return call | ({"type": kind} if kind else {})


def drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object without empty fields: the tool writes every default."""
    return {key: field for key, field in fields.items() if field is not None and field not in ({}, [], "")}


class GraphNode(msgspec.Struct):
    """The fields of a node whose types are checked."""

    message: dict[str, Any]
    parent: int | None = None
    sampled: bool = False
    token_ids: list[Index] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    semantic_parents: list[Any] = []

    def list_links(self, *types: str) -> list[dict[str, Any]]:
        """Return the semantic links of some types."""
        return [link for raw in self.semantic_parents if (link := as_object(raw)).get("type") in types]


class GraphBranch(msgspec.Struct):
    """A path from a root to a leaf, and the decisions that no earlier branch has."""

    index: int
    """The tool's number of the branch: its leaf among the leaves."""
    path: list[int]
    parent: int | None = None
    """Index of the branch that it leaves; None for the trunk."""
    parent_step: int | None = None
    relation: str | None = None
    decisions: list[int] = []
    """The sampled nodes that no earlier branch has."""


def check_graph(nodes: list[GraphNode]) -> None:
    """Raise ShapeError for a parent that is not an earlier node, or a mask of another length than the tokens."""
    for index, node in enumerate(nodes):
        if node.parent is not None and not 0 <= node.parent < index:
            raise ShapeError(f"`nodes[{index}].parent` is {node.parent}; valid: an earlier node, or null for a root")
        if len(node.mask) not in (0, len(node.token_ids)):
            convert_message = f"`nodes[{index}].mask` has {len(node.mask)} entries for {len(node.token_ids)} token ids"
            raise ShapeError(convert_message)


def list_leaf_paths(nodes: list[GraphNode]) -> list[list[int]]:
    """Return the root-to-leaf paths in the order of the leaves. Raises ShapeError: together they are too long."""
    depth, has_child = [0] * len(nodes), set()
    for index, node in enumerate(nodes):
        if node.parent is not None:
            depth[index] = depth[node.parent] + 1
            has_child.add(node.parent)
    leaves = [index for index in range(len(nodes)) if index not in has_child]
    if (total := sum(depth[leaf] + 1 for leaf in leaves)) > _MAX_BRANCH_MESSAGES:
        raise ShapeError(
            f"the branches of `nodes` have {total:,} messages together; valid: {_MAX_BRANCH_MESSAGES:,} at most"
        )
    paths = []
    for leaf in leaves:
        path, at = [], leaf
        while True:
            path.append(at)
            parent = nodes[at].parent
            if parent is None:
                break
            at = parent
        paths.append(path[::-1])
    return paths


def split_branches(nodes: list[GraphNode]) -> tuple[list[GraphBranch], list[int]]:
    """Return the branches with decisions, the trunk first, parents before children; and the nodes of no such branch.

    Without any decision, the last path is a trunk without decisions.
    """
    paths = list_leaf_paths(nodes)
    if not paths:
        return [], []
    trunk = max(range(len(paths)), key=lambda index: (*_rank_trunk(nodes, paths[index]), index))
    branches: list[GraphBranch] = []
    owners: dict[int, tuple[int, int]] = {}
    covered_nodes: set[int] = set()
    for index in (trunk, *(index for index in range(len(paths)) if index != trunk)):
        path = paths[index]
        sampled = [at for at in path if nodes[at].sampled]
        decisions = [at for at in sampled if at not in owners]
        if not decisions and branches:
            continue
        branch = GraphBranch(index, path, decisions=decisions)
        if branches:
            earlier = sampled[: len(sampled) - len(decisions)]
            branch.parent, branch.parent_step = owners[earlier[-1]] if earlier else (0, None)
            branch.relation = "fork"
            for link in nodes[decisions[0]].list_links(*_RELATIONS):
                branch.relation = _RELATIONS[link["type"]]
                if isinstance(link.get("node"), int) and link["node"] in owners:
                    branch.parent, branch.parent_step = owners[link["node"]]
        owners.update({at: (len(branches), step) for step, at in enumerate(decisions)})
        covered_nodes.update(path)
        branches.append(branch)
    return branches, [index for index in range(len(nodes)) if index not in covered_nodes]


def _rank_trunk(nodes: list[GraphNode], path: list[int]) -> tuple[bool, bool]:
    """Return whether a path has a decision, and whether neither a sub-agent nor a compaction wrote it."""
    sampled = [nodes[at] for at in path if nodes[at].sampled]
    is_subagent = any(node.list_links("subagent_call") for node in sampled)
    return bool(sampled), not (is_subagent or nodes[path[-1]].list_links("compaction_attempt"))


def build_chat(branch: GraphBranch, nodes: list[GraphNode], messages: list[Message]) -> ChatDecisions:
    """Return the decisions of a branch, with their tokens; `messages` are those of the nodes."""
    decisions = set(branch.decisions)
    chat = ChatDecisions()
    since: list[Message] = []
    before: list[Message] = []
    tokens = _PathTokens()
    for at in branch.path:
        node = nodes[at]
        if not node.sampled:
            since.append(messages[at])
            tokens.add_context(node)
            continue
        if at in decisions:
            if not chat.steps:
                chat.initial_messages = [*before, *since]
            step = build_decision(messages[at], since, is_first=not chat.steps)
            step.tokens = tokens.build_record(node, len(chat.steps))
            chat.steps.append(step)
        else:
            before += [*since, messages[at]]
            tokens.add_context(node)
        since = []
    if chat.steps:
        chat.final_observation = since
    else:
        chat.initial_messages = [*before, *since]
    return chat


class _PathTokens:
    """The tokens along a path."""

    def __init__(self) -> None:
        self._added: list[int] = []
        """Tokens since the last decision with a record, or since the root."""
        self._last: int | None = None
        self._is_exact = True

    def add_context(self, node: GraphNode) -> None:
        """Add a node whose tokens are context."""
        self._is_exact = self._is_exact and bool(node.token_ids or not node.sampled)
        self._added += node.token_ids

    def build_record(self, node: GraphNode, step: int) -> TokensRecord | None:
        """Return the tokens of a decision; None if they are uncertain."""
        if not self._is_exact or True not in node.mask:
            self.add_context(node)
            return None
        first = node.mask.index(True)
        end = len(node.mask) - node.mask[::-1].index(True)
        mask = node.mask[first:end]
        logprobs: list[float] | None = None
        if node.logprobs and len(node.logprobs) == sum(mask):
            sampled_logprobs = iter(node.logprobs)
            logprobs = [next(sampled_logprobs) if is_sampled else 0.0 for is_sampled in mask]
        record = TokensRecord(
            context_ids=[*self._added, *node.token_ids[:first]],
            action_ids=node.token_ids[first:end],
            action_logprobs=logprobs,
            action_mask=None if all(mask) else mask,
            prefix_step_index=self._last,
        )
        self._added, self._last = node.token_ids[end:], step
        return record
