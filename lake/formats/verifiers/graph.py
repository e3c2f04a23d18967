"""The message graph of a verifiers trace: its branches as conversations, and the exact tokens along them.

A node is a message and the tokens that it adds to those of its parent. A branch is a path from a root to a leaf. The
trunk is the branch that ends in the last leaf, which is what the tool itself shows as the conversation, unless a
sub-agent or an attempt to compact the history wrote it. Another branch begins where it leaves the branches before it:
what stands before its first own decision is its initial messages, and the decision it forks from is its parent's step.
So every sampled node is one decision of one branch.

The tokens of a path are the concatenation of its nodes'. The part of a sampled node before its first sampled token (the
header of the chat template) is context. Behind a sampled node without tokens nothing is known for sure.
"""

from typing import Any

import msgspec

from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import Message, decision
from lake.formats.verifiers.messages import as_object
from lake.records import Index, StepRecord, TokensRecord

_MOST_REPEATED = 1_000_000
"""Messages of all paths together; branches repeat what they share."""
_LINKS = {"subagent_call": "subagent", "continuation": "continuation", "compaction": "continuation"}
"""Semantic links -> what the branch that begins with one is to its parent."""


class Node(msgspec.Struct):
    """What is needed of a node."""

    message: dict[str, Any]
    parent: int | None = None
    sampled: bool = False
    token_ids: list[Index] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    semantic_parents: list[Any] = []

    def links(self, *types: str) -> list[dict[str, Any]]:
        """Semantic links of some types."""
        return [link for given in self.semantic_parents if (link := as_object(given)).get("type") in types]


class Branch(msgspec.Struct):
    """A path, and what of it is its own."""

    index: int
    """Among the leaves, as the tool numbers branches."""
    path: list[int]
    parent: int | None = None
    """Place of the branch that it leaves; None for the trunk."""
    parent_step: int | None = None
    relation: str | None = None
    decisions: list[int] = []
    """Its own sampled nodes."""


def check(nodes: list[Node]) -> None:
    """Raises ShapeError: a parent that is no earlier node, or a mask of another length than the tokens."""
    for index, node in enumerate(nodes):
        if node.parent is not None and not 0 <= node.parent < index:
            raise ShapeError(f"`nodes[{index}].parent` is {node.parent}; valid: an earlier node, or null for a root")
        if len(node.mask) not in (0, len(node.token_ids)):
            message = f"`nodes[{index}].mask` has {len(node.mask)} entries for {len(node.token_ids)} token ids"
            raise ShapeError(message)


def leaf_paths(nodes: list[Node]) -> list[list[int]]:
    """Root-to-leaf paths in the order of the leaves. Raises ShapeError: together they are too long."""
    depth, has_child = [0] * len(nodes), set()
    for index, node in enumerate(nodes):
        if node.parent is not None:
            depth[index] = depth[node.parent] + 1
            has_child.add(node.parent)
    leaves = [index for index in range(len(nodes)) if index not in has_child]
    if (total := sum(depth[leaf] + 1 for leaf in leaves)) > _MOST_REPEATED:
        raise ShapeError(f"the branches of `nodes` have {total:,} messages together; valid: {_MOST_REPEATED:,} at most")
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


def branches(nodes: list[Node]) -> tuple[list[Branch], list[int]]:
    """The branches that decide something, the trunk first, parents before what left them; and the nodes of no such.

    Without any decision, the last path is a trunk without decisions.
    """
    paths = leaf_paths(nodes)
    if not paths:
        return [], []
    trunk = max(range(len(paths)), key=lambda index: (*_trunk_rank(nodes, paths[index]), index))
    found: list[Branch] = []
    owner: dict[int, tuple[int, int]] = {}
    told: set[int] = set()
    for index in (trunk, *(index for index in range(len(paths)) if index != trunk)):
        path = paths[index]
        sampled = [at for at in path if nodes[at].sampled]
        own = [at for at in sampled if at not in owner]
        if not own and found:
            continue
        branch = Branch(index, path, decisions=own)
        if found:
            shared = sampled[: len(sampled) - len(own)]
            branch.parent, branch.parent_step = owner[shared[-1]] if shared else (0, None)
            branch.relation = "fork"
            for link in nodes[own[0]].links(*_LINKS):
                branch.relation = _LINKS[link["type"]]
                if isinstance(link.get("node"), int) and link["node"] in owner:
                    branch.parent, branch.parent_step = owner[link["node"]]
        owner.update({at: (len(found), step) for step, at in enumerate(own)})
        told.update(path)
        found.append(branch)
    return found, [index for index in range(len(nodes)) if index not in told]


def _trunk_rank(nodes: list[Node], path: list[int]) -> tuple[bool, bool]:
    """The path that has a decision, and was not written by a sub-agent or for a compaction, is the trunk."""
    sampled = [nodes[at] for at in path if nodes[at].sampled]
    is_other = any(node.links("subagent_call") for node in sampled) or bool(nodes[path[-1]].links("compaction_attempt"))
    return bool(sampled), not is_other


class Talk(msgspec.Struct):
    """A branch as decisions."""

    initial_messages: list[Message] = []
    steps: list[StepRecord] = []
    final_observation: list[Message] = []


def talk(branch: Branch, nodes: list[Node], messages: list[Message]) -> Talk:
    """The decisions of a branch, with their tokens; `messages` are those of the nodes."""
    own = set(branch.decisions)
    found = Talk()
    since: list[Message] = []
    before: list[Message] = []
    tokens = _Tokens()
    for at in branch.path:
        node = nodes[at]
        if not node.sampled:
            since.append(messages[at])
            tokens.observe(node)
            continue
        if at in own:
            if not found.steps:
                found.initial_messages = [*before, *since]
            step = decision(messages[at], since, is_first=not found.steps)
            step.tokens = tokens.act(node, len(found.steps))
            found.steps.append(step)
        else:
            before += [*since, messages[at]]
            tokens.observe(node)
        since = []
    if found.steps:
        found.final_observation = since
    else:
        found.initial_messages = [*before, *since]
    return found


class _Tokens:
    """The tokens along a path."""

    def __init__(self) -> None:
        self._added: list[int] = []
        """Since the last decision that has a record, or since the root."""
        self._last: int | None = None
        self._is_exact = True

    def observe(self, node: Node) -> None:
        """Tokens that are context."""
        self._is_exact = self._is_exact and bool(node.token_ids or not node.sampled)
        self._added += node.token_ids

    def act(self, node: Node, step: int) -> TokensRecord | None:
        """The record of a decision; None if its tokens are not known for sure."""
        if not self._is_exact or True not in node.mask:
            self.observe(node)
            return None
        first = node.mask.index(True)
        end = len(node.mask) - node.mask[::-1].index(True)
        mask = node.mask[first:end]
        logprobs: list[float] | None = None
        if node.logprobs and len(node.logprobs) == sum(mask):
            values = iter(node.logprobs)
            logprobs = [next(values) if is_sampled else 0.0 for is_sampled in mask]
        record = TokensRecord(
            context_ids=[*self._added, *node.token_ids[:first]],
            action_ids=node.token_ids[first:end],
            action_logprobs=logprobs,
            action_mask=None if all(mask) else mask,
            prefix_step_index=self._last,
        )
        self._added, self._last = node.token_ids[end:], step
        return record
